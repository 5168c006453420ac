"""What version 0.1 has stored is read by this one, whole: docs/releases.md promises it.

The definition is that of 0.1, and the jobs are as a real API server had stored them under it: seven were served by the
operator of 0.1, two hold what those lack, so that every field of the definition is in one of them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from ddp_operator.api.cel import check_rules
from ddp_operator.api.crd import build_crd
from ddp_operator.api.parse import parse_resource
from tests.support import ROOT

FOLDER = ROOT / "tests/golden/stored/0.1"
JOBS: list[dict[str, Any]] = json.loads((FOLDER / "jobs.json").read_text(encoding="utf-8"))
each = pytest.mark.parametrize("job", JOBS, ids=lambda job: job["metadata"]["name"])


def schema(crd: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    return found


OLDER = schema(json.loads((FOLDER / "crd.json").read_text(encoding="utf-8")))


def fields(node: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield every field below a schema by its path."""
    for name, child in node.get("properties", {}).items():
        yield f"{path}.{name}", child
        yield from fields(child, f"{path}.{name}")
    if "items" in node:
        yield from fields(node["items"], f"{path}[]")


def held(value: Any, path: str = "") -> Iterator[str]:
    """Yield the paths of all that a value holds, as ``fields`` names them."""
    if isinstance(value, dict):
        for name, child in value.items():
            yield f"{path}.{name}"
            yield from held(child, f"{path}.{name}")
    elif isinstance(value, list):
        for child in value:
            yield from held(child, f"{path}[]")


def test_every_field_of_the_older_definition_is_in_a_stored_job() -> None:
    wanted = {path for path, _ in fields(OLDER) if path.startswith((".spec", ".status"))}
    assert wanted - {path for job in JOBS for path in held(job)} == set()
    assert {job["status"]["phase"] for job in JOBS if "status" in job} >= {
        "Pending", "Running", "Restarting", "Suspended", "Succeeded", "Failed",
    }  # fmt: skip


def test_no_field_is_gone_or_has_another_type() -> None:
    newer = dict(fields(schema(build_crd())))
    for path, old in fields(OLDER):
        new = newer.get(path)
        assert new is not None, f"{path} is gone: the API server would drop it from stored jobs"
        for keyword in ("type", "format", "x-kubernetes-int-or-string", "x-kubernetes-preserve-unknown-fields"):
            assert new.get(keyword) == old.get(keyword), f"{path}: another {keyword}"
        assert set(old.get("enum", ())) <= set(new.get("enum", old.get("enum", ()))), f"{path}: a value is refused now"
        assert new.get("default", old.get("default")) == old.get("default"), f"{path}: another default"
        assert set(new.get("required", ())) <= set(old.get("required", ())), f"{path}: more is required"


@each
def test_job_is_read_whole(job: dict[str, Any]) -> None:
    read = parse_resource(job)
    assert missing(job["spec"], plain(read.spec), "spec") == []
    assert missing(job.get("status", {}), plain(read.status), "status") == []


@each
def test_job_may_be_written_again_as_it_is(job: dict[str, Any]) -> None:
    """An operator's write of the status, or a user's of a label, is held against the rules of today."""
    assert check_rules(job, job) == []


def plain(value: Any) -> Any:
    """Return what was read as JSON has it, defaults included."""
    if isinstance(value, msgspec.Struct):
        return {field.encode_name: plain(getattr(value, field.name)) for field in msgspec.structs.fields(value)}
    return [plain(item) for item in value] if isinstance(value, tuple) else msgspec.to_builtins(value)


def missing(stored: Any, read: Any, path: str) -> list[str]:
    """Return the places of a stored value where what was read is not the same."""
    if isinstance(stored, dict) and isinstance(read, dict):
        return [lost for name in stored for lost in missing(stored[name], read.get(name), f"{path}.{name}")]
    if isinstance(stored, list) and isinstance(read, list) and len(stored) == len(read):
        pairs = enumerate(zip(stored, read, strict=True))
        return [lost for number, pair in pairs for lost in missing(*pair, f"{path}[{number}]")]
    return [] if stored == read else [f"{path}: {stored!r} became {read!r}"]

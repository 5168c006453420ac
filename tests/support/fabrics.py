"""The profiles of deploy/profiles for the network between nodes."""

from __future__ import annotations

from typing import Any, Final

import yaml

from ddp_operator.api.completion import complete_spec
from ddp_operator.api.job_file import find_values
from ddp_operator.features import SCHEMA
from tests.support import ROOT
from tests.support.decisions import present

FABRICS: Final = ("efa", "ib", "roce", "socket", "tcpxo")


def read_manifest(name: str) -> Any:
    """Return a profile as its file has it."""
    return yaml.safe_load((ROOT / "deploy" / "profiles" / f"fabric-{name}.yaml").read_text(encoding="utf-8"))


def read_fabric(name: str) -> Any:
    """Return the values of a profile."""
    return read_manifest(name)["spec"]["job"]


def complete(name: str, **own: Any) -> dict[str, Any]:
    """Return the spec of a job that names the profile."""
    reference = {"name": f"fabric-{name}"}
    raw = {"metadata": {"name": "train"}, "spec": {**own, "profileRef": reference}}
    values = present(find_values(raw, SCHEMA, lambda *_: read_manifest(name)))
    return {**complete_spec(SCHEMA, raw | {"spec": own}, values)}

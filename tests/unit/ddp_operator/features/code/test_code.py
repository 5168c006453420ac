"""``spec.code``: its rules, the folder that it takes, and the revision in the status."""

from __future__ import annotations

from typing import Any

import pytest

from ddp_operator.decide.hooks import Hooks
from ddp_operator.features.code import FEATURE
from tests.support.decisions import RUNNING, present, run_pass
from tests.support.fields import check_fields, list_fixed

PATH = "spec.code"
CODE = {"configMapName": "ddp-code-1", "digest": "1" * 64}
IMAGE = {"image": f"example.com:5000/team/code@sha256:{'0' * 64}", "digest": "f" * 64}
CLAIM = {"claimName": "code", "path": "a/b.tar.gz", "digest": "0" * 64}


def test_one_place_a_digest_and_plain_paths_are_required() -> None:
    bad = {
        PATH: ({"digest": "0" * 64}, CODE | IMAGE, CODE | {"claimName": "code", "path": "a"}),
        f"{PATH}.image": ("example.com/code", "example.com/code:1", f"a b@sha256:{'0' * 64}", f"@sha256:{'0' * 64}"),
        f"{PATH}.path": ("code.tar.gz", "/code.tar.gz", "../code.tar.gz"),
        f"{PATH}.digest": ("", "0" * 63, "G" * 64),
        f"{PATH}.mountPath": ("/", "", "code", "/a/", "/a/../b", "/opt/ddp-code", "/a:b"),
        f"{PATH}.pip": ("/requirements.txt", "../requirements.txt", "a/.."),
    }
    full = CODE | {"mountPath": "/src", "pip": "a/requirements..txt", "commit": "1", "dirty": True}
    check_fields(FEATURE, {PATH: (full, CLAIM, IMAGE)}, bad)


def test_it_is_fixed_once_pod_has_run() -> None:
    assert list_fixed(FEATURE, PATH, CODE, CODE | {"digest": "2" * 64}) == [True, True]


@pytest.mark.parametrize(
    ("commit", "dirty", "revision"),
    [("a" * 40, False, "a" * 12), ("a" * 40, True, f"{'a' * 12}-dirty {'1' * 12}"), (None, None, "1" * 12)],
)
def test_revision_is_commit_or_digest(commit: str | None, dirty: bool | None, revision: str) -> None:
    def run(**spec: Any) -> Any:
        return run_pass(*RUNNING, hooks=Hooks((FEATURE,)), **spec).status.code

    written = CODE if commit is None else CODE | {"commit": commit, "dirty": dirty}
    assert present(run(code=written)).revision == revision
    assert run() is None

"""``spec.code``: its rules, the folder that it takes, and its revision."""

from __future__ import annotations

import pytest

from ddp_operator.api.code_source import describe_revision
from ddp_operator.features.code import FEATURE
from tests.support.fields import check_fields, list_fixed

PATH = "spec.code"
CODE = {"source": "configmap/ddp-code-1", "digest": "1" * 64}
IMAGE = {"source": f"image/example.com:5000/team/code@sha256:{'0' * 64}", "digest": "f" * 64}
CLAIM = {"source": "claim/code/a/b.tar.gz", "digest": "0" * 64}


def test_one_place_a_digest_and_plain_paths_are_required() -> None:
    bad = {
        f"{PATH}.source": (
            "",
            "configmap/",
            "configmap/a/b",
            "claim/a",
            "claim/a/",
            "claim/a//b",
            "claim/a/../b",
            "claim/a/b/..",
            "a/b",
            "image/example.com/code",
            "image/example.com/code:1",
            f"image/a b@sha256:{'0' * 64}",
            f"image/@sha256:{'0' * 64}",
        ),
        f"{PATH}.digest": ("", "0" * 63, "G" * 64),
        f"{PATH}.mountPath": ("/", "", "code", "/a/", "/a/../b", "/opt/ddp-code", "/a:b"),
        f"{PATH}.pip": ("/requirements.txt", "../requirements.txt", "a/.."),
        f"{PATH}.path": ("a",),
    }
    full = CODE | {"mountPath": "/src", "pip": "a/requirements..txt", "revision": "1-dirty 2"}
    check_fields(FEATURE, {PATH: (full, CLAIM, IMAGE)}, bad)


def test_it_is_fixed_once_pod_has_run() -> None:
    assert list_fixed(FEATURE, PATH, CODE, CODE | {"digest": "2" * 64}) == [True, True]


@pytest.mark.parametrize(
    ("commit", "dirty", "revision"),
    [("a" * 40, False, "a" * 12), ("a" * 40, True, f"{'a' * 12}-dirty {'1' * 12}"), ("", False, "1" * 12)],
)
def test_revision_is_commit_or_digest(commit: str, dirty: bool, revision: str) -> None:
    assert describe_revision("1" * 64, commit, is_dirty=dirty) == revision

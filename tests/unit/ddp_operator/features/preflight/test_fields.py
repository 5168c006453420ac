"""``spec.preflight``: its rules."""

from __future__ import annotations

from typing import Any

import pytest

from ddp_operator.decide.hooks import build_schema
from ddp_operator.features.preflight import FEATURE
from tests.support.fields import change, check_fields, list_fixed, list_refused, store

SCHEMA = build_schema((FEATURE,))
REQUIRED = {"spec.preflight.require": True}
ALL_RANKS = {"spec.preflight": {"minMegabytesPerSecond": 5000, "checks": ["tcp"]}}
PAIR = {"spec.preflight.minPairMegabytesPerSecond": 5000}


def test_values_have_bounds() -> None:
    bad = {
        "spec.preflight.minMegabytesPerSecond": (-1, 1),
        "spec.preflight.transports": (["x"] * 9, [""], ["x" * 41]),
        "spec.preflight.minPairMegabytesPerSecond": (-1, 10**7 + 1, 1),
        "spec.preflight.require": (),
    }
    networks = (
        {"require": True, "minPairMegabytesPerSecond": 10**7},
        {"minPairMegabytesPerSecond": 0},
    )
    off = change(change(store(SCHEMA), "spec.preflight.mode", "Off"), "spec.preflight.require", True)
    assert list_refused(off, SCHEMA) == ["spec.preflight.require"]
    check_fields(FEATURE, {"spec.preflight": networks}, bad, others=(off,))


@pytest.mark.parametrize(
    ("changes", "paths"),
    [
        (REQUIRED | {"spec.preflight": {"mode": "Warn"}}, []),
        (REQUIRED | {"spec.preflight": {}}, []),
        (REQUIRED, []),
        (ALL_RANKS, ["spec.preflight.minMegabytesPerSecond"]),
        (ALL_RANKS | {"spec.preflight.checks": ["pairs"]}, []),
        (ALL_RANKS | {"spec.preflight.require": True}, []),
        (PAIR, ["spec.preflight.minPairMegabytesPerSecond"]),
        (PAIR | {"spec.preflight.checks": ["pairs"]}, []),
        (PAIR | {"spec.preflight.require": True}, []),
    ],
    ids=lambda value: str(value)[:60],
)
def test_rule_that_depends_on_another_field(changes: dict[str, Any], paths: list[str]) -> None:
    item = store(SCHEMA)
    for path, value in changes.items():
        item = change(item, path, value)
    assert list_refused(item, SCHEMA) == paths


@pytest.mark.parametrize(("path", "value"), [("spec.preflight.mode", "Off"), ("spec.preflight.transports", ["IB"])])
def test_they_are_fixed_once_pod_has_run(path: str, value: Any) -> None:
    before = "Warn" if path.endswith("mode") else {}
    assert list_fixed(FEATURE, path, before, value) == [True, True]

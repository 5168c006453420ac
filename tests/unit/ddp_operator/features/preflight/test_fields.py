"""``spec.preflight`` and ``spec.network``: their rules."""

from __future__ import annotations

from typing import Any

import pytest

from ddp_operator.decide.hooks import build_schema
from ddp_operator.features.preflight import FEATURE
from tests.support.fields import change, check_fields, list_fixed, list_refused, store

SCHEMA = build_schema((FEATURE,))
REQUIRED = {"spec.network": {"require": True}}
ALL_RANKS = {"spec.preflight": {"minMegabytesPerSecond": 5000, "checks": ["tcp"]}}
PAIR = {"spec.network.minPairMegabytesPerSecond": 5000}


def test_values_have_bounds() -> None:
    bad = {
        "spec.preflight.minMegabytesPerSecond": (-1, 1),
        "spec.network.profile": ("ib", "socket"),
        "spec.network.transports": (["x"] * 9, [""], ["x" * 41]),
        "spec.network.minPairMegabytesPerSecond": (-1, 10**7 + 1, 1),
        "spec.network.require": (),
    }
    networks = (
        {"profile": "auto", "require": True, "minPairMegabytesPerSecond": 10**7},
        {"minPairMegabytesPerSecond": 0},
    )
    off = change(change(store(SCHEMA), "spec.preflight.mode", "Off"), "spec.network.require", True)
    assert list_refused(off, SCHEMA) == ["spec.network.require"]
    check_fields(FEATURE, {"spec.network": networks}, bad, others=(off,))


@pytest.mark.parametrize(
    ("changes", "paths"),
    [
        (REQUIRED | {"spec.preflight": {"mode": "Warn"}}, []),
        (REQUIRED | {"spec.preflight": {}}, []),
        (REQUIRED, []),
        (ALL_RANKS, ["spec.preflight.minMegabytesPerSecond"]),
        (ALL_RANKS | {"spec.preflight.checks": ["pairs"]}, []),
        (ALL_RANKS | {"spec.network.require": True}, []),
        (PAIR, ["spec.network.minPairMegabytesPerSecond"]),
        (PAIR | {"spec.preflight.checks": ["pairs"]}, []),
        (PAIR | {"spec.network.require": True}, []),
    ],
    ids=lambda value: str(value)[:60],
)
def test_rule_that_depends_on_another_field(changes: dict[str, Any], paths: list[str]) -> None:
    item = store(SCHEMA)
    for path, value in changes.items():
        item = change(item, path, value)
    assert list_refused(item, SCHEMA) == paths


@pytest.mark.parametrize(("path", "value"), [("spec.preflight.mode", "Off"), ("spec.network", {"transports": ["IB"]})])
def test_they_are_fixed_once_pod_has_run(path: str, value: Any) -> None:
    before = "Warn" if path.endswith("mode") else {}
    assert list_fixed(FEATURE, path, before, value) == [True, True]

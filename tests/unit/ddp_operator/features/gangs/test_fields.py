"""The fields of ``spec.scheduling`` for gangs: their rules."""

from __future__ import annotations

from ddp_operator.decide.hooks import build_schema
from ddp_operator.features.gangs import FEATURE
from tests.support.fields import change, check_fields, list_fixed, list_refused, store

SCHEMA = build_schema((FEATURE,))
BAD_NAMES = ("", "A", "-a", "a-", "a_b", "a" * 254)


def test_values_have_bounds_and_need_their_scheduler() -> None:
    good = (
        {"gang": "Volcano", "queue": "a.b-c"},
        {"gang": "Native", "gangTopology": "example.com/rack", "disruptionMode": "All", "sharedClaims": ["fabric"]},
        {"gang": "None", "sharedClaims": []},
    )
    bad = {
        "spec.scheduling.queue": ("train", *BAD_NAMES),
        "spec.scheduling.gangTopology": ("zone", "", "a b"),
        "spec.scheduling.disruptionMode": ("All",),
        "spec.scheduling.sharedClaims": (["fabric"],),
    }
    check_fields(FEATURE, {"spec.scheduling": good}, bad)


def test_name_is_refused_beside_its_scheduler() -> None:
    volcano = store(SCHEMA, scheduling={"gang": "Volcano", "queue": "a"})
    for name in BAD_NAMES:
        assert list_refused(change(volcano, "spec.scheduling.queue", name), SCHEMA) == ["spec.scheduling.queue"]


def test_started_job_keeps_its_gang() -> None:
    assert list_fixed(FEATURE, "spec.scheduling.gang", "None", "Native") == [True, True]

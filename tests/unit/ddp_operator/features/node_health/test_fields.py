"""``recovery.nodeHealth``: what it may name."""

from ddp_operator.features.node_health import FEATURE
from tests.support.fields import check_fields, list_fixed

PATH = "spec.recovery.nodeHealth"


def test_names_are_required_and_bounded() -> None:
    good = {PATH: ({"conditions": ["Xid*"], "action": "Migrate"}, {"taints": ["nvsentinel.dev/*"]})}
    bad = {
        PATH: ({}, {"action": "Migrate"}, {"conditions": [], "taints": []}),
        f"{PATH}.conditions": ([""], ["x"] * 33),
        f"{PATH}.taints": (["x" * 317], ["*x" * 9]),
    }
    check_fields(FEATURE, good, bad)


def test_running_job_may_change_it() -> None:
    assert list_fixed(FEATURE, PATH, {"taints": ["a"]}, {"taints": ["b"]}) == [False, True]

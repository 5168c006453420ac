"""``spec.networkPolicy``: its rules."""

from __future__ import annotations

from ddp_operator.api.parse import parse_resource
from ddp_operator.decide.hooks import build_schema
from ddp_operator.features.network_policy import FEATURE
from ddp_operator.features.network_policy.fields import build_policy
from tests.support.fields import change, check_fields, list_fixed, list_refused, store

SCHEMA = build_schema((FEATURE,))


def test_members_need_policy() -> None:
    policies = (
        {"enabled": True, "egressCidrs": ["10.0.0.0/8"]},
        {"enabled": True, "metricsFrom": []},
        {"egressCidrs": []},
    )
    bad = {"spec.networkPolicy.egressCidrs": (["10.0.0.0/8"],)}
    check_fields(FEATURE, {"spec.networkPolicy": policies}, bad)


def test_started_job_keeps_it() -> None:
    assert list_fixed(FEATURE, "spec.networkPolicy.enabled", False, True) == [True, True]


def test_object_that_is_created_once_is_built_from_fixed_fields() -> None:
    policy = {"enabled": True, "egressCidrs": ["10.0.0.0/8"], "metricsFrom": [{"podSelector": {}}]}
    old = store(SCHEMA, networkPolicy=policy) | {"status": {"attempt": 1}}
    before = build_policy(parse_resource(old, SCHEMA), 1)
    changes = {"networkPolicy.egressCidrs": [], "networkPolicy.metricsFrom": [], "metrics.port": 30001}
    for path, value in changes.items():
        new = change(old, f"spec.{path}", value)
        assert build_policy(parse_resource(new, SCHEMA), 1) != before
        assert list_refused(new, SCHEMA, old) == ["spec"]
    assert build_policy(parse_resource(change(old, "spec.nodes", 9), SCHEMA), 9) == before

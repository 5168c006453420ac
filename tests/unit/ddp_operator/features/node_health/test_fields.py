"""``recovery.nodeHealth``: what it may name."""

import json

import pytest

from ddp_operator.api.errors import InvalidManifest
from ddp_operator.api.job_file import find_among, parse_manifest
from ddp_operator.decide.hooks import build_schema
from ddp_operator.features.node_health import FEATURE, FIELDS
from tests.support.builders import profile, resource
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


def test_names_may_be_those_of_profile() -> None:
    schema = build_schema((FEATURE,))
    text = json.dumps(resource(profileRef={"name": "gpu"}, recovery={"nodeHealth": {"action": "Report"}}))
    named = profile({"recovery": {"nodeHealth": {"taints": ["x"]}}})
    health = FIELDS.read(parse_manifest(text, schema, profiles=find_among([named])).job.spec).node_health
    assert health is not None
    assert (health.action, health.taints) == ("Report", ("x",))
    with pytest.raises(InvalidManifest, match=f"^{PATH}: "):
        parse_manifest(text, schema, profiles=find_among([profile({})]))

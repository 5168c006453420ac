"""Policies by default: of the operator's settings, and of a profile."""

from __future__ import annotations

from typing import Any

import pytest

from ddp_operator.api import constants
from ddp_operator.api.completion import complete_spec
from ddp_operator.api.errors import InvalidManifest
from ddp_operator.decide.hooks import Hooks, build_schema
from ddp_operator.features import profiles
from ddp_operator.features.network_policy import FEATURE
from ddp_operator.features.profiles.defaults import read_job_defaults
from ddp_operator.features.profiles.service import Profiles
from ddp_operator.features.profiles.values import read_profile
from tests.support.builders import Json, profile, resource, template, trainer
from tests.support.decisions import present
from tests.support.fake_cluster import ReconcilerHarness

SCHEMA = build_schema((FEATURE, profiles.FEATURE))
CLOSED: Json = {"networkPolicy": {"enabled": True, "egressCidrs": ["10.0.0.0/8"]}}


def build(given: Json = CLOSED, source: Json | None = None, **spec: Any) -> ReconcilerHarness:
    """Return a job whose operator was started with these defaults. ``source``: the values of its profile."""
    reference = {} if source is None else {"profileRef": {"name": "gpu"}}
    harness = ReconcilerHarness(resource(**{"nodes": 2, **reference, **spec}))
    if source is not None:
        harness.cluster.add(profile(source))
    return change_defaults(harness, given)


def change_defaults(harness: ReconcilerHarness, given: Json) -> ReconcilerHarness:
    service = Profiles(harness.cluster.read_profile, read_job_defaults(given, SCHEMA))
    harness.hooks = Hooks((FEATURE, profiles.FEATURE), {profiles.FEATURE.name: service})
    harness.restart_operator()
    return harness


def list_peers(harness: ReconcilerHarness) -> list[str]:
    """Return the peers that the NetworkPolicy permits beside the pods and DNS."""
    policies = harness.cluster.store.list("NetworkPolicy")
    if not policies:
        return ["everything"]
    [policy] = policies
    return [to["ipBlock"]["cidr"] for rule in policy["spec"]["egress"][2:] for to in rule["to"]]


@pytest.mark.parametrize(
    ("spec", "peers"),
    [
        ({}, ["10.0.0.0/8"]),
        ({"networkPolicy": {"enabled": False}}, ["everything"]),
        ({"networkPolicy": {"enabled": True, "metricsFrom": []}}, ["10.0.0.0/8"]),
    ],
)
async def test_job_completes_or_disables_policy_of_settings(spec: Json, peers: list[str]) -> None:
    assert list_peers(await build(**spec).train()) == peers


async def test_defaults_are_under_values_of_profile() -> None:
    harness = await build(source={"networkPolicy": {"egressCidrs": ["192.168.0.0/16"]}}).train()
    assert list_peers(harness) == ["192.168.0.0/16"]
    taken = present(harness.status.profile)
    assert (taken.name, taken.job["networkPolicy"]["enabled"]) == ("gpu", True)


async def test_members_are_dropped_with_policy_of_profile() -> None:
    harness = await build({}, CLOSED, networkPolicy={"enabled": False}).train()
    assert (harness.jobs(), list_peers(harness)) == (["train-1"], ["everything"])


async def test_started_job_keeps_its_policy() -> None:
    harness = await build({}).train()
    change_defaults(harness, CLOSED)
    harness.end_pod(0, constants.EXIT_RETRYABLE)
    await harness.train()
    assert (harness.status.attempt, list_peers(harness)) == (2, ["everything"])


async def test_unstarted_job_with_host_network_is_refused_until_policy_is_gone() -> None:
    harness = await build(template=template(trainer(), hostNetwork=True)).settle()
    assert harness.status.phase == "Rejected"
    message = harness.condition("Accepted").message
    assert "spec.networkPolicy.enabled: has no effect on pods with spec.template.spec.hostNetwork" in message
    assert "set networkPolicy.enabled to false" in message
    await change_defaults(harness, {"networkPolicy": {"enabled": False}}).settle()
    assert (harness.jobs(), harness.status.profile) == (["train-1"], None)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"nodes": 3}, 'unknown field "nodes"; known fields: securityProfile, networkPolicy'),
        ({"networkPolicy": {"enabled": "yes"}}, "spec.networkPolicy.enabled"),
        ({"networkPolicy": {"enabled": True, "egressCidrs": ["10.0.0.1/8"]}}, "egressCidrs[0]"),
        ({"networkPolicy": {"enabled": True, "metricsFrom": [{}]}}, "metricsFrom[0]"),
    ],
)
def test_defaults_that_cannot_be_used_are_refused(given: Json, words: str) -> None:
    with pytest.raises(InvalidManifest) as caught:
        read_job_defaults(given, SCHEMA)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("own", "kept"),
    [
        ({"enabled": False}, {"enabled": False}),
        ({"enabled": False, "metricsFrom": []}, {"enabled": False, "metricsFrom": []}),
        ({}, {"enabled": True, "egressCidrs": ["10.0.0.0/8"]}),
    ],
)
def test_job_that_disables_policy_takes_nothing_of_it_from_profile(own: Any, kept: Any) -> None:
    written = resource(networkPolicy=own)
    completed = complete_spec(SCHEMA, written, read_profile(profile(CLOSED)))
    assert completed == written["spec"] | {"networkPolicy": kept}

"""The placement of pods by spec.scheduling."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ddp_operator.api import child_names
from ddp_operator.decide.hooks import Feature, Hooks
from ddp_operator.features import placement
from ddp_operator.features.placement import FIELDS
from tests.support.builders import template
from tests.support.fake_cluster import ReconcilerHarness
from tests.support.planned_children import pod_of


class TestPlacement:
    def test_pack_prefers_nodes_of_same_attempt(self) -> None:
        own = {"podAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": ["mine"]}, "nodeAffinity": {"a": 1}}
        pod = pod_of(2, scheduling={"placement": "Pack"}, template=template(affinity=own))["spec"]
        mine, ours = pod["affinity"]["podAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
        assert (mine, pod["affinity"]["nodeAffinity"]) == ("mine", {"a": 1})
        assert ours["podAffinityTerm"]["topologyKey"] == "kubernetes.io/hostname"
        assert ours["podAffinityTerm"]["labelSelector"]["matchLabels"] == child_names.child_labels("train", 2)


def test_scheduler_of_job_is_that_of_pods() -> None:
    assert pod_of(scheduling={"schedulerName": "mine"})["spec"]["schedulerName"] == "mine"


def test_priority_class_of_job_is_that_of_pods() -> None:
    assert pod_of(scheduling={"priorityClassName": "high"})["spec"]["priorityClassName"] == "high"


@pytest.mark.parametrize(("scheduling", "starts"), [({}, True), ({"schedulerName": "mine"}, False)])
async def test_job_that_names_a_scheduler_waits_after_a_fault(scheduling: dict[str, Any], starts: bool) -> None:
    def fail(*_: Any) -> Any:
        raise ZeroDivisionError

    feature = Feature("placement", maturity="stable", page="x.md", fields=replace(FIELDS, pod=fail))
    harness = await ReconcilerHarness(hooks=Hooks((feature,)), scheduling=scheduling).settle()
    assert bool(harness.jobs()) == starts


async def test_priority_class_of_job_precedes_that_of_its_template() -> None:
    own = template(priorityClassName="low")  # which another feature refuses
    scheduling = {"priorityClassName": "high"}
    harness = ReconcilerHarness(hooks=Hooks((placement.FEATURE,)), scheduling=scheduling, template=own)
    (pod, _) = (await harness.settle()).pods()
    assert pod["spec"]["priorityClassName"] == "high"

"""Taints of components that drain a node: which ones count, and what a job does."""

from __future__ import annotations

from typing import Any

import pytest

from ddp_operator.api.job import DDPTrainingJob
from ddp_operator.decide import conditions as c
from ddp_operator.decide.hooks import Feature, Hooks, NodeHook
from ddp_operator.decide.losses import LOOK_SECONDS
from ddp_operator.decide.state import Trouble
from ddp_operator.features import drains
from ddp_operator.features.drains.taints import DRAIN_TAINTS
from tests.support.builders import job
from tests.support.decisions import present
from tests.support.fake_cluster import ReconcilerHarness


def judge_health(job: DDPTrainingJob, raw: Any) -> Trouble | None:
    """Judge as the feature node health does, which may not be installed."""
    health = job.spec.recovery.node_health
    ill = any(taint["key"] == "ill" for taint in raw["spec"]["taints"])
    return Trouble("taint ill:E", planned=False, leaves=health.action == "Migrate") if health and ill else None


HEALTH = Feature("health", maturity="beta", page="x.md", nodes=NodeHook(lambda _: True, judge_health))
HOOKS = Hooks((HEALTH, drains.FEATURE))


def judge(node: Any, **recovery: Any) -> Any:
    return HOOKS.observe(job(recovery=recovery), {}).judge_node(node)


@pytest.mark.parametrize(
    ("action", "key", "leaves"),
    [
        ("Move", "karpenter.sh/disrupted", True),
        ("Report", "karpenter.sh/disrupted", False),
        (None, "karpenter.sh/disrupted", None),
        ("Move", "node.kubernetes.io/unschedulable", None),
        ("Move", "DeletionCandidateOfClusterAutoscaler", None),
    ],
)
def test_taint_of_draining_component_counts_and_cordon_does_not(action: Any, key: str, leaves: bool | None) -> None:
    node = {"spec": {"unschedulable": True, "taints": [{"key": key, "effect": "NoSchedule"}]}}
    trouble = judge(node, drains=action)
    assert (None if trouble is None else trouble.leaves) is leaves
    if trouble is not None:
        assert trouble.message == f"{DRAIN_TAINTS[key]} drains it (taint {key}:NoSchedule)"


@pytest.mark.parametrize(("health", "action", "leaves"), [("Migrate", "Report", True), ("Report", "Move", False)])
def test_action_of_health_and_of_drains_are_independent(health: str, action: str, leaves: bool) -> None:
    node = {"spec": {"taints": [{"key": "ill", "effect": "E"}]}}
    trouble = judge(node, nodeHealth={"taints": ["ill"], "action": health}, drains=action)
    assert present(trouble).leaves is leaves


def test_planned_trouble_comes_first_and_gives_the_reason() -> None:
    taints = [{"key": key, "effect": "E"} for key in ("ill", "karpenter.sh/disrupted")]
    trouble = judge({"spec": {"taints": taints}}, nodeHealth={"taints": ["ill"]}, drains="Report")
    assert present(trouble).message == "Karpenter drains it (taint karpenter.sh/disrupted:E), taint ill:E"
    assert (trouble.planned, trouble.leaves) == (True, False)


async def test_node_with_taint_of_drain_is_left_and_not_left_again() -> None:
    harness = ReconcilerHarness(hooks=HOOKS, recovery={"drains": "Move"})
    taints: list[Any] = []

    async def node(name: str) -> Any:
        return {"spec": {"taints": taints}}

    harness.cluster.node = node  # type: ignore[method-assign]
    await harness.train()
    taints.append({"key": "karpenter.sh/disrupted", "effect": "NoSchedule"})
    harness.clock.advance(LOOK_SECONDS)
    await harness.settle()
    assert (harness.status.attempt, harness.status.failed_nodes) == (2, ("node-a",))
    harness.clock.advance(1)
    await harness.train()
    harness.clock.advance(LOOK_SECONDS)
    await harness.settle()
    assert harness.status.attempt == 2
    assert "Karpenter drains it" in harness.condition(c.NODES_HEALTHY).message

"""Nodes that report problems: which ones count, and the reaction."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from ddp_operator.api.cluster import Key
from ddp_operator.api.cluster_errors import Refused
from ddp_operator.api.resources import count_pod_gpus
from ddp_operator.api.status import Status, Usage
from ddp_operator.decide import conditions as c
from ddp_operator.decide.hooks import MOST_NODES, Feature, Hooks
from ddp_operator.decide.losses import LOOK_SECONDS
from ddp_operator.decide.state import State
from ddp_operator.decide.transitions import NodeFailed
from ddp_operator.features import node_health
from ddp_operator.features.node_health import judge_node, wants_nodes
from ddp_operator.reading.objects import view_pod
from tests.support.builders import job, resource, template, trainer
from tests.support.decisions import present
from tests.support.fake_cluster import ReconcilerHarness

HOOKS = Hooks((node_health.FEATURE,))


def hold_gpus(state: State, status: Status) -> Status:
    """Count the GPUs of a pod, as another feature does."""
    gpus = count_pod_gpus(state.spec.template.spec)
    return replace(status, usage=Usage(gpus=gpus)) if gpus else status


COUNTING = Hooks((node_health.FEATURE, Feature("counting", "stable", "x.md", account=hold_gpus)))
XID = {"type": "XidCriticalError", "status": "True", "message": "GPU 3: XID 79"}
WELL = {"type": "Ready", "status": "True"}


def health(action: str | None = "Migrate", **named: Any) -> dict[str, Any]:
    return {"nodeHealth": {"conditions": ["Xid*"], "taints": ["nvsentinel.dev/*"], **named, "action": action}}


@pytest.mark.parametrize(
    ("node", "description"),
    [
        ({"status": {"conditions": [WELL, XID]}}, "XidCriticalError (GPU 3: XID 79)"),
        ({"status": {"conditions": [{**XID, "status": "False"}]}}, ""),
        ({"status": {"conditions": [{**XID, "type": "KernelDeadlock"}]}}, ""),
        ({"spec": {"taints": [{"key": "nvsentinel.dev/a", "effect": "E"}]}}, "taint nvsentinel.dev/a:E"),
        ({"spec": {"taints": [{"key": "nvidia.com/gpu", "effect": "NoSchedule"}]}}, ""),
        ({}, ""),
        (None, ""),
    ],
)  # fmt: skip
def test_configured_condition_is_reported(node: Any, description: str) -> None:
    trouble = judge_node(job(recovery=health()), node)
    assert (trouble.message if trouble else "") == description
    assert (wants_nodes(job(recovery=health())), wants_nodes(job())) == (True, False)


class FakeNodes:
    """The nodes of a fake cluster; ``asked`` names those that were read."""

    def __init__(self, harness: ReconcilerHarness, *conditions: Any) -> None:
        self.conditions = conditions
        self.asked = list[str]()
        self.refused = False
        harness.cluster.node = self.node  # type: ignore[method-assign]

    async def node(self, name: str) -> dict[str, Any]:
        self.asked.append(name)
        if self.refused:
            raise Refused("no", reason="Forbidden")
        return {"status": {"conditions": [WELL, *self.conditions]}}


async def test_job_leaves_and_avoids_reported_node() -> None:
    harness = ReconcilerHarness(hooks=HOOKS, recovery=health())
    nodes = FakeNodes(harness)
    await harness.train()
    assert harness.state(c.NODES_HEALTHY) == ("True", c.NO_TROUBLE)
    nodes.conditions = (XID,)
    harness.clock.advance(LOOK_SECONDS)
    await harness.settle()
    status = harness.status
    assert (status.attempt, status.failed_nodes, status.counts.free) == (2, ("node-a",), 1)
    assert status.counts.counted == 0
    assert present(status.last_restart).cause == c.NODE_UNHEALTHY
    assert (
        harness.condition(c.RESTARTING).message
        == "attempt 2 avoids unhealthy nodes: node-a: XidCriticalError (GPU 3: XID 79)"
    )
    assert harness.pods(1) == []
    harness.clock.advance(1)
    await harness.settle()
    assert [view_pod(pod).avoided_nodes for pod in harness.pods(2)] == [("node-a",)] * 2
    assert c.NODE_UNHEALTHY in harness.events


async def test_irreplaceable_node_is_only_reported() -> None:
    harness = ReconcilerHarness(hooks=HOOKS, recovery=health())
    nodes = FakeNodes(harness, XID)
    await harness.train()
    assert harness.status.attempt == 2
    assert harness.raw is not None
    last = {**harness.raw["status"]["lastRestart"], "cause": c.NODES_READMITTED}
    harness.cluster.store.change(harness.raw, status={**harness.raw["status"], "failedNodes": [], "lastRestart": last})
    for pod in harness.pods(1):
        harness.cluster.end(pod, 85)
    await harness.train()
    harness.clock.advance(LOOK_SECONDS)
    await harness.settle()
    assert harness.status.attempt == 2
    assert harness.state(c.NODES_HEALTHY) == ("False", c.NODE_UNHEALTHY)
    assert nodes.asked


@pytest.mark.parametrize("action", ["Report", None])
async def test_reported_node_keeps_job(action: str | None) -> None:
    harness = ReconcilerHarness(hooks=HOOKS, recovery=health(action))
    nodes = FakeNodes(harness, XID)
    await harness.train()
    harness.clock.advance(LOOK_SECONDS)
    await harness.settle()
    assert (harness.status.attempt, harness.status.failed_nodes) == (1, ())
    assert harness.condition(c.NODES_HEALTHY).message == "node-a: XidCriticalError (GPU 3: XID 79)"
    assert harness.events.count(c.NODE_UNHEALTHY) == 1
    nodes.refused = True
    harness.clock.advance(LOOK_SECONDS)
    await harness.settle()
    assert harness.state(c.NODES_HEALTHY)[0] == "False", "what may not be read any more is as it was"
    nodes.refused = False
    nodes.conditions = ()
    harness.clock.advance(LOOK_SECONDS)
    await harness.settle()
    assert harness.state(c.NODES_HEALTHY)[0] == "True"


async def test_nodes_are_read_in_turn_and_only_if_configured() -> None:
    quiet = ReconcilerHarness(hooks=HOOKS)
    unasked = FakeNodes(quiet)
    await quiet.train()
    assert unasked.asked == []
    harness = ReconcilerHarness(hooks=HOOKS, nodes=2 * MOST_NODES, recovery=health())
    nodes = FakeNodes(harness)
    await harness.settle()
    for pod in harness.pods():
        harness.cluster.store.change(pod, spec={**pod["spec"], "nodeName": f"on-{pod['metadata']['name']}"})
    for _ in range(2):
        harness.clock.advance(LOOK_SECONDS)
        await harness.settle()
    assert len(nodes.asked) == len(set(nodes.asked)) == 2 * MOST_NODES


@pytest.mark.parametrize(
    ("namespaces", "gpus", "counted", "events"),
    [(("x", "y", "z"), 1, 3, 1), (("x", "x", "x"), 1, 3, 0), (("x", "y", "z"), 0, 0, 0)],
    ids=["GPUs and namespaces", "one namespace", "no GPUs"],
)
async def test_node_is_reported_once_by_jobs_with_gpus_of_two_namespaces(
    namespaces: tuple[str, ...], gpus: int, counted: int, events: int
) -> None:
    harness = ReconcilerHarness(hooks=COUNTING, recovery=health())
    reports: list[Any] = []
    harness.cluster.on_event = lambda about, event: reports.append((about["kind"], about["metadata"]["name"], event))
    limits = {"resources": {"limits": {"nvidia.com/gpu": str(gpus)}}} if gpus else {}
    for name, namespace in zip("abc", namespaces, strict=True):
        item = resource(name, nodes=1, recovery=health(), template=template(trainer(**limits)))
        item["metadata"]["namespace"] = namespace
        harness.cluster.add(item)
        harness.key = Key(namespace, name)
        FakeNodes(harness, XID)
        await harness.train()
    assert harness.transitions.count(NodeFailed("node-a")) == counted
    results = [(name, event) for kind, name, event in reports if kind == "Node"]
    assert [(name, event.reason) for name, event in results] == [("node-a", "FailsTrainingJobs")] * events
    assert all("as reported by pods" in event.message for _, event in results)

"""A node as the API server has it: its boot, and whether pods may use it again after it was lost."""

from __future__ import annotations

from typing import Any

import pytest

from ddp_operator.api.cluster_errors import ClusterError, Refused
from ddp_operator.features.lost_nodes import nodes
from ddp_operator.features.lost_nodes.nodes import NodeReader, NodeReading, is_ready
from ddp_operator.features.lost_nodes.returns import DELETED
from ddp_operator.kube.client import ObjectNotFound


async def read(answer: Any, monkeypatch: pytest.MonkeyPatch) -> NodeReading:
    async def call(*args: object, **options: object) -> Any:
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(nodes, "call", call)
    client: Any = None
    return await NodeReader(client).read("a")


async def test_boot_is_the_one_that_the_node_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    assert await read({"status": {"nodeInfo": {"bootID": "7c1f"}}}, monkeypatch) == NodeReading("7c1f")


async def test_node_that_does_not_exist_is_deleted(monkeypatch: pytest.MonkeyPatch) -> None:
    assert await read(ObjectNotFound("no"), monkeypatch) == NodeReading(DELETED)


@pytest.mark.parametrize(
    "answer",
    [
        {"status": {"nodeInfo": {}}},
        {"status": {"nodeInfo": {"bootID": 7}}},
        {"status": {"nodeInfo": {"bootID": "x" * 129}}},
        Refused("no", reason="Forbidden"),
        ClusterError("no response"),
    ],
)
async def test_boot_that_is_not_reported_is_unknown(answer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert await read(answer, monkeypatch) == NodeReading()


READY = {"type": "Ready", "status": "True"}
GPU = {"key": "nvidia.com/gpu", "effect": "NoSchedule"}


def node(*conditions: Any, taints: Any = (), **spec: Any) -> Any:
    return {"spec": {"taints": list(taints), **spec}, "status": {"conditions": list(conditions)}}


@pytest.mark.parametrize(
    "raw",
    [
        node(READY),
        node(READY, {"type": "MemoryPressure", "status": "False"}, taints=[GPU]),
        node(READY, {"type": "NetworkingReady", "status": "True"}),
    ],
    ids=["ready", "taint that GPU pods tolerate", "detector that reports health"],
)
def test_node_without_objections_is_ready(raw: Any) -> None:
    assert is_ready(raw)


@pytest.mark.parametrize(
    "raw",
    [
        {},
        node({"type": "Ready", "status": "Unknown"}),
        node({"type": "MemoryPressure", "status": "False"}),
        node(READY, {"type": "XidCriticalError", "status": "True"}),
        node(READY, {"type": "NetworkingReady", "status": "False"}),
        node(READY, unschedulable=True),
        node(READY, taints=[{"key": "node.kubernetes.io/unreachable", "effect": "NoExecute"}]),
        node(READY, taints=[{"key": "node.kubernetes.io/out-of-service", "effect": "NoExecute"}]),
        node(READY, taints=[{"key": "node.cloudprovider.kubernetes.io/shutdown", "effect": "NoSchedule"}]),
        node(READY) | {"metadata": {"deletionTimestamp": "2026-11-20T12:00:00Z"}},
    ],
    ids=[
        *("no conditions", "not ready", "readiness unknown", "detector reports a fault", "detector reports no health"),
        *("cordoned", "unreachable", "out of service", "shut down", "deleted"),
    ],
)
def test_node_with_an_objection_is_not_ready(raw: Any) -> None:
    assert not is_ready(raw)

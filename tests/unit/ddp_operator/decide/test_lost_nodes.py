"""Pods on nodes that do not report: which are declared failed, in which order, and the time of the next pass."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

from ddp_operator.api.kubeobjects import format_time
from ddp_operator.api.status import Status
from ddp_operator.decide.losses import (
    MAX_NODES,
    compute_next_check,
    describe_lost_contact,
    find_lost_pods,
    list_nodes_to_inspect,
)
from ddp_operator.decide.state import State
from ddp_operator.decide.views import NodeView
from tests.support.builders import NOW, child_job, child_pod, job, observe
from tests.support.decisions import present

STATUS = Status(attempt=1, attempt_nodes=3, job_name="train-1", start_time=NOW - timedelta(hours=1))
SILENT = NodeView(False, "the node is not ready: silent")


def at(seconds: float) -> datetime:
    return NOW + timedelta(seconds=seconds)


def see(*pods: Any, **spec: Any) -> Any:
    typed = job(status=STATUS, nodes=3, **spec)
    nodes = {pod["spec"].get("nodeName", ""): SILENT for pod in pods}
    return typed, observe(typed, [child_job(nodes=3)], pods, nodes=nodes)


def test_longest_silent_node_is_named_and_more_pods_counted() -> None:
    typed, seen = see(child_pod(2, unready=at(5), node="c"), child_pod(1, unready=NOW, node="b"))
    result = present(describe_lost_contact(State(typed, seen, NOW), seen.pods))
    assert result[0] == NOW
    assert result[1].startswith(
        f"node b of pod 1 (and of 1 more pod) has been NotReady since {format_time(NOW)} (the node is not ready"
    )
    alone = present(describe_lost_contact(State(*see(child_pod(1, unready=NOW, node="b")), NOW), seen.pods[:1]))
    assert "more pod" not in alone[1]


def test_lost_pods_are_declared_failed_in_order_of_their_index() -> None:
    gone = [child_pod(index, deleting=True, grace=0, node=f"n{index}") for index in (2, 0, 1)]
    typed, seen = see(*gone)
    assert [pod.index for pod, _ in find_lost_pods(State(typed, seen, at(3600)))] == [0, 1, 2]


def test_cut_off_nodes_are_inspected_first() -> None:
    gone = [child_pod(i, deleting=True, grace=0, node=f"a{i:02d}") for i in range(MAX_NODES)]
    typed, seen = see(*gone, child_pod(50, unready=NOW, node="z"))
    nodes = ("z", *(f"a{i:02d}" for i in range(MAX_NODES - 1)))
    assert list_nodes_to_inspect(typed, seen, at(3600)) == nodes


def test_next_check_is_at_first_due_pod() -> None:
    def look(*seconds: float) -> float | None:
        gone = [child_pod(i, deleting=True, grace=0, at=at(s), node=f"n{i}") for i, s in enumerate(seconds)]
        return compute_next_check(State(*see(*gone), NOW))

    first = look(0)
    second = look(30)
    assert first is not None
    assert second is not None
    assert second - first == 30
    assert look(30, 0) == first
    assert compute_next_check(State(*see(child_pod(0)), NOW)) is None

"""Which nodes a job avoids, for how long, and that the return of one restarts nothing."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from ddp_operator.api.status import LastFailure, OperatorState, Status
from ddp_operator.decide.attempts import leave_nodes, restart
from ddp_operator.decide.avoidance import (
    MOST_NODES,
    avoid_lost_nodes,
    avoid_nodes,
    list_returned_nodes,
)
from ddp_operator.decide.hooks import Hooks
from ddp_operator.decide.state import Decision, State, Suspicion, Trouble
from ddp_operator.features import lost_nodes
from ddp_operator.features.lost_nodes.returns import list_awaited_nodes
from tests.support.builders import NOW, child_pod, job, observe
from tests.support.decisions import STARTED, run_pass

LOST = avoid_lost_nodes(STARTED, ["node-b"])
BACK = {"returned_nodes": frozenset({"node-b", "node-z"})}


def run(*pods: Any, status: Status = LOST, **observed: Any) -> Decision:
    return run_pass(
        *(pods or (child_pod(0), child_pod(1))),
        status=status,
        observed={**BACK, **observed},
        hooks=Hooks((lost_nodes.FEATURE,)),
    )


def lose(status: Status) -> Status:
    """Return the status after the loss of node-b with a pod."""
    silent = child_pod(1, node="node-b")
    suspicions = {silent["metadata"]["uid"]: Suspicion(NOW, "no answer", is_lost=True)}
    return run_pass(child_pod(0), silent, status=status, observed={"suspicions": suspicions}).status


def test_lost_node_is_avoided_until_it_is_ready_again() -> None:
    lost = lose(STARTED)
    assert (lost.failed_nodes, list_awaited_nodes(lost)) == (("node-b",), ("node-b",))
    assert run(status=lost, returned_nodes=frozenset()).status.failed_nodes == ("node-b",)
    back = run(status=lost).status
    assert (back.failed_nodes, list_returned_nodes(back)) == ((), ("node-b",))


def test_return_of_a_node_restarts_nothing() -> None:
    away = run(returned_nodes=frozenset())
    back = run()
    assert back.actions == away.actions
    assert replace(back.status, failed_nodes=("node-b",)) == away.status
    again = run(status=back.status)
    assert (again.status, again.actions) == (back.status, back.actions)


def test_node_that_is_lost_twice_stays_avoided() -> None:
    twice = lose(run().status)
    assert (twice.failed_nodes, list_awaited_nodes(twice)) == (("node-b",), ())
    assert run(status=twice).status.failed_nodes == ("node-b",)


def test_second_pod_of_a_lost_node_is_no_second_loss() -> None:
    assert list_awaited_nodes(avoid_lost_nodes(LOST, ["node-b", "node-b", ""])) == ("node-b",)


@pytest.mark.parametrize("category", ["NodeFault", "ReplicasDiffer"])
@pytest.mark.parametrize("before", [STARTED, LOST, run().status], ids=["never lost", "lost", "back"])
def test_node_that_was_ready_while_it_was_at_fault_stays_avoided(category: str, before: Status) -> None:
    typed = job(status=before, nodes=2)
    state = State(typed, observe(typed, (), ()), NOW)
    cause = LastFailure(attempt=1, category=category, node_name="node-b")
    status = restart(state, cause, before.counts).status
    assert status.failed_nodes == ("node-b",)
    assert run(status=replace(status, attempt=1, job_name="train-1")).status.failed_nodes == ("node-b",)
    lost_too = avoid_lost_nodes(status, ["node-b"])
    assert list_awaited_nodes(lost_too) == ()


def test_drained_node_stays_avoided() -> None:
    typed = job(status=LOST, nodes=2)
    state = State(typed, observe(typed, (), ()), NOW)
    status = leave_nodes(state, {"node-b": Trouble("drained", planned=True, leaves=True)}).status
    assert (status.failed_nodes, list_awaited_nodes(status)) == (("node-b",), ())


@pytest.mark.parametrize(
    "pod",
    [
        child_pod(1, "Failed", disrupted="NodeLost", deleting=True, node="node-b"),
        child_pod(1, node="node-b"),
    ],
    ids=["removed slowly", "not removed yet"],
)
def test_node_is_avoided_while_a_lost_pod_remains_on_it(pod: Any) -> None:
    assert run(child_pod(0), pod).status.failed_nodes == ("node-b",)


def test_status_of_an_older_operator_keeps_its_nodes() -> None:
    stored = {"version": 1, "nodes": 2}
    old = replace(STARTED, failed_nodes=("node-b",), operator_state=msgspec.convert(stored, OperatorState))
    assert run(status=old).status.failed_nodes == ("node-b",)
    assert "lostNodes" not in msgspec.to_builtins(old)["operatorState"]


def test_lists_are_bounded_and_the_latest_is_last() -> None:
    names = [f"n{index}" for index in range(30)]
    status = avoid_lost_nodes(Status(), names)
    assert status.failed_nodes == tuple(names[-MOST_NODES:])
    assert status.operator_state.lost_nodes == tuple(names[-20:])
    again = avoid_nodes(status, ["n25", "new", ""])
    assert again.failed_nodes == (*names[21:25], *names[26:], "n25", "new")
    assert "n25" not in again.operator_state.lost_nodes

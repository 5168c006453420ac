"""Silent nodes in the conditions of a job."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from msgspec.structs import replace

from ddp_operator.api.kubeobjects import format_time
from ddp_operator.api.status import Progress
from ddp_operator.decide import conditions as c
from ddp_operator.decide import other_reasons
from ddp_operator.decide.hooks import Hooks
from ddp_operator.decide.job_events import list_transition_events
from ddp_operator.decide.state import Decision, FailPod, State, Suspicion
from ddp_operator.decide.views import NodeView
from ddp_operator.features import lost_nodes
from ddp_operator.features.lost_nodes.silence import describe_lost_contact
from tests.support.builders import NOW, child_pod, page
from tests.support.decisions import STARTED, present, read_state, run_pass
from tests.unit.ddp_operator.decide.test_describe import condition
from tests.unit.ddp_operator.decide.test_losses import at, see

NOT_READY = NodeView(False, "the node is not ready: Kubelet stopped posting node status")


def run(*pods: Any, **more: Any) -> Decision:
    return run_pass(*pods, hooks=Hooks((lost_nodes.FEATURE,)), **more)


def test_longest_silent_node_is_named_and_more_pods_counted() -> None:
    typed, seen = see(child_pod(2, unready=at(5), node="c"), child_pod(1, unready=NOW, node="b"))
    result = present(describe_lost_contact(State(typed, seen, NOW), seen.pods))
    assert result[0] == NOW
    assert result[1].startswith(
        f"node b of pod 1 (and of 1 more pod) has been NotReady since {format_time(NOW)} (the node is not ready"
    )
    alone = present(describe_lost_contact(State(*see(child_pod(1, unready=NOW, node="b")), NOW), seen.pods[:1]))
    assert "more pod" not in alone[1]


def test_is_in_status_before_the_pod_is_declared_lost() -> None:
    before = run(child_pod(0), child_pod(1, node="node-b"), text=page(step=5, phase="Running"))
    status = replace(before.status, progress=Progress(step=5, last_step_time=NOW))
    decision = run(
        child_pod(0),
        child_pod(1, node="node-b"),
        status=status,
        observed={
            "suspicions": {"uid-train-1-1-abcde": Suspicion(NOW, "1/1 of its peers get no answer from it", False)}
        },
    )
    condition = present(decision.status.condition(c.PROGRESSING))
    assert (condition.status, condition.reason) == ("False", other_reasons.NODE_SILENT)
    assert condition.message == (
        "node node-b of pod 1 may be lost since 2026-11-20T12:00:00Z: 1/1 of its peers get no answer from it"
    )
    assert decision.status.reason == other_reasons.NODE_SILENT
    assert decision.status.failed_nodes == ()
    assert not [action for action in decision.actions if isinstance(action, FailPod)]


@pytest.mark.parametrize(
    ("last_step", "expected"),
    [(-9, ("False", "NodeNotReady")), (9, ("True", "Training")), (None, ("Unknown", "NodeNotReady"))],
    ids=["no step since", "steps are made", "steps are not reported"],
)
def test_is_in_status_before_its_pod_is_declared_failed(last_step: float | None, expected: tuple[str, str]) -> None:
    moment = None if last_step is None else NOW + timedelta(seconds=last_step)
    before = run(child_pod(0), child_pod(1), text=page(step=5, phase="Running"))
    status = replace(before.status, progress=Progress(step=5, last_step_time=moment))
    silent = child_pod(1, unready=NOW, node="node-b")
    decision = run(child_pod(0), silent, status=status, seconds=20, observed={"nodes": {"node-b": NOT_READY}})
    assert read_state(decision, "Progressing") == expected
    condition = present(decision.status.condition("Progressing"))
    words = "node node-b of pod 1 has been NotReady since 2026-11-20T12:00:00Z (the node is not ready: Kubelet stopped"
    assert words in condition.message
    events = [event.reason for event in list_transition_events(status, decision.status)]
    assert ("NodeNotReady" in events) is (expected[1] == "NodeNotReady")
    assert decision.status.nodes.ready == 1


@pytest.mark.parametrize(
    ("before", "expected"),
    [
        ((), ("False", other_reasons.NODE_NOT_READY)),
        ((condition(c.RENDEZVOUSED, "True", c.ALL_RANKS_JOINED),), ("True", c.ALL_RANKS_JOINED)),
    ],
)
def test_unready_node_is_reason_of_rendezvoused(before: Any, expected: tuple[str, str]) -> None:
    silent = child_pod(1, unready=NOW, node="node-b")
    nodes = {"node-b": NodeView(False, "the node is not ready: silent")}
    decision = run(
        child_pod(0), silent, status=replace(STARTED, conditions=before), observed={"nodes": nodes}, seconds=60
    )
    assert read_state(decision, c.RENDEZVOUSED) == expected

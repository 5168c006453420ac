"""Decisions about inputs after late events and lost nodes."""

from __future__ import annotations

import pytest

from ddp_operator.api.constants import ANNOTATION_SPEC
from ddp_operator.api.job import DDPTrainingJob
from ddp_operator.api.status import Condition, InputStatus, Status
from ddp_operator.decide.decide import decide
from ddp_operator.decide.hooks import Hooks
from ddp_operator.decide.state import Decision, DeleteJob, EnsureChildren, FailPod, Observation
from ddp_operator.decide.views import NodeView
from ddp_operator.features.inputs import FEATURE, read_inputs
from tests.support.builders import NOW, Json, child_job, child_pod, job, observe

INPUTS = [{"url": "https://host/file", "mountPath": "/data", "claimName": "data"}]


def made(status: Status | None = None, **spec: object) -> DDPTrainingJob:
    return job(status=status, **{"nodes": 1, "inputs": INPUTS, **spec})


def fetch_job(typed: DDPTrainingJob, **changes: object) -> Json:
    result = child_job(0, nodes=1, **changes)
    result["metadata"]["annotations"][ANNOTATION_SPEC] = typed.spec_digest
    return result


def choose(typed: DDPTrainingJob, seen: Observation) -> Decision:
    """Return the decision with the hook of this feature."""
    assert FEATURE.prepare is not None
    return decide(typed, seen, NOW, hooks=Hooks((FEATURE,)).observe(typed, {}))


def fetched() -> Status:
    """Return the status of a job with fetched inputs and without an attempt."""
    [first] = read_inputs(made().spec)
    ready = Condition(type="InputsReady", status="True", reason="Fetched", last_transition_time=NOW)
    status = InputStatus(name="file", phase="Fetched", bytes=5, place=first.place)
    return Status(inputs=(status,), conditions=(ready,))


@pytest.mark.parametrize("condition", ["Complete", "Failed"])
def test_ended_job_without_ended_pod_needs_fresh_read(condition: str) -> None:
    typed = made()
    ended = fetch_job(typed, conditions={condition: ""})
    assert choose(typed, observe(typed, [ended], [child_pod(attempt=0)])).needs_fresh_read
    done = child_pod(0, "Succeeded" if condition == "Complete" else "Failed", attempt=0, code=condition == "Failed")
    assert not choose(typed, observe(typed, [ended], [done])).needs_fresh_read


def test_fetched_inputs_are_recorded_before_attempt_1() -> None:
    typed = made()
    ended = fetch_job(typed, conditions={"Complete": ""})
    seen = observe(typed, [ended], [child_pod(0, "Succeeded", attempt=0)])
    first = choose(typed, seen)
    assert first.actions == ()
    assert (first.status.attempt, first.status.is_true("InputsReady")) == (0, True)
    second = choose(made(first.status), seen)
    assert second.actions == (DeleteJob("train-inputs", "job-0"), EnsureChildren(1, 1))
    assert second.status.first_run_time is None, "the template may still be corrected"


def test_changed_place_is_fetched_again() -> None:
    typed = made(fetched(), inputs=[INPUTS[0] | {"claimName": "other"}])
    assert choose(typed, Observation()).actions == (EnsureChildren(0, 0),)


def test_fetch_pod_on_lost_node_is_failed() -> None:
    typed = made()
    pod = child_pod(attempt=0, deleting=True, at=NOW.replace(hour=1))
    seen = observe(typed, [fetch_job(typed)], [pod], nodes={"node-a": NodeView(False, "gone")})
    [action] = choose(typed, seen).actions
    assert isinstance(action, FailPod)

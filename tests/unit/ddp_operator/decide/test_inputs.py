"""Decisions about inputs after late events and lost nodes, and the text of their progress."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from ddp_operator.api.constants import ANNOTATION_SPEC
from ddp_operator.api.job import DDPTrainingJob
from ddp_operator.api.status import Condition, InputStatus, Status
from ddp_operator.decide.decide import decide
from ddp_operator.decide.inputs import describe_progress
from ddp_operator.decide.state import DeleteJob, EnsureChildren, FailPod, Observation
from ddp_operator.decide.views import NodeView
from tests.support.builders import NOW, Json, child_job, child_pod, job, observe

INPUTS = [{"url": "https://host/file", "mountPath": "/data", "claimName": "data"}]


def made(status: Status | None = None, **spec: object) -> DDPTrainingJob:
    return job(status=status, **{"nodes": 1, "inputs": INPUTS, **spec})


def fetch_job(typed: DDPTrainingJob, **changes: object) -> Json:
    result = child_job(0, nodes=1, **changes)
    result["metadata"]["annotations"][ANNOTATION_SPEC] = typed.spec_digest
    return result


def fetched() -> Status:
    """Return the status of a job with fetched inputs and without an attempt."""
    [first] = made().spec.inputs or ()
    ready = Condition(type="InputsReady", status="True", reason="Fetched", last_transition_time=NOW)
    status = InputStatus(name="file", phase="Fetched", bytes=5, place=first.place)
    return Status(inputs=(status,), conditions=(ready,))


@pytest.mark.parametrize("condition", ["Complete", "Failed"])
def test_ended_job_without_ended_pod_needs_fresh_read(condition: str) -> None:
    typed = made()
    ended = fetch_job(typed, conditions={condition: ""})
    assert decide(typed, observe(typed, [ended], [child_pod(attempt=0)]), NOW).needs_fresh_read
    done = child_pod(0, "Succeeded" if condition == "Complete" else "Failed", attempt=0, code=condition == "Failed")
    assert not decide(typed, observe(typed, [ended], [done]), NOW).needs_fresh_read


def test_fetched_inputs_are_recorded_before_attempt_1() -> None:
    typed = made()
    ended = fetch_job(typed, conditions={"Complete": ""})
    seen = observe(typed, [ended], [child_pod(0, "Succeeded", attempt=0)])
    first = decide(typed, seen, NOW)
    assert first.actions == ()
    assert (first.status.attempt, first.status.is_true("InputsReady")) == (0, True)
    second = decide(made(first.status), seen, NOW)
    assert second.actions == (DeleteJob("train-inputs", "job-0"), EnsureChildren(1, 1))
    assert second.status.first_run_time is None, "the template may still be corrected"


def test_changed_place_is_fetched_again() -> None:
    typed = made(fetched(), inputs=[INPUTS[0] | {"claimName": "other"}])
    assert decide(typed, Observation(), NOW).actions == (EnsureChildren(0, 0),)


def test_fetch_pod_on_lost_node_is_failed() -> None:
    typed = made()
    pod = child_pod(attempt=0, deleting=True, at=NOW.replace(hour=1))
    seen = observe(typed, [fetch_job(typed)], [pod], nodes={"node-a": NodeView(False, "gone")})
    [action] = decide(typed, seen, NOW).actions
    assert isinstance(action, FailPod)


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ([(0, None)], "fetching inputs: 0 bytes"),
        ([(120_000_000, 200_000_000)], "fetching inputs: 120 MB of 200 MB"),
        ([(1_500, 2_000_000_000_000)], "fetching inputs: 1.5 kB of 2000 GB"),
        ([(5, 5), (1, None)], "fetching inputs: 6 bytes, 1/2 complete"),
    ],
)
def test_progress_message_has_sizes_and_counts(sizes: list[tuple[int, int | None]], words: str) -> None:
    inputs = [
        InputStatus(name="a", phase="Fetched" if here == total else "Fetching", bytes=here, total_bytes=total)
        for here, total in sizes
    ]
    assert describe_progress(inputs) == words
    expected = replace(inputs[-1], message="no route")
    assert describe_progress([*inputs[:-1], expected]) == f"{words}; input a: no route"

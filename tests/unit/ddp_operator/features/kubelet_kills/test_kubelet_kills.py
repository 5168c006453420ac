"""A training container that the kubelet kills for a failed probe or hook."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import pytest

from ddp_cli.view.why import explain_why
from ddp_operator.api.kubeobjects import format_time
from ddp_operator.decide.hooks import Hooks
from ddp_operator.features import kubelet_kills
from ddp_operator.features.kubelet_kills import FEATURE
from ddp_operator.reading.events import ContainerKill, find_kill
from tests.support.builders import NOW, last_words
from tests.support.decisions import present
from tests.support.fake_cluster import ReconcilerHarness

REFUSED = "Get http://10.0.0.1:8081/healthz: dial tcp 10.0.0.1:8081: connect: connection refused"
STOPPED = last_words("Preempted", message="asked to stop by a signal", rank=None, exitCode=85)


def event(reason: str, message: str, container: str = "trainer", *, at: int = 0) -> dict[str, Any]:
    return {
        "type": "Normal" if reason == "Killing" else "Warning",
        "reason": reason,
        "message": message,
        "lastTimestamp": format_time(NOW + timedelta(seconds=at)),
        "involvedObject": {"fieldPath": f"spec.containers{{{container}}}"},
    }


UNHEALTHY = event("Unhealthy", f"Liveness probe failed: {REFUSED}")
KILLING = event("Killing", "Stopping container trainer")


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        ([UNHEALTHY, KILLING], ContainerKill("trainer", "livenessProbe", REFUSED)),
        ([KILLING], None),
        (
            [
                event("Unhealthy", "Readiness probe failed: HTTP probe failed with statuscode: 500", at=2),
                event("Unhealthy", "Startup probe failed: command timed out\n", at=1),
                event("Killing", "Container trainer failed startup probe, will be restarted", at=3),
            ],
            ContainerKill("trainer", "startupProbe", "command timed out"),
        ),
        (
            [event("FailedPostStartHook", "PostStartHook failed"), event("Killing", "FailedPostStartHook")],
            ContainerKill("trainer", "lifecycle.postStart"),
        ),
        ([UNHEALTHY], None),
        ([event("Unhealthy", "Readiness probe failed: 500"), KILLING], None),
        ([event("Killing", "Container shipper failed liveness probe", "shipper")], None),
        ([{}, {"reason": "Killing"}, {"involvedObject": {"fieldPath": 3}}], None),
    ],
    ids=[
        "liveness",
        "without probe",
        "startup",
        "hook",
        "below threshold",
        "readiness",
        "another container",
        "malformed",
    ],
)
def test_events_report_failed_probe(events: list[Any], expected: ContainerKill | None) -> None:
    assert find_kill(events, "trainer") == expected


async def run_and_stop(monkeypatch: pytest.MonkeyPatch, *events: Any, code: int = 85) -> ReconcilerHarness:
    """Return a job, pod 1 of which was ended by a signal before the first step."""
    harness = ReconcilerHarness(hooks=Hooks([FEATURE]))

    async def events_of(item: Any) -> Any:
        return events

    monkeypatch.setattr(harness.cluster, "events_of", events_of)
    await harness.settle()
    await stop_pod(harness, code)
    return harness


async def stop_pod(harness: ReconcilerHarness, code: int) -> None:
    harness.run_pods()
    harness.clock.advance(5)
    await harness.settle()
    harness.tell_end(1, code, STOPPED if code == 85 else "")
    await harness.settle()


@pytest.mark.parametrize("code", [85, 137, 143])
async def test_probe_that_kills_trainer_is_named_and_counted(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    harness = await run_and_stop(monkeypatch, UNHEALTHY, KILLING, code=code)
    status = harness.status
    failure = present(status.last_failure)
    assert (failure.category, failure.pod_index) == ("Killed", 1)
    assert "livenessProbe" in failure.message
    assert REFUSED in failure.message
    assert (status.attempt, status.counts.counted, status.counts.free) == (2, 1, 0)
    explanation = str(explain_why(harness.raw or {}, (), harness.clock()))
    assert "orrect or remove livenessProbe of container trainer" in explanation
    assert "no action needed" not in explanation

    for pod in harness.pods(1):
        harness.cluster.end(pod, 85)
    harness.clock.advance(60)
    await harness.settle()
    await stop_pod(harness, code)
    assert harness.state("Failed") == ("True", "RepeatedFailure")


async def test_events_that_take_long_lose_nothing_that_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kubelet_kills, "_SECONDS_FOR_EVENTS", 0.01)
    harness = ReconcilerHarness(hooks=Hooks([FEATURE]))

    async def events_of(item: Any) -> Any:
        await asyncio.sleep(60)

    monkeypatch.setattr(harness.cluster, "events_of", events_of)
    await harness.settle()
    await stop_pod(harness, 137)
    assert harness.status.attempt == 2
    assert harness.status.condition("FeaturesWork") is None, "the hook has not used up its time"

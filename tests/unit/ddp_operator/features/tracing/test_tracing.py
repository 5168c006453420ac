"""The OpenTelemetry trace of a job: its spans, one export of each, and an operator without the SDK."""

from __future__ import annotations

import logging
import sys
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

import msgspec
import pytest
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from ddp_operator.api import constants
from ddp_operator.api.cluster import Snapshot
from ddp_operator.api.kubeobjects import format_time
from ddp_operator.api.status import Condition, DevStatus, LastFailure, LastRestart, Progress, Status
from ddp_operator.decide import conditions as c
from ddp_operator.decide import other_reasons
from ddp_operator.decide.hooks import Hooks
from ddp_operator.features.tracing import start_traces
from ddp_operator.features.tracing.export import JobTraces
from ddp_operator.features.tracing.spans import list_spans
from tests.support.builders import NOW, UID, Json, child_job, child_pod, last_words, page, resource
from tests.support.decisions import present
from tests.support.fake_cluster import ReconcilerHarness


def after(seconds: float) -> datetime:
    return NOW + timedelta(seconds=seconds)


def condition(kind: str, status: Any, reason: str = "R", *, since: float = 0) -> Condition:
    return Condition(type=kind, status=status, reason=reason, last_transition_time=after(since))


JOINING = Status(
    attempt=1, job_name="train-1", attempt_time=NOW, conditions=(condition(c.RENDEZVOUSED, "False"),)
).remember(nodes=2)
JOINED = (condition(c.RENDEZVOUSED, "True", since=60), condition(c.PROGRESSING, "Unknown", c.NO_STEP_YET, since=60))
ENDED = (condition(c.RENDEZVOUSED, "False"), condition(c.FAILED, "True", "Failed"))


def started_pod(index: int, *, acknowledged: float, started: float | None) -> Json:
    """A pod that a kubelet acknowledged and whose container it started, both seconds after NOW."""
    running = {} if started is None else {"running": {"startedAt": format_time(after(started))}}
    containers = [{"name": "trainer", "state": running}]
    return child_pod(index, status={"startTime": format_time(after(acknowledged)), "containerStatuses": containers})


def observe(*pods: Json, admitted: float | None = 10) -> Snapshot:
    raw = resource()
    raw["metadata"] |= {"uid": UID, "creationTimestamp": format_time(NOW)}
    job = child_job(status={} if admitted is None else {"startTime": format_time(after(admitted))})
    return Snapshot(raw, jobs=(job,), pods=pods)


def list_parts(snapshot: Snapshot, old: Status, seconds: float = 60, **new: Any) -> dict[str, tuple[float, float]]:
    """Return the seconds after NOW at which each span starts and ends."""
    status = Status(**{**{name: getattr(old, name) for name in old.__struct_fields__}, **new})
    spans = list_spans(snapshot, old, status, after(seconds))
    return {
        span.name: ((span.start - NOW).total_seconds(), (span.end - NOW).total_seconds())
        for span in spans
        if span.name != "job"
    }


PULLED = (started_pod(0, acknowledged=15, started=20), started_pod(1, acknowledged=12, started=50))
LATE = (started_pod(0, acknowledged=15, started=20), started_pod(1, acknowledged=12, started=70))  # by another clock
SUSPENDED = (condition(c.RENDEZVOUSED, "False"), condition(c.SUSPENDED, "True"))
WAITING = (started_pod(0, acknowledged=15, started=20), started_pod(1, acknowledged=12, started=None))


@pytest.mark.parametrize(
    ("snapshot", "change", "parts"),
    [
        (
            observe(*PULLED),
            {"conditions": JOINED},
            {"queue": (0, 10), "schedule": (10, 15), "pull": (15, 50), "rendezvous": (50, 60)},
        ),
        (observe(*WAITING), {"conditions": ENDED}, {"queue": (0, 10), "schedule": (10, 15), "pull": (15, 60)}),
        (observe(*WAITING), {"attempt": 2}, {"queue": (0, 10), "schedule": (10, 15), "pull": (15, 60)}),
        (observe(admitted=None), {"conditions": ENDED}, {"queue": (0, 60)}),
        (observe(*WAITING), {"conditions": SUSPENDED}, {"queue": (0, 10), "schedule": (10, 15), "pull": (15, 60)}),
        (observe(*LATE), {"conditions": JOINED}, {"queue": (0, 10), "schedule": (10, 15), "pull": (15, 60)}),
        (observe(*PULLED), {"phase": "Pending"}, {}),
    ],
)
def test_start_is_split_by_what_the_attempt_waited_for(snapshot: Snapshot, change: Json, parts: Json) -> None:
    assert list_parts(snapshot, JOINING, **change) == parts


def test_ranks_that_restart_in_their_pods_only_join() -> None:
    joining = (condition(c.RENDEZVOUSED, "False", since=100),)
    old = Status(attempt=1, job_name="train-1", attempt_time=NOW, conditions=joining).remember(nodes=2)
    assert list_parts(observe(*PULLED), old, 107, conditions=JOINED) == {"rendezvous": (100, 107)}


def test_first_step_follows_rendezvous_and_not_a_stall() -> None:
    training = (JOINED[0], condition(c.PROGRESSING, "True", c.TRAINING))
    stalled = (JOINED[0], condition(c.PROGRESSING, "False", other_reasons.STALLED))
    old = Status(attempt=1, conditions=JOINED)
    assert list_parts(observe(), old, 75, phase="Running") == {}
    assert list_parts(observe(), old, 75, conditions=training) == {"first step": (60, 75)}
    assert list_parts(observe(), Status(attempt=1, conditions=stalled), conditions=training) == {}


def test_run_of_dev_job_has_one_first_step_since_its_start() -> None:
    training = (JOINED[0], condition(c.PROGRESSING, "True", c.TRAINING))
    second = DevStatus(run=2, start_time=NOW + timedelta(seconds=70))
    old = Status(attempt=1, conditions=JOINED, dev=second)
    assert list_parts(observe(), old, 75, conditions=training) == {"first step": (70, 75)}
    stepped = msgspec.structs.replace(old, progress=Progress(step=3))
    assert list_parts(observe(), stepped, 75, conditions=training) == {}, "it has made its first step before"


OPEN = LastRestart(attempt=1, level="SamePods", cause="OOM", time=NOW)
DONE = LastRestart(attempt=1, level="SamePods", cause="OOM", time=NOW, recovery_seconds=7)
NEXT = LastRestart(attempt=2, level="NewPods", cause="OOM", time=after(30))


@pytest.mark.parametrize(
    ("before", "change", "parts"),
    [
        (None, {"last_restart": OPEN}, {}),
        (OPEN, {"phase": "Running"}, {}),
        (OPEN, {"last_restart": DONE}, {"restart": (0, 7)}),
        (None, {"last_restart": DONE}, {"restart": (0, 7)}),
        (DONE, {"conditions": ENDED}, {}),
        (OPEN, {"conditions": ENDED}, {"restart": (0, 60)}),
        (OPEN, {"last_restart": NEXT}, {"restart": (0, 60)}),
    ],
)
def test_restart_ends_with_a_step_or_what_follows_instead(before: Any, change: Json, parts: Json) -> None:
    assert list_parts(observe(), Status(last_restart=before), **change) == parts


def test_failure_of_job_and_of_restart_are_errors() -> None:
    failure = LastFailure(attempt=1, category="OOM", message="out of memory")
    old = Status(attempt=1, job_name="train-1", last_restart=OPEN, last_failure=failure)
    failed = Condition(type=c.FAILED, status="True", reason="R", message="no restart", last_transition_time=NOW)
    new = Status(attempt=1, reason="OOM", conditions=(failed,), last_restart=OPEN, last_failure=failure)
    errors = {span.name: span.error for span in list_spans(observe(), old, new, NOW)}
    assert errors == {"restart": "OOM: out of memory", "job": "OOM: no restart"}


def trace(harness: ReconcilerHarness, processor: SpanProcessor) -> None:
    """Restart the operator with a new export."""
    harness.hooks = Hooks(services={"tracing": JobTraces(processor)})
    harness.restart_operator()


async def live(harness: ReconcilerHarness, processor: SpanProcessor) -> None:
    """Run a job that fails once, with a restart of the operator before each step."""
    for text in (page(phase="Running"), page(step=5, total_steps=10, phase="Running")):
        trace(harness, processor)
        await harness.train(text)
    harness.end_pod(1, constants.EXIT_RETRYABLE, last_words("CUDAError", rank=1, podIndex=1))
    for step in (6, 7):
        trace(harness, processor)
        harness.clock.advance(20)
        await harness.train(page(step=step, steps=1, total_steps=10, phase="Running"))
    trace(harness, processor)
    for index in (0, 1):
        harness.end_pod(index)
    await harness.settle()


async def test_job_has_one_trace_with_its_uid_although_the_operator_restarts() -> None:
    exporter = InMemorySpanExporter()
    harness = ReconcilerHarness()
    await live(harness, SimpleSpanProcessor(exporter))
    spans = exporter.get_finished_spans()
    assert harness.raw is not None
    uid = UUID(harness.raw["metadata"]["uid"])
    assert {present(span.context).trace_id for span in spans} == {uid.int}

    root = next(span for span in spans if span.parent is None)
    assert {present(span.parent).span_id for span in spans if span is not root} == {present(root.context).span_id}
    assert len({present(span.context).span_id for span in spans}) == len(spans)
    names = [span.name for span in spans]
    assert (names.count("job"), names.count("restart"), names.count("first step")) == (1, 1, 1)
    attempts = [present(span.attributes)["ddp.attempt"] for span in spans if span.name == "rendezvous"]
    assert attempts == [1, 2]
    restart = next(span for span in spans if span.name == "restart")
    assert present(restart.attributes)["ddp.cause"] == "CUDAError"
    attributes = present(root.attributes)
    assert (attributes["k8s.namespace.name"], attributes["ddp.phase"], attributes["ddp.nodes"]) == (
        *("default", "Succeeded"),
        2,
    )
    assert present(root.end_time) > present(root.start_time)


class BrokenProcessor(SpanProcessor):
    def on_end(self, span: ReadableSpan) -> None:
        raise RuntimeError("broken")


async def test_broken_export_fails_no_reconcile(caplog: pytest.LogCaptureFixture) -> None:
    harness = ReconcilerHarness()
    await live(harness, BrokenProcessor())
    assert harness.status.phase == "Succeeded"
    assert "feature tracing default/train is left out: RuntimeError: broken" in caplog.text


@pytest.mark.parametrize(
    ("absent", "variables", "words"),
    [
        ("opentelemetry.exporter.otlp.proto.http", {}, "install the OpenTelemetry SDK"),
        (None, {"OTEL_BSP_MAX_QUEUE_SIZE": "0"}, "correct the variables"),
        (None, {"OTEL_SDK_DISABLED": "true"}, None),
    ],
)
async def test_operator_without_usable_sdk_starts_and_names_the_remedy(
    absent: str | None,
    variables: dict[str, str],
    words: str | None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if absent is not None:
        monkeypatch.delitem(sys.modules, "ddp_operator.features.tracing.export")
        monkeypatch.setitem(sys.modules, absent, None)
    for name, value in ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9"} | variables).items():
        monkeypatch.setenv(name, value)
    with caplog.at_level(logging.WARNING):
        assert start_traces() is None
    texts = [record.getMessage() for record in caplog.records]
    assert [words in text and "OTEL_EXPORTER_OTLP_ENDPOINT" in text for text in texts if words] == [True] * bool(words)


async def test_operator_without_endpoint_exports_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
    assert start_traces() is None

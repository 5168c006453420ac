"""The spans of a job's trace that end with a write of its status (ADR 0054). Pure.

A span is exported when it ends, so neither the status nor the operator's memory collects the parts of a trace. A change
of a status is written once, so a restarted operator repeats no span.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final

from ddp_operator.api.cluster import Snapshot, controller_of
from ddp_operator.api.kubeobjects import parse_time, truncate
from ddp_operator.api.status import LastRestart, Status
from ddp_operator.decide import conditions as c
from ddp_operator.decide.conditions import is_finished
from ddp_operator.decide.failures import describe_failure
from ddp_operator.decide.views import Pods
from ddp_operator.reading.objects import find_trainer_state, view_pod

JOB: Final = "job"
"""The span of the whole job, the parent of the others."""
Attributes = dict[str, str | int]


@dataclass(frozen=True, slots=True)
class Span:
    """One part of a job's life. ``error``: why it failed; empty: it did not."""

    name: str
    start: datetime
    end: datetime
    attributes: Attributes
    error: str = ""


def list_spans(snapshot: Snapshot, old: Status, new: Status, now: datetime) -> Iterator[Span]:
    """Yield the spans that end where ``new`` replaces ``old``."""
    now = truncate(now)
    attributes = _describe_job(snapshot, old, new)
    has_ended = is_finished(new) and not is_finished(old)
    has_left = has_ended or new.attempt != old.attempt
    if _is_joining(old) and (has_left or not _is_joining(new)):
        yield from _list_start(snapshot, old, now, attributes)
    joined = old.condition(c.RENDEZVOUSED)
    progressing = old.condition(c.PROGRESSING)
    waits_for_step = joined and joined.status == "True" and progressing and progressing.reason == c.NO_STEP_YET
    if joined is not None and waits_for_step and (has_left or new.is_true(c.PROGRESSING)):
        yield from _list_first_step(old, joined.last_transition_time, now, attributes)
    yield from _list_restarts(old, new, now, attributes, has_ended=has_ended)
    if has_ended:
        created = parse_time(snapshot.resource["metadata"].get("creationTimestamp"))
        attributes |= {"ddp.phase": new.phase or "", "ddp.restarts": new.restarts.all}
        failed = new.condition(c.FAILED) if new.is_true(c.FAILED) else None
        error = f"{new.reason}: {failed.message}" if failed is not None else ""
        yield Span(JOB, created or now, new.completion_time or now, attributes, error)


def _list_first_step(status: Status, joined: datetime, now: datetime, attributes: Attributes) -> Iterator[Span]:
    """Yield the wait for the first step since the ranks joined; of `ddp dev` one for each run, since its start.

    After its last step a run waits for no other one, although the pods wait for the next run.
    """
    dev = status.dev
    if dev is None:
        yield Span("first step", joined, now, attributes)
    elif status.progress is None or not status.progress.step:
        yield Span("first step", max(joined, dev.start_time or joined), now, {**attributes, "ddp.run": dev.run})


def _describe_job(snapshot: Snapshot, old: Status, new: Status) -> Attributes:
    """Return the attributes of all spans, by OpenTelemetry's names where it has some."""
    metadata = snapshot.resource["metadata"]
    recorded = old if old.attempt else new
    return {
        "k8s.namespace.name": metadata["namespace"],
        "k8s.job.name": recorded.job_name,
        "ddp.job.name": metadata["name"],
        "ddp.attempt": recorded.attempt,
        "ddp.nodes": recorded.attempt_nodes,
        "ddp.gpus": max(status.usage.gpus if status.usage is not None else 0 for status in (old, new)),
    }


def _is_joining(status: Status) -> bool:
    """Return whether an attempt waits until all ranks have joined the rendezvous."""
    return status.attempt > 0 and status.is_false(c.RENDEZVOUSED) and not status.is_true(c.SUSPENDED)


def _list_start(snapshot: Snapshot, status: Status, end: datetime, attributes: Attributes) -> Iterator[Span]:
    """Yield what an attempt waited for until its ranks joined, or until it ended before.

    Its peers wait in the same way for a pod that replaces a lost one. Ranks that restart in their pods only join.
    """
    job = next((raw for raw in snapshot.jobs if raw["metadata"]["name"] == status.job_name), {"metadata": {"uid": ""}})
    owned = (raw for raw in snapshot.pods if controller_of(raw).get("uid") == job["metadata"]["uid"])
    newest = Pods(map(view_pod, owned)).newest
    pods = [newest[index] for index in range(status.attempt_nodes) if index in newest]
    moments = {
        "queue": parse_time((job.get("status") or {}).get("startTime")),
        "schedule": _find_last([pod.started for pod in pods], status.attempt_nodes),
        "pull": _find_last([_find_trainer_start(pod.raw) for pod in pods], status.attempt_nodes),
        "rendezvous": end,
    }
    joining = status.condition(c.RENDEZVOUSED)
    times = (status.attempt_time, joining.last_transition_time if joining is not None else None)
    reached = max((time for time in times if time is not None), default=end)
    for name, moment in moments.items():
        stop = end if moment is None else min(moment, end)
        if stop > reached:
            yield Span(name, reached, stop, attributes)
            reached = stop


def _find_last(moments: list[datetime | None], pods: int) -> datetime | None:
    """Return the latest moment; None if that of one of the pods is unknown."""
    known = [moment for moment in moments if moment is not None]
    return max(known) if len(known) == pods else None


def _list_restarts(
    old: Status, new: Status, now: datetime, attributes: Attributes, *, has_ended: bool
) -> Iterator[Span]:
    """Yield the restarts after which training made a step, or another restart or the job's end followed."""
    before = old.last_restart
    after = new.last_restart
    was_open = before is not None and before.recovery_seconds is None
    is_new = after is not None and (before is None or after.time != before.time)
    if before is not None and was_open and is_new:
        yield _build_restart(before, old, now, attributes)
    if after is not None and (was_open or is_new) and (has_ended or after.recovery_seconds is not None):
        yield _build_restart(after, new, now, attributes)


def _build_restart(restart: LastRestart, status: Status, now: datetime, attributes: Attributes) -> Span:
    seconds = restart.recovery_seconds
    end = now if seconds is None else restart.time + timedelta(seconds=seconds)
    details: Attributes = {"ddp.attempt": restart.attempt, "ddp.cause": restart.cause, "ddp.level": restart.level or ""}
    failure = status.last_failure
    error = describe_failure(failure) if failure is not None and failure.category == restart.cause else ""
    return Span("restart", restart.time, end, attributes | details, error)


def _find_trainer_start(raw: Mapping[str, Any]) -> datetime | None:
    """Return when a pod's training container started, after images, volumes and init containers; None: unknown."""
    state = find_trainer_state(raw)
    return parse_time((state.get("running") or state.get("terminated") or {}).get("startedAt"))

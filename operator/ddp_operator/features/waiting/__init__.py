"""Why pods of a job do not exist, do not start or do not end: by their status, Events and Kueue's Workloads."""

from typing import Final

from msgspec.structs import replace

from ddp_operator.api.status import Status
from ddp_operator.decide import conditions as c
from ddp_operator.decide.attempt import ObservedAttempt
from ddp_operator.decide.conditions import Fact, is_finished
from ddp_operator.decide.hooks import Feature, PodHook
from ddp_operator.decide.kueue import waits_in_queue
from ddp_operator.decide.state import Remark, State
from ddp_operator.features.waiting.containers import explain_missing_ranks, explain_remaining_pods
from ddp_operator.features.waiting.pods import explain_scheduling
from ddp_operator.features.waiting.polling import compute_event_poll_delay
from ddp_operator.features.waiting.reading import WaitReading, find_place, observe


def record(state: State, status: Status) -> Status:
    """Return the status with the job's place in its queue."""
    waits = waits_in_queue(state.job, state.attempt_job)
    return replace(status, queue=find_place(state.observation) if waits else None)


def explain(attempt: ObservedAttempt, fact: Fact) -> Fact:
    """Return Scheduled, Rendezvoused or Progressing with what pods wait for."""
    if fact.type == c.SCHEDULED:
        return explain_scheduling(attempt, fact)
    if fact.reason == c.WAITING_FOR_RANKS:
        return explain_missing_ranks(attempt, fact)
    return explain_remaining_pods(attempt, fact) if fact.reason == c.FINISHED else fact


def review(state: State) -> Remark | None:
    """Return when to look again."""
    if state.spec.suspend or is_finished(state.status):
        return None
    delay = compute_event_poll_delay(state.job, state.observation, state.now, state.observation.waiting_jobs)
    return None if delay is None else Remark(wait=delay)


FEATURE: Final = Feature(
    "waiting",
    maturity="stable",
    page="troubleshooting.md",
    pods=PodHook(WaitReading, observe, each_pass=True),
    record=record,
    explain=explain,
    review=review,
)

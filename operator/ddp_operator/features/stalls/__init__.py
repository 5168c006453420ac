"""Jobs that make no steps, or slow ones: stragglers, stalls, and pods that do not reach their peers."""

from typing import Final

from msgspec.structs import replace

from ddp_operator.api.status import Status
from ddp_operator.decide import conditions as c
from ddp_operator.decide.attempt import ObservedAttempt
from ddp_operator.decide.conditions import Fact
from ddp_operator.decide.hooks import Feature, PodHook
from ddp_operator.decide.state import State
from ddp_operator.features.stalls.fields import FIELDS
from ddp_operator.features.stalls.peers import describe_cut_off_training, describe_waiting
from ddp_operator.features.stalls.reading import StallReading, observe
from ddp_operator.features.stalls.stall import describe_stall


def record(state: State, status: Status) -> Status:
    """Return the status with the stragglers, if the ranks were compared with the page of this pass."""
    reading = state.observation.find_observed(StallReading)
    if reading is None or reading.stragglers is None or state.observation.page is None:
        return status
    return replace(status, stragglers=reading.stragglers)


def explain(attempt: ObservedAttempt, fact: Fact) -> Fact:
    """Return Rendezvoused or Progressing of a job whose pods do not reach their peers, or whose steps have stopped."""
    observation = attempt.state.observation
    reading = observation.find_observed(StallReading) or StallReading()
    if fact.type == c.RENDEZVOUSED:
        return describe_waiting(attempt, fact, reading.unreachable)
    if fact.type != c.PROGRESSING or fact.reason in (c.HELD, c.FINISHED, c.NOT_RUNNING):
        return fact
    stall = describe_stall(attempt.state.job, observation.page, reading.stall if observation.page else None)
    return describe_cut_off_training(attempt, stall, reading.unreachable) or stall or fact


FEATURE: Final = Feature(
    FIELDS.feature,
    maturity="stable",
    page="metrics.md",
    fields=FIELDS,
    pods=PodHook(StallReading, observe),
    record=record,
    explain=explain,
)

"""What the conditions say in a word: ``status.reason``, the column REASON. Pure; ``ddp why`` explains the same one."""

from collections.abc import Iterable
from datetime import datetime
from typing import Final

from msgspec.structs import replace

from ddp_operator.api.status import Condition, Status
from ddp_operator.status import conditions as c

# Unsatisfactory states in the order in which they hide each other: type and the bad status of the condition.
_ORDER: Final = (
    (c.ACCEPTED, "False"),
    (c.ACCEPTED, "Unknown"),
    (c.SUSPENDED, "True"),
    (c.RESTARTING, "True"),
    (c.SCHEDULED, "False"),
    (c.RENDEZVOUSED, "False"),
    (c.PROGRESSING, "False"),
    (c.RENDEZVOUSED, "Unknown"),
    (c.PROGRESSING, "Unknown"),
)


def take_facts(status: Status, facts: Iterable[c.Fact], now: datetime, generation: int) -> Status:
    """Return the status with the facts among its conditions, and with what columns of ``kubectl get`` cannot build."""
    restarts = status.restarts
    status = replace(
        status,
        observed_generation=generation,
        restarts=replace(restarts, all=restarts.total + restarts.replaced + restarts.in_place),
        conditions=c.merge_conditions(status.conditions, facts, now, generation),
    )
    return replace(status, reason=find_reason(status))


def find_obstacle(status: Status) -> Condition | None:
    """Return the condition that keeps a job from training, the one that hides the others; None: it trains."""
    for kind, bad in _ORDER:
        condition = status.condition(kind)
        if condition is not None and (condition.status == bad or condition.reason == c.STOPPING):
            return condition
    return None


def find_blocker(status: Status) -> Condition | None:
    """Return Scheduled where a job that starts again waits until somebody acts, or for its queue."""
    scheduled = status.condition(c.SCHEDULED)
    return scheduled if scheduled and scheduled.status == "False" and scheduled.reason in c.BLOCKING else None


def find_reason(status: Status) -> str:
    """Return what the job waits for or why it failed; empty where nothing is to be said, as of a job that trains."""
    failure, failed, distributed = status.last_failure, status.condition(c.FAILED), status.condition(c.DISTRIBUTED)
    if status.phase == "Succeeded":
        return distributed.reason if distributed and distributed.status == "False" else ""
    if failed is not None and failed.status == "True":
        return failure.category if failure is not None and failure.conclusion else failed.reason
    obstacle = find_obstacle(status)
    if obstacle is not None and obstacle.type == c.RESTARTING:
        obstacle = find_blocker(status) or obstacle
    if obstacle is None or obstacle.reason == c.SUSPENDED_BY_SPEC:  # the phase says so
        return ""
    return failure.category if obstacle.reason == c.GROUP_RESTART and failure is not None else obstacle.reason

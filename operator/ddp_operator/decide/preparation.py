"""The status of a job before attempt 1, for features that prepare or place it. Pure."""

from msgspec.structs import replace

from ddp_operator.api.status import Status
from ddp_operator.decide import conditions as c
from ddp_operator.decide.conditions import Fact, set_conditions
from ddp_operator.decide.describe import describe_suspension
from ddp_operator.decide.state import Children, State


def count_alive(children: Children) -> int:
    """Return the number of pods of any attempt that may run a process."""
    return sum(pod.alive for pod in (*children.pods, *children.orphans))


def describe_before_start(state: State, status: Status, fact: Fact) -> Status:
    """Return the status of a job that has no attempt yet. ``fact``: what it waits for."""
    suspended = describe_suspension(state.job, status, count_alive(state.observation))
    facts = [
        Fact(c.ACCEPTED, "True", c.VALID),
        suspended,
        fact,
        Fact(c.SUCCEEDED, "False", c.NOT_FINISHED),
        Fact(c.FAILED, "False", c.NOT_FINISHED),
    ]
    status = replace(status, phase="Suspended" if suspended.status == "True" else "Pending")
    return set_conditions(status, facts, state.now, state.job.generation)

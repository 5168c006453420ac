"""``spec.idle``: jobs that hold GPUs and make no steps are reported, or suspended."""

from typing import Annotated, Final, Literal

from msgspec import Meta

from ddp_operator.api.kubeobjects import format_time
from ddp_operator.api.rule_builders import YEAR, require_between
from ddp_operator.api.schema import Limit, OwnFields
from ddp_operator.api.spec import SpecFields
from ddp_operator.decide.conditions import Fact, is_finished
from ddp_operator.decide.state import Remark, State, SuspendResource

IDLE: Final = "Idle"
"""The condition. Its reasons are the next two."""
NO_STEPS: Final = "NoSteps"
NOT_IDLE: Final = "NotIdle"


class Idle(SpecFields, frozen=True, kw_only=True):
    """Action when the job holds GPUs without a step for long, in whatever state its pods are."""

    minutes: Annotated[int, Meta(description="Minutes without a step or a heartbeat while pods hold GPUs.")]
    action: Annotated[
        Literal["Report", "Suspend"] | None,
        Meta(
            description="Suspend: set spec.suspend to true. Report: emit an Event and set the condition Idle, as "
            "always for a script that has never reported a step. Unset: Report."
        ),
    ] = None


class IdleFields(SpecFields, frozen=True, kw_only=True):
    """The part of this feature in the spec."""

    idle: Annotated[
        Idle | None,
        Meta(description="Limit of the time for which pods may hold GPUs without a step. Unset: no limit."),
    ] = None


FIELDS: Final = OwnFields(
    "usage",
    IdleFields,
    rules=(require_between("spec.idle.minutes", 1, YEAR // 60, "remove idle to allow idle GPUs"),),
    fixed_once="ended",
    limits=(
        Limit(
            "minutes that pods may hold GPUs without a step", "no limit", "condition Idle, or suspension", "spec.idle"
        ),
    ),
)


def review(state: State) -> Remark | None:
    """Return the condition Idle, and the suspension once the status has it."""
    if FIELDS.read(state.spec).idle is None or is_finished(state.status):
        return None
    fact = _describe(state)
    seconds = _compute_seconds_left(state)
    if not _must_suspend(state):
        return Remark(fact, wait=seconds if seconds is not None and seconds > 0 else None)
    if state.status.is_true(IDLE):
        return Remark(fact, actions=(SuspendResource(),))
    return Remark(fact, wait=0.0)  # first write the condition with the reason


def _compute_seconds_left(state: State) -> float | None:
    """Return in how many seconds the job counts as idle, 0 or less once it does; None: it makes steps."""
    idle = FIELDS.read(state.spec).idle
    idle_since = state.status.operator_state.idle_since
    if idle is None or idle_since is None or state.spec.suspend:
        return None
    return 60.0 * idle.minutes - (state.now - idle_since).total_seconds()


def _describe(state: State) -> Fact:
    before = state.status.condition(IDLE)
    if state.spec.suspend and before is not None:  # it keeps the reason of the suspension until the job resumes
        return Fact(IDLE, before.status, before.reason, before.message)

    usage = state.status.usage
    idle_since = state.status.operator_state.idle_since
    seconds = _compute_seconds_left(state)
    if seconds is None or seconds > 0 or usage is None or idle_since is None:
        return Fact(IDLE, "False", NOT_IDLE)
    message = f"{usage.gpus} GPUs are held and no step was made since {format_time(idle_since)}"
    if _must_suspend(state):
        message += f"; the job is suspended: `ddp resume {state.job.name}` resumes it"
    elif state.status.progress is None:
        message += "; its script has reported no step yet"
    return Fact(IDLE, "True", NO_STEPS, message)


def _must_suspend(state: State) -> bool:
    """Return whether the operator suspends an idle job. A running job that reports no steps may train: it stays."""
    idle = FIELDS.read(state.spec).idle
    if idle is None or idle.action != "Suspend":
        return False
    if state.status.progress is None and state.status.phase == "Running":
        return False
    seconds = _compute_seconds_left(state)
    return seconds is not None and seconds <= 0

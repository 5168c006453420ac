"""Purposes for which the job held GPUs: `status.usage`. Pure.

The time since the last write is added to the purpose in the status that was written then. Usage alone causes no write:
the purpose changes only with a write, so there is one purpose between two writes.
"""

from typing import Final

from msgspec.structs import replace

from ddp_operator.api.kubeobjects import count_pod_gpus, format_time, truncate
from ddp_operator.api.status import ENDED_PHASES, LostUsage, Status, Usage
from ddp_operator.decide import conditions as c
from ddp_operator.decide.conditions import Fact
from ddp_operator.decide.observation import State
from ddp_pod.contract.failure_table import UNKNOWN

PRODUCTIVE: Final = "Productive"
WAITING: Final = "Waiting"


def account(state: State, status: Status) -> Status:
    """Return ``status``, which is about to be written, with the GPU-seconds since the last write."""
    if status == state.status:
        return status
    before = state.status.usage
    now = truncate(state.now)
    gpus = 0 if status.phase in ENDED_PHASES else _count_held_gpus(state)
    if before is None:
        return replace(status, usage=Usage(gpus=gpus, since=now, idle_since=now)) if gpus else status

    gpu_seconds = before.gpus * max(0, round((now - before.since).total_seconds()))
    usage = _add_seconds(before, find_purpose(state.status), gpu_seconds)
    is_idle = gpus > 0 and find_purpose(status) != PRODUCTIVE
    idle_since = (before.idle_since or now) if is_idle else None
    usage = replace(usage, gpus=gpus, since=now, idle_since=idle_since)
    return replace(status, usage=_move_repeated_steps(usage, state.status, status))


def _count_held_gpus(state: State) -> int:
    """Return the GPUs of all pods that are on a node, those of former attempts included."""
    template = state.spec.template.spec
    gpus_per_pod = state.job.claimed_gpus
    if isinstance(template, dict):
        gpus_per_pod += count_pod_gpus(template)
    pods = (*state.observation.pods, *state.observation.orphans)
    return gpus_per_pod * sum(pod.alive and bool(pod.node_name) for pod in pods)


def find_purpose(status: Status) -> str:
    """Return the purpose for which a job of this status holds GPUs: productive, waiting, or the cause of a loss."""
    progressing = status.condition(c.PROGRESSING)
    if progressing is not None and progressing.reason == c.STALLED:
        return c.STALLED
    if status.phase == "Running" and status.is_true(c.PROGRESSING):
        return PRODUCTIVE
    restart = status.last_restart
    if restart is None or restart.recovery_seconds is not None:
        return WAITING
    return restart.cause or UNKNOWN.name


def _move_repeated_steps(usage: Usage, before: Status, after: Status) -> Usage:
    """Return the usage with repeated steps counted as lost, once the workers have resumed from an older step."""
    restart = after.last_restart
    if restart is None or restart.recovery_seconds is None or not restart.steps_lost:
        return usage
    former = before.last_restart
    if former is not None and former.time == restart.time and former.recovery_seconds is not None:
        return usage
    progress = before.progress
    rate = float(progress.steps_per_second) if progress is not None and progress.steps_per_second else 0.0
    if not rate:
        return usage
    repeated = min(usage.productive, round(restart.steps_lost / rate * usage.gpus))
    usage = replace(usage, productive=usage.productive - repeated, gpu_seconds=usage.gpu_seconds - repeated)
    return _add_seconds(usage, restart.cause or UNKNOWN.name, repeated)


def _add_seconds(usage: Usage, purpose: str, seconds: int) -> Usage:
    """Return the usage with GPU-seconds added to a purpose: Productive, Waiting, or the cause of a loss."""
    usage = replace(usage, gpu_seconds=usage.gpu_seconds + seconds)
    if purpose == PRODUCTIVE:
        return replace(usage, productive=usage.productive + seconds)
    if purpose == WAITING:
        return replace(usage, waiting=usage.waiting + seconds)
    if not seconds:
        return usage
    lost = {item.cause: item.gpu_seconds for item in usage.lost}
    lost[purpose] = lost.get(purpose, 0) + seconds
    return replace(usage, lost=tuple(LostUsage(cause=cause, gpu_seconds=total) for cause, total in lost.items()))


def compute_idle_seconds_left(state: State) -> float | None:
    """Return in how many seconds spec.idle counts the job as idle, 0 or less once it does; None: it makes steps."""
    idle = state.spec.idle
    usage = state.status.usage
    if idle is None or usage is None or usage.idle_since is None or state.spec.suspend:
        return None
    return 60.0 * idle.minutes - (state.now - usage.idle_since).total_seconds()


def describe_idle(state: State) -> Fact | None:
    """Return the condition Idle; None without spec.idle."""
    if state.spec.idle is None:
        return None
    before = state.status.condition(c.IDLE)
    if state.spec.suspend and before is not None:  # it keeps the reason of the suspension until the job resumes
        return Fact(c.IDLE, before.status, before.reason, before.message)

    usage = state.status.usage
    seconds = compute_idle_seconds_left(state)
    if seconds is None or seconds > 0 or usage is None or usage.idle_since is None:
        return Fact(c.IDLE, "False", c.NOT_IDLE)
    message = f"{usage.gpus} GPUs are held and no step was made since {format_time(usage.idle_since)}"
    if must_suspend(state):
        message += f"; the job is suspended: `ddp resume {state.job.name}` resumes it"
    elif state.status.progress is None:
        message += "; its script has reported no step yet"
    return Fact(c.IDLE, "True", c.NO_STEPS, message)


def must_suspend(state: State) -> bool:
    """Return whether the operator suspends an idle job. A running job that reports no steps may train: it stays."""
    if state.spec.idle is None or state.spec.idle.action != "Suspend":
        return False
    if state.status.progress is None and state.status.phase == "Running":
        return False
    seconds = compute_idle_seconds_left(state)
    return seconds is not None and seconds <= 0


def list_purposes(usage: Usage | None) -> dict[str, int]:
    """Return the GPU-seconds by purpose: Productive, Waiting and the causes of losses."""
    if usage is None:
        return {}
    lost = {item.cause: item.gpu_seconds for item in usage.lost}
    return {PRODUCTIVE: usage.productive, WAITING: usage.waiting, **lost}

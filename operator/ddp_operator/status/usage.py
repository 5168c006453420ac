"""What the job's GPUs were held for: `status.usage`. Pure.

The time since the last write goes to what that write said the job was doing. Nothing is written for this alone: what a
job does changes with a write, so that between two of them it did one thing.
"""

from typing import Final

from msgspec.structs import replace

from ddp_operator.api.status import ENDED_PHASES, LostUsage, Status, Usage
from ddp_operator.kubeobjects import count_pod_gpus, format_time, truncate
from ddp_operator.launcher.failure_table import UNKNOWN
from ddp_operator.status import conditions as c
from ddp_operator.status.conditions import Fact
from ddp_operator.status.observation import State

PRODUCTIVE: Final = "Productive"
WAITING: Final = "Waiting"


def account(state: State, status: Status) -> Status:
    """Return ``status``, which is about to be written, with the GPU-seconds since the last write."""
    before, now = state.status.usage, truncate(state.now)
    if status == state.status:
        return status
    gpus = 0 if status.phase in ENDED_PHASES else _held(state)
    if before is None:
        return replace(status, usage=Usage(gpus=gpus, since=now, idle_since=now)) if gpus else status
    spent = before.gpus * max(0, round((now - before.since).total_seconds()))
    usage = _add(before, find_purpose(state.status), spent)
    idles = gpus > 0 and find_purpose(status) != PRODUCTIVE
    usage = replace(usage, gpus=gpus, since=now, idle_since=(before.idle_since or now) if idles else None)
    return replace(status, usage=_take_back(usage, state.status, status))


def _held(state: State) -> int:
    """Return the GPUs of all pods that are on a node, those of former attempts too."""
    each = count_pod_gpus(state.spec.template.spec) if isinstance(state.spec.template.spec, dict) else 0
    each += state.job.claimed_gpus
    pods = (*state.observation.pods, *state.observation.orphans)
    return each and each * sum(pod.alive and bool(pod.node_name) for pod in pods)


def find_purpose(status: Status) -> str:
    """Return what GPUs are held for by a job of this status: productive, waiting, or the cause of a loss."""
    progressing = status.condition(c.PROGRESSING)
    if progressing is not None and progressing.reason == c.STALLED:
        return c.STALLED
    if status.phase == "Running" and status.is_true(c.PROGRESSING):
        return PRODUCTIVE
    restart = status.last_restart
    if restart is None or restart.recovery_seconds is not None:
        return WAITING
    return restart.cause or UNKNOWN.name


def _take_back(usage: Usage, before: Status, after: Status) -> Usage:
    """Return the usage where steps of it turn out to be repeated, as the workers have resumed from an older one."""
    restart, former, progress = after.last_restart, before.last_restart, before.progress
    if restart is None or restart.recovery_seconds is None or not restart.steps_lost:
        return usage
    known = former is not None and former.time == restart.time and former.recovery_seconds is not None
    rate = float(progress.steps_per_second) if progress is not None and progress.steps_per_second else 0.0
    if known or not rate:
        return usage
    repeated = min(usage.productive, round(restart.steps_lost / rate * usage.gpus))
    usage = replace(usage, productive=usage.productive - repeated, gpu_seconds=usage.gpu_seconds - repeated)
    return _add(usage, restart.cause or UNKNOWN.name, repeated)


def _add(usage: Usage, purpose: str, seconds: int) -> Usage:
    usage = replace(usage, gpu_seconds=usage.gpu_seconds + seconds)
    if purpose == PRODUCTIVE:
        return replace(usage, productive=usage.productive + seconds)
    if purpose == WAITING:
        return replace(usage, waiting=usage.waiting + seconds)
    if not seconds:
        return usage
    lost = {one.cause: one.gpu_seconds for one in usage.lost}
    lost[purpose] = lost.get(purpose, 0) + seconds
    return replace(usage, lost=tuple(LostUsage(cause=cause, gpu_seconds=spent) for cause, spent in lost.items()))


def idle_left(state: State) -> float | None:
    """Return in how many seconds a job is idle by its spec, 0 or less once it is; None: it is not about to be."""
    idle, usage = state.spec.idle, state.status.usage
    if idle is None or usage is None or usage.idle_since is None or state.spec.suspend:
        return None
    return 60.0 * idle.minutes - (state.now - usage.idle_since).total_seconds()


def describe_idle(state: State) -> Fact | None:
    """Return Idle; None where the spec does not ask for it."""
    before, usage = state.status.condition(c.IDLE), state.status.usage
    if state.spec.idle is None:
        return None
    if state.spec.suspend and before is not None:  # it says why, until the job goes on
        return Fact(c.IDLE, before.status, before.reason, before.message)
    left = idle_left(state)
    if left is None or left > 0 or usage is None or usage.idle_since is None:
        return Fact(c.IDLE, "False", c.NOT_IDLE)
    what = f"{usage.gpus} GPUs are held and no step was made since {format_time(usage.idle_since)}"
    if suspends(state):
        return Fact(
            c.IDLE, "True", c.NO_STEPS, f"{what}; the job is suspended: `ddp resume {state.job.name}` resumes it"
        )
    unknown = "; its script has reported no step yet" if state.status.progress is None else ""
    return Fact(c.IDLE, "True", c.NO_STEPS, f"{what}{unknown}")


def suspends(state: State) -> bool:
    """Tell whether a job that is idle is suspended for it. One that may train without saying so is not."""
    silent = state.status.progress is None and state.status.phase == "Running"
    left = idle_left(state)
    return (
        left is not None
        and left <= 0
        and not silent
        and state.spec.idle is not None
        and (state.spec.idle.action == "Suspend")
    )


def purposes(usage: Usage | None) -> dict[str, int]:
    """Return the GPU-seconds by what they were for: Productive, Waiting and the causes of what is lost."""
    if usage is None:
        return {}
    lost = {one.cause: one.gpu_seconds for one in usage.lost}
    return {PRODUCTIVE: usage.productive, WAITING: usage.waiting, **lost}

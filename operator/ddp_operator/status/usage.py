"""What the job's GPUs were held for: `status.usage`. Pure.

The time since the last write goes to what that write said the job was doing. Nothing is written for this alone: what a
job does changes with a write, so that between two of them it did one thing.
"""

from typing import Final

from msgspec.structs import replace

from ddp_operator.api.status import ENDED_PHASES, LostUsage, Status, Usage
from ddp_operator.kubeobjects import count_pod_gpus, truncate
from ddp_operator.launcher.failure_table import UNKNOWN
from ddp_operator.status import conditions as c
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
        return replace(status, usage=Usage(gpus=gpus, since=now)) if gpus else status
    spent = before.gpus * max(0, round((now - before.since).total_seconds()))
    usage = _add(before, find_purpose(state.status), spent)
    return replace(status, usage=_take_back(replace(usage, gpus=gpus, since=now), state.status, status))


def _held(state: State) -> int:
    """Return the GPUs of all pods that are on a node, those of former attempts too."""
    each = count_pod_gpus(state.spec.template.spec) if isinstance(state.spec.template.spec, dict) else 0
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


def purposes(usage: Usage | None) -> dict[str, int]:
    """Return the GPU-seconds by what they were for: Productive, Waiting and the causes of what is lost."""
    if usage is None:
        return {}
    lost = {one.cause: one.gpu_seconds for one in usage.lost}
    return {PRODUCTIVE: usage.productive, WAITING: usage.waiting, **lost}

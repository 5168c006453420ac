"""GPU usage: the GPU-seconds that a job has held, by purpose. Pure.

The time since the last write is added to the purpose in the status that was written then. Usage alone causes no write:
the purpose changes only with a write, so there is one purpose between two writes.
"""

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from ddp_operator.api.kubeobjects import find_trainer, truncate
from ddp_operator.api.resources import count_pod_gpus
from ddp_operator.api.spec import Spec
from ddp_operator.api.status import ENDED_PHASES, LostUsage, Status, Usage
from ddp_operator.decide import conditions as c
from ddp_operator.decide import other_reasons
from ddp_operator.decide.pace import read_rate
from ddp_operator.decide.purposes import PRODUCTIVE, WAITING
from ddp_operator.decide.state import State
from ddp_pod.contract.failure_table import UNKNOWN


def add_usage(state: State, status: Status) -> Status:
    """Return ``status``, which is about to be written, with the GPU-seconds since the last write."""
    if status == state.status:
        return status
    before = state.status.usage
    now = truncate(state.now)
    gpus = 0 if status.phase in ENDED_PHASES else _count_held_gpus(state)
    if before is None:
        return replace(status, usage=Usage(gpus=gpus)).remember(usage_time=now, idle_since=now) if gpus else status

    counted_until = state.status.operator_state.usage_time or now
    gpu_seconds = before.gpus * max(0, round((now - counted_until).total_seconds()))
    usage = _add_seconds(before, find_purpose(state.status), gpu_seconds)
    is_idle = gpus > 0 and find_purpose(status) != PRODUCTIVE
    idle_since = (state.status.operator_state.idle_since or now) if is_idle else None
    usage = _move_repeated_steps(replace(usage, gpus=gpus), state.status, status)
    return replace(status, usage=usage).remember(usage_time=now, idle_since=idle_since)


def _count_held_gpus(state: State) -> int:
    """Return the GPUs of all pods that are on a node, those of former attempts included."""
    template = state.spec.template.spec
    gpus_per_pod = 0
    if isinstance(template, dict):
        gpus_per_pod = count_pod_gpus(template) or _count_claimed_gpus(state.spec, template)
    pods = (*state.observation.pods, *state.observation.orphans)
    return gpus_per_pod * sum(pod.alive and bool(pod.node_name) for pod in pods)


def _count_claimed_gpus(spec: Spec, pod: Mapping[str, Any]) -> int:
    """Return the GPUs that a pod gets by resource claims: one for each process that procPerNode states."""
    resources = find_trainer({"spec": pod}).get("resources") or {}
    return spec.proc_per_node if isinstance(spec.proc_per_node, int) and resources.get("claims") else 0


def find_purpose(status: Status) -> str:
    """Return the purpose for which a job of this status holds GPUs: productive, waiting, or the cause of a loss."""
    progressing = status.condition(c.PROGRESSING)
    if status.phase == c.HELD:
        return c.HELD
    if progressing is not None and progressing.reason == other_reasons.STALLED:
        return other_reasons.STALLED
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
    rate = read_rate(progress.steps_per_second) if progress is not None else None
    if rate is None:
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

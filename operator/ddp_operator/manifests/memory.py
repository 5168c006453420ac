"""Checkpoints in memory: the pods' variables, the size of their shared memory, and its check against the limit."""

from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Any

from ddp_operator.api import constants
from ddp_operator.api.errors import FieldError
from ddp_operator.api.job import DDPTrainingJob
from ddp_operator.api.kubeobjects import parse_quantity
from ddp_operator.api.spec import CheckpointMemory, Spec


def build_memory_environment(job: DDPTrainingJob, attempt: int) -> dict[str, str]:
    """Return the variables that ``ddp_trainer.memory`` reads; none if the job disables copies in memory."""
    memory = _find_memory(job.spec)
    if memory.enabled is False:
        return {}
    env = {constants.ENV_MEMORY_DIR: f"/dev/shm/ddp-memory-{job.uid}-{attempt}"}
    if memory.interval is not None:
        env[constants.ENV_MEMORY_INTERVAL] = str(memory.interval)
    return env


def find_shm_limit(spec: Spec, trainer: Mapping[str, Any]) -> str | None:
    """Return the size of /dev/shm as a quantity; None: Kubernetes' default.

    With copies in memory it is at most half of the container's memory. If the copies do not fit, the script gets an
    error that it handles, and not the kernel's SIGKILL for the container.
    """
    limit = _find_memory_limit(trainer)
    if spec.shm.size_limit or not _find_memory(spec).enabled or limit is None:
        return spec.shm.size_limit
    return str(int(limit // 2))


def check_memory(spec: Spec, trainer: Mapping[str, Any]) -> Iterator[FieldError]:
    """Refuse shared memory that takes all of the container's memory."""
    size = parse_quantity(spec.shm.size_limit) if spec.shm.size_limit else None
    limit = _find_memory_limit(trainer)
    if not _find_memory(spec).enabled or size is None or limit is None or size < limit:
        return
    message = (
        f"must be less than the container's memory limit, which is "
        f"{(trainer.get('resources') or {})['limits']['memory']}, because shared memory counts towards that limit and "
        "spec.checkpoint.memory.enabled fills it; lower it or raise the limit"
    )
    yield FieldError("spec.shm.sizeLimit", message, spec.shm.size_limit)


def _find_memory(spec: Spec) -> CheckpointMemory:
    memory = spec.checkpoint.memory if spec.checkpoint else None
    return memory or CheckpointMemory()


def _find_memory_limit(trainer: Mapping[str, Any]) -> Decimal | None:
    limits = (trainer.get("resources") or {}).get("limits") or {}
    return parse_quantity(limits.get("memory"))

"""What copies of checkpoints in memory add to the training container."""

from collections.abc import Iterator, Mapping
from typing import Any

from ddp_operator.api import constants
from ddp_operator.api.errors import FieldError
from ddp_operator.api.job import DDPTrainingJob
from ddp_operator.api.kubeobjects import parse_quantity
from ddp_operator.api.spec import CheckpointMemory, Spec


def build_memory_environment(job: DDPTrainingJob, attempt: int) -> dict[str, str]:
    """Return the variables that ``ddp_sdk.memory`` reads; none if the job disables copies in memory."""
    memory = _find_memory(job.spec)
    if memory.enabled is False:
        return {}
    env = {constants.ENV_MEMORY_DIR: f"/dev/shm/ddp-memory-{job.uid}-{attempt}"}
    if memory.interval is not None:
        env[constants.ENV_MEMORY_INTERVAL] = str(memory.interval)
    return env


def find_shm_limit(spec: Spec, limits: Mapping[str, Any]) -> str | None:
    """Return the size of /dev/shm as a quantity; None: Kubernetes' default. ``limits``: of the training container.

    With copies in memory it is at most half of the container's memory. If the copies do not fit, the script gets an
    error that it handles, and not the kernel's SIGKILL for the container.
    """
    limit = parse_quantity(limits.get("memory"))
    if spec.shm.size_limit or not _find_memory(spec).enabled or limit is None:
        return spec.shm.size_limit
    return str(int(limit // 2))


def check_memory(spec: Spec, limits: Mapping[str, Any]) -> Iterator[FieldError]:
    """Refuse shared memory that takes all of the container's memory."""
    size = parse_quantity(spec.shm.size_limit) if spec.shm.size_limit else None
    limit = parse_quantity(limits.get("memory"))
    if not _find_memory(spec).enabled or size is None or limit is None or size < limit:
        return
    message = (
        f"must be less than the container's memory limit, which is {limits['memory']}, because shared memory counts "
        "towards that limit and spec.checkpoint.memory.enabled fills it; lower it or raise the limit"
    )
    yield FieldError("spec.shm.sizeLimit", message, spec.shm.size_limit)


def _find_memory(spec: Spec) -> CheckpointMemory:
    memory = spec.checkpoint.memory if spec.checkpoint else None
    return memory or CheckpointMemory()

"""``checkpoint.memory``: copies of the training state in the pods' shared memory (``ddp_sdk.memory``)."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Final

from msgspec import Meta

from ddp_operator.api.constants import ENV_MEMORY_DIR, ENV_MEMORY_INTERVAL
from ddp_operator.api.errors import FieldError
from ddp_operator.api.job import DDPTrainingJob
from ddp_operator.api.kubeobjects import find_limits, parse_quantity
from ddp_operator.api.parts import CheckedTemplate, PodAddition
from ddp_operator.api.rule_builders import require_between
from ddp_operator.api.schema import OwnFields
from ddp_operator.api.spec import SpecFields
from ddp_operator.decide.hooks import Feature


class CheckpointMemory(SpecFields, frozen=True, kw_only=True):
    """Copies of the training state in the pods' shared memory, for scripts that use ``MemoryCheckpoint``."""

    enabled: Annotated[
        bool | None,
        Meta(
            description="False: no copies. True: /dev/shm gets half of the container's memory limit, unless "
            "shm.sizeLimit is set. Unset: copies are made where they fit."
        ),
    ] = None
    interval: Annotated[
        int | None,
        Meta(description="Steps between two copies. Unset: so many that copies take at most 1 % of the training time."),
    ] = None


class MemoryFields(SpecFields, frozen=True, kw_only=True):
    """The part of this feature in the spec."""

    memory: Annotated[
        CheckpointMemory | None,
        Meta(description="Copies in memory, with which a lost rank or pod costs no step (docs/checkpoints.md)."),
    ] = None


def _read(job: DDPTrainingJob) -> CheckpointMemory:
    return FIELDS.read(job.spec).memory or CheckpointMemory()


def _add(job: DDPTrainingJob, template: CheckedTemplate, attempt: int) -> PodAddition:
    """Return the variables that ``ddp_sdk.memory`` reads, and at most half of the container's memory for the copies.

    If the copies do not fit, the script gets an error that it handles, and not the kernel's SIGKILL for the container.
    """
    memory = _read(job)
    if memory.enabled is False:
        return PodAddition()
    variables = {ENV_MEMORY_DIR: f"/dev/shm/ddp-memory-{job.uid}-{attempt}"}
    if memory.interval is not None:
        variables[ENV_MEMORY_INTERVAL] = str(memory.interval)
    limit = parse_quantity(template.limits.get("memory"))
    shared = str(int(limit // 2)) if memory.enabled and limit is not None else None
    return PodAddition(variables=variables, shared_memory=shared)


def _check(job: DDPTrainingJob, pod: Mapping[str, Any], trainer: Mapping[str, Any]) -> Iterator[FieldError]:
    """Refuse shared memory that takes all of the container's memory."""
    written = job.spec.shm.size_limit
    amount = find_limits(pod, trainer).get("memory")
    size = parse_quantity(written) if written else None
    limit = parse_quantity(amount)
    if not _read(job).enabled or size is None or limit is None or size < limit:
        return
    message = (
        f"must be less than the container's memory limit, which is {amount}, because shared memory counts towards that "
        "limit and spec.checkpoint.memory.enabled fills it; lower it or raise the limit"
    )
    yield FieldError("spec.shm.sizeLimit", message, written)


FIELDS: Final = OwnFields(
    "memory",
    MemoryFields,
    at="checkpoint",
    rules=(
        require_between(
            "spec.checkpoint.memory.interval", 1, 1_000_000, "leave it out for an interval that fits the step time"
        ),
    ),
    check=_check,
    pod=_add,
)
FEATURE: Final = Feature(FIELDS.feature, maturity="stable", page="checkpoints.md", fields=FIELDS)

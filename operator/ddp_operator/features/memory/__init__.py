"""``checkpoint.memoryInterval``: copies of the training state in the pods' shared memory (``ddp_sdk.memory``)."""

from collections.abc import Mapping
from typing import Annotated, Any, Final

from msgspec import Meta

from ddp_operator.api.constants import ENV_MEMORY_DIR, ENV_MEMORY_INTERVAL
from ddp_operator.api.former import TEXT, FormerField, describe_members
from ddp_operator.api.job import DDPTrainingJob
from ddp_operator.api.parts import CheckedTemplate, PodAddition
from ddp_operator.api.rule_builders import require_between
from ddp_operator.api.schema import OwnFields
from ddp_operator.api.spec import SpecFields
from ddp_operator.decide.hooks import Feature


class MemoryFields(SpecFields, frozen=True, kw_only=True):
    """The part of this feature in the spec."""

    memory_interval: Annotated[
        int | None,
        Meta(
            description="Steps between two copies in memory, with which a lost rank or pod costs no step "
            "(docs/checkpoints.md). 0: no copies. Unset: so many that copies take at most 1 % of the training time, "
            "where they fit."
        ),
    ] = None


def _add(job: DDPTrainingJob, template: CheckedTemplate, attempt: int) -> PodAddition:
    """Return the variables that ``ddp_sdk.memory`` reads.

    If the copies do not fit, the script gets an error that it handles, and not the kernel's SIGKILL for the container.
    """
    interval = FIELDS.read(job.spec).memory_interval
    if interval == 0:
        return PodAddition()
    variables = {ENV_MEMORY_DIR: f"/dev/shm/ddp-memory-{job.uid}-{attempt}"}
    if interval is not None:
        variables[ENV_MEMORY_INTERVAL] = str(interval)
    return PodAddition(variables=variables)


def _take_over_memory(memory: Any, _: Mapping[str, Any]) -> Mapping[str, Any]:
    if not isinstance(memory, Mapping):
        return {}
    if memory.get("enabled") is False:
        return {"checkpoint": {"memoryInterval": 0}}
    interval = {"checkpoint": {"memoryInterval": memory["interval"]}} if "interval" in memory else {}
    return {"sharedMemory": "50%", **interval} if memory.get("enabled") else interval


FIELDS: Final = OwnFields(
    "memory",
    MemoryFields,
    at="checkpoint",
    rules=(
        require_between(
            "spec.checkpoint.memoryInterval", 0, 1_000_000, "leave it out for an interval that fits the step time"
        ),
    ),
    pod=_add,
    former=(
        FormerField(
            "checkpoint.memory",
            "write checkpoint.memoryInterval with the value of its interval; for enabled: false write 0, for enabled: "
            "true sharedMemory: 50%",
            describe_members(
                enabled={**TEXT, "type": "boolean"},
                interval={**TEXT, "type": "integer", "minimum": 1, "maximum": 1_000_000},
            ),
            _take_over_memory,
        ),
    ),
)
FEATURE: Final = Feature(FIELDS.feature, maturity="stable", page="checkpoints.md", fields=FIELDS)

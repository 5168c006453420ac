"""The end of a pod as its termination message has it: with what only features read."""

from dataclasses import dataclass

from .failure_record import MOST_STEPS, RunEnd
from .group_facts import GroupFacts
from .records import choice, number, text


@dataclass(frozen=True)
class InputReport:
    """The state of one of spec.inputs in the pod that fetches it."""

    name: str = text()
    phase: str = choice(("Pending", "Fetching", "Fetched", "Failed"), "Pending")
    bytes: int = number(MOST_STEPS, default=0)
    total_bytes: int | None = number(MOST_STEPS)
    etag: str = text()
    checksum: str = text()
    reason: str = text()
    message: str = text()


@dataclass(frozen=True)
class PodEnd(RunEnd):
    """The end of a pod, with the parts of features."""

    groups: GroupFacts | None = None
    """Only of a pod that succeeded: whether the ranks formed one process group."""
    inputs: tuple[InputReport, ...] = ()
    """Only of a pod that fetches inputs."""

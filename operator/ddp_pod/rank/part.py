"""A feature's part in a rank and in the Python processes that its program starts."""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from ..base.files import log
from ..contract.names import ENV_RANK_FEATURES
from .groups import GroupRecorder

if TYPE_CHECKING:
    from .losses import LossReader


class StepObserver(Protocol):
    """Receives every iteration of a process. Its errors must not reach the script."""

    def watch(self, module: Any) -> None:
        """Hook the optimizers. ``module``: torch.optim.optimizer, loaded."""

    def end_step(self, optimizer: Any) -> None:
        """Note the end of an iteration."""

    def stop(self) -> None:
        """Stop: in a child of the process."""


class StepSampler(Protocol):
    """Examines some iterations of a process. ``next_step``: the step after which to call ``begin``."""

    next_step: float

    def begin(self, step: int) -> None:
        """Examine the next iteration if ``step``, the last one that was made, is due."""

    def stop(self) -> None:
        """Stop: in a child of the process."""


CreateSampler = Callable[[Any, Callable[[], Any], "LossReader"], "StepSampler | None"]
"""Takes torch, a function that returns the rank's slot, and what reads its losses."""


class RankPart(NamedTuple):
    """The hooks of a feature in a rank. Those that it does not use are None.

    ``prepare``: called before the rank's program starts, which it may delay; ``observe``: returns an observer of the
    steps of this process, from the record of its rank; ``sample``: returns what examines some of them, unless one
    observes all.
    """

    prepare: Callable[[], None] | None = None
    observe: Callable[[Mapping[str, Any], GroupRecorder], StepObserver] | None = None
    sample: CreateSampler | None = None


def load_parts(load: Callable[[str], RankPart]) -> list[RankPart]:
    """Return the parts of the features that the launcher has named. One that cannot be loaded is logged."""
    parts = []
    for name in filter(None, os.environ.get(ENV_RANK_FEATURES, "").split(",")):
        try:
            parts.append(load(name))
        except Exception as error:  # the archive of this job lacks it, or a bug: the script runs without it
            _log_fault(name, error)
    return parts


def prepare(parts: Sequence[RankPart]) -> None:
    """Call the features to prepare this rank, before its program starts."""
    for part in parts:
        try:
            if part.prepare is not None:
                part.prepare()
        except Exception as error:
            _log_fault("prepare", error)


def create_observers(
    parts: Sequence[RankPart], worker: Mapping[str, Any], groups: GroupRecorder
) -> tuple[StepObserver, ...]:
    """Return the features' observers of this process's steps. ``worker``: the record of its rank."""
    observers = []
    for part in parts:
        try:
            if part.observe is not None:
                observers.append(part.observe(worker, groups))
        except Exception as error:
            _log_fault("observe", error)
    return tuple(observers)


def find_sampler(parts: Sequence[RankPart]) -> CreateSampler | None:
    """Return what creates the sampler of this process; None: no feature has one."""
    sample = next((part.sample for part in parts if part.sample is not None), None)
    if sample is None:
        return None

    def create(torch: Any, find_slot: Callable[[], Any], losses: "LossReader") -> StepSampler | None:
        try:
            return sample(torch, find_slot, losses)
        except Exception as error:
            _log_fault("sample", error)
            return None

    return create


def _log_fault(what: str, error: Exception) -> None:
    log(
        f"internal error of the launcher in a rank, {what}: {type(error).__name__}: {error}; the script runs without it"
    )

"""A feature's part in a rank and in the Python processes that its program starts."""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from ..base.files import log
from ..contract.names import ENV_RANK_FEATURES
from .groups import GroupRecorder


class StepObserver(Protocol):
    """Is told of every iteration of a process. Its errors must not reach the script."""

    def watch(self, module: Any) -> None:
        """Hook the optimizers. ``module``: torch.optim.optimizer, loaded."""

    def end_step(self, optimizer: Any) -> None:
        """Note the end of an iteration."""

    def stop(self) -> None:
        """Stop: in a child of the process."""


class RankPart(NamedTuple):
    """The hooks of a feature in a rank. Those that it does not use are None.

    ``prepare``: called before the rank's program starts, which it may delay; ``observe``: returns an observer of the
    steps of this process, from the record of its rank. The replicas are not sampled beside one.
    """

    prepare: Callable[[], None] | None = None
    observe: Callable[[Mapping[str, Any], GroupRecorder], StepObserver] | None = None


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
    """Let the features prepare this rank, before its program starts."""
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


def _log_fault(what: str, error: Exception) -> None:
    log(
        f"internal error of the launcher in a rank, {what}: {type(error).__name__}: {error}; the script runs without it"
    )

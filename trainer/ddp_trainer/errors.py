"""Exceptions that end a run, and warnings. A mistake that the user can fix is always a :class:`UserError`."""

import sys

from ddp_sdk.errors import UserError


class DataError(UserError):
    """A sample that only one rank can't read, while the other ranks are within a step."""


class Preempted(Exception):
    """All ranks agreed to stop after ``step`` because at least one of them received a signal."""

    def __init__(self, step: int, saved: bool) -> None:
        super().__init__(f"stopped after step {step}")
        self.step = step
        self.saved = saved


class Superseded(Exception):
    """A later attempt at the same job has started: this one must not write any more, and exits."""


def warn(message: str) -> None:
    """Print a warning to standard error without buffering."""
    print(f"ddp_trainer: warning: {message}", file=sys.stderr, flush=True)

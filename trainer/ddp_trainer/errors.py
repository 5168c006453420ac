"""How a run ends early, and warnings. What the user can put right is always a :class:`UserError`."""

import sys


class UserError(ValueError):
    """A mistake in the configuration or the data, which trying again cannot cure.

    Its text is ``<field>: <problem>; <remedy>``. The command line prints it once, on rank 0, without a traceback, and
    every rank exits with ``EXIT_USER_ERROR``.
    """

    def __init__(self, field: str, problem: str, remedy: str) -> None:
        super().__init__(f"{field}: {problem}; {remedy}")
        self.field = field
        self.problem = problem
        self.remedy = remedy


class DataError(UserError):
    """A sample that one rank alone can't read: the other ranks are in the middle of their steps."""


class Preempted(Exception):
    """All ranks agreed to stop after ``step`` because a signal asked at least one of them to."""

    def __init__(self, step: int, saved: bool) -> None:
        super().__init__(f"stopped after step {step}")
        self.step = step
        self.saved = saved


class Superseded(Exception):
    """A later attempt at the same job has begun: this one may write nothing any more, and ends."""


def require(condition: bool, field: str, problem: str, remedy: str) -> None:
    """Raise a :class:`UserError` unless ``condition`` holds."""
    if not condition:
        raise UserError(field, problem, remedy)


def warn(message: str) -> None:
    """Print a warning to standard error, at once."""
    print(f"ddp_trainer: warning: {message}", file=sys.stderr, flush=True)

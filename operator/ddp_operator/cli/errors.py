"""How a `ddp` command ends: the exit codes that scripts may rely on, and the one error that ends a command."""

from __future__ import annotations

from enum import IntEnum
from typing import Final


class ExitCode(IntEnum):
    """What scripts may rely on."""

    OK = 0
    FAILED = 1
    BAD_INPUT = 2
    NOT_FOUND = 3
    CLUSTER = 4
    BROKEN = 70
    INTERRUPTED = 130


MEANINGS: Final = {
    ExitCode.OK: "success; where the command waited for a job, the job succeeded",
    ExitCode.FAILED: "the job failed, or the command could not do what it was asked to do",
    ExitCode.BAD_INPUT: "invalid flag, file or manifest; nothing was changed",
    ExitCode.NOT_FOUND: "no job, or no run folder, of that name",
    ExitCode.CLUSTER: "the cluster is unreachable, denied access or refused the call",
    ExitCode.BROKEN: "a bug in ddp itself, with its traceback; `ddp run` stops the pods in order first",
    ExitCode.INTERRUPTED: "interrupted by Ctrl-C; `ddp run` returns 128 + the number of the signal",
}


class CommandError(Exception):
    """Ends a command. The text is one sentence that says what is wrong and what to do."""

    def __init__(self, message: str, code: ExitCode = ExitCode.BAD_INPUT) -> None:
        super().__init__(message)
        self.code = code

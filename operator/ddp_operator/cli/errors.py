"""How a `ddp` command ends: the exit codes that scripts may rely on, and the one error that ends a command."""

from enum import IntEnum


class ExitCode(IntEnum):
    """What scripts may rely on; docs/cli.md says what each means."""

    OK = 0
    FAILED = 1
    BAD_INPUT = 2
    NOT_FOUND = 3
    CLUSTER = 4
    BROKEN = 70
    INTERRUPTED = 130


class CommandError(Exception):
    """Ends a command. The text is one sentence that says what is wrong and what to do."""

    def __init__(self, message: str, code: ExitCode = ExitCode.BAD_INPUT) -> None:
        super().__init__(message)
        self.code = code

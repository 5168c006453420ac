"""How a `ddp` command ends: the exit codes that scripts may rely on, and the one error that ends a command."""

from __future__ import annotations

from typing import Final

OK: Final = 0
FAILED: Final = 1
BAD_INPUT: Final = 2
NOT_FOUND: Final = 3
CLUSTER: Final = 4
BROKEN: Final = 70
INTERRUPTED: Final = 130

MEANINGS: Final = {
    OK: "done; where the command waited for a job: it succeeded",
    FAILED: "the job failed, or what was asked for did not come about",
    BAD_INPUT: "refused: a flag, a file or the manifest in it; nothing was done",
    NOT_FOUND: "there is no job (or run folder) of that name",
    CLUSTER: "the cluster cannot be reached, does not let us in, or refused the call",
    BROKEN: "an error in ddp itself, with its traceback; `ddp run` has stopped the pods in order before",
    INTERRUPTED: "stopped by Ctrl-C; `ddp run` gives 128 + the number of the signal",
}


class CommandError(Exception):
    """Ends a command. The text is one sentence that says what is wrong and what to do."""

    def __init__(self, message: str, code: int = BAD_INPUT) -> None:
        super().__init__(message)
        self.code = code

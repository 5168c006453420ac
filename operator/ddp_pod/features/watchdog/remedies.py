"""Remedies for ranks that do not leave a line of the script."""

from typing import Final

from ...contract.failure_table import HANG

INHERITED_LOCK_REMEDY: Final = (
    "a forked process lacks the threads of its parent, with the locks they held and their work: start it before them, "
    "or by spawn (multiprocessing.get_context, multiprocessing_context)"
)
UNREAD_OUTPUT_REMEDY: Final = (
    "read the child's output while it runs (communicate(), a thread), or let it write to a file"
)
OPEN_INPUT_REMEDY: Final = "close the child's input (stdin.close(), communicate()), in every process that has it open"
OPEN_PIPE_REMEDY: Final = "a reader waits until all have closed the writing end: close it where it is unused"
FIFO_REMEDY: Final = "start the process that opens the FIFO's other end"
CHILD_REMEDY: Final = "find out what the child waits for, and give the wait a timeout"
UNPICKLED_REMEDY: Final = (
    "pickle makes an exception of a process anew from its args: pass all arguments of its constructor to "
    "super().__init__(), or define __reduce__"
)
DEAD_CHILD_REMEDY: Final = (
    "nobody puts what the rank waits for: see the child's end in the log, and give the wait a timeout that looks at "
    "is_alive()"
)
ANY_CHILD_REMEDY: Final = (
    "wait for the processes that the script has started by their ids: DataLoader workers and other helpers live on"
)
REMAINING_FILE_REMEDY: Final = (
    "a process must remove this file: delete a lock that a killed one has left, and let the loop give up after a time"
)
FILE_LOCK_REMEDY: Final = "find out which process holds the file's lock: it must release it, or end"
POLL_REMEDY: Final = "find out which rank or service should end this loop, and let the loop give up after a time"
RETRY_REMEDY: Final = "see in the log why each try fails, and let the loop give up after some of them"
MISSING_FILE_REMEDY: Final = (
    "let one rank create the file under the path for which all wait: broadcast() a name that each forms itself, or "
    "call barrier() instead"
)
SERVICE_REMEDY: Final = "check the service, which does not respond, and give its calls a timeout"
DDP_FORWARD_REMEDY: Final = (
    "the forward of DistributedDataParallel shares the model's buffers (as of BatchNorm) with all ranks: where only "
    "some evaluate, call model.module, or evaluate on all ranks"
)
ONE_WAY_REMEDY: Final = "let one rank of each pair send what the other receives, or use batch_isend_irecv() in both"

PAIR_REMEDY: Final = (
    "each send needs a recv on the other rank, with the same tag, and in the same order where the tag is the same"
)


def advise_on_line(line: str) -> str:
    """Return the remedy for a rank that does not leave a line of the script. ``line``: its source; empty: unknown."""
    return HANG.remedy.replace("its line", f"its line `{line}`", 1) if line else ""

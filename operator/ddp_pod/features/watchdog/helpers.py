"""For what a rank waits outside of collectives, and in which state that is: a thread, a process, a file, a service."""

import re
from typing import Final

from ...base.pod import Pod, WorkerRecord
from ...failures.rank_ends import PrintedTraceback, find_printed_traceback
from ...progress.output_ends import read_end
from .collectives import RankCollectives
from .polling import explain_polling
from .remedies import DEAD_CHILD_REMEDY, INHERITED_LOCK_REMEDY, UNPICKLED_REMEDY, UNREAD_OUTPUT_REMEDY
from .stacks import ChildStack, Helper, Stack, find_working_child
from .wait_channels import (
    find_blocked_child,
    find_dead_child,
    find_kernel_wait,
    sleeps_by_clock,
    waits_for_missing_thread,
)

# A constructor lacks arguments: in the thread of a pool, that of an object which it reads from a process.
_CONSTRUCTOR: Final = re.compile(r"\.__init__\(\) (missing|takes|got)\b")


def find_helper(pod: Pod, worker: WorkerRecord, stack: Stack | None) -> Helper:
    """Return the state of the thread or the child for which a rank waits. ``stack``: of its main thread, if known."""
    blocked = find_blocked_child(worker.pid)
    if blocked is not None:
        note = f"its process {blocked.pid} ({blocked.command}) waits until the rank reads its output: the pipe is full"
        return Helper(note, remedy=UNREAD_OUTPUT_REMEDY, is_final=True)
    if stack is None or not (stack.waits_for_thread or stack.waits_for_process):
        return Helper()
    printed = find_printed_traceback(read_end(pod, worker.local_rank))
    if printed is not None and _explains_wait(printed, stack):
        note = f"an exception has ended {printed.origin}: {printed.text}"
        is_unpickled = printed.is_thread and stack.waits_for_process and _CONSTRUCTOR.search(printed.message)
        return Helper(note, dead=printed, remedy=UNPICKLED_REMEDY if is_unpickled else "", has_ended=True)
    child = find_working_child(pod, worker) if stack.waits_for_process else None
    if child is not None:
        return _describe_child(child)
    dead = find_dead_child(worker.pid) if stack.waits_for_process else ""
    if dead:
        return Helper(dead, remedy=DEAD_CHILD_REMEDY, has_ended=True)
    if printed is not None and printed.is_last and not printed.origin:
        return Helper(f"the last exception in its log is {printed.text}")
    return Helper()


def _explains_wait(printed: PrintedTraceback, stack: Stack) -> bool:
    """Return whether a traceback in a rank's log ended a helper of the kind for which the rank waits."""
    return bool(printed.origin) and (stack.waits_for_thread if printed.is_thread else stack.waits_for_process)


def _describe_child(child: ChildStack) -> Helper:
    lacks_thread = waits_for_missing_thread(child.pid)
    remedy = INHERITED_LOCK_REMEDY if child.stack.waits_for_lock or lacks_thread else ""
    note = f"its {child.name} is in {child.stack.place}"
    note += ", which waits for another thread, and has none" if lacks_thread else ""
    return Helper(note, child=child, remedy=remedy, is_final=bool(remedy))


def explain_wait(worker: WorkerRecord, stack: Stack, collectives: RankCollectives) -> Helper:
    """Return the file or process for which a rank waits in the kernel, or the documentation of its call."""
    wait = find_kernel_wait(worker.pid)
    if wait is not None:
        return Helper(wait.note, remedy=wait.remedy, is_final=wait.is_final)
    if stack.frames and sleeps_by_clock(worker.pid):
        in_library = stack.frames[-1] != stack.script_frame
        paths = {} if in_library else collectives.paths  # of variables of the script
        polling = explain_polling(stack.frames[-1], paths, worker.pid, in_library=in_library)
        if polling is not None or not in_library:
            return Helper() if polling is None else Helper(polling.note, remedy=polling.remedy)
    call = collectives.call
    if not call.summary or not stack.has_called(call.path, call.function):
        return Helper()
    remedy = f"find out why the rank does not leave its line, {call.name}(): {call.documentation}"
    return Helper(call.summary, remedy=remedy)

"""Python stacks of running workers, as faulthandler writes them."""

import linecache
import os
import re
import time
from collections.abc import Sequence
from typing import NamedTuple

from ...base.exceptions import LIBRARY
from ...base.files import is_own_file, log
from ...base.pod import Pod, WorkerRecord
from ...base.runtime_files import STACK_LIMIT
from ...contract.processes import STACK_SIGNAL, STOPPED_STATES, find_family, kill, process_state
from ...contract.signal_handlers import catches
from ...failures.rank_ends import PrintedTraceback
from ...progress.rank_progress import RankReader

_FRAME = re.compile(r'  File "([^"]*)", line (\d+) in (.*)')
# A rank waits for its peers in one of torch's modules, or on a line that calls one of these. Torch's send() and recv()
# have frames of their own; without one it is a socket's.
_COLLECTIVE_FILES = re.compile(
    r"/torch/(distributed/|nn/parallel/distributed\.py|autograd/graph\.py|cuda/__init__\.py)"
)
_COLLECTIVE_CALLS = re.compile(
    r"\b(wait|all_\w+|broadcast\w*|barrier|reduce\w*|gather|scatter|synchronize|backward|item|tolist|cpu)\("
)
# Through these the call of an operator passes, such as the wait for a functional collective (DTensor, FSDP2).
_DISPATCH_FILES = re.compile(r"/torch/(_ops|_library/\w+)\.py$")
_FUNCTIONAL_FILE = re.compile(r"/torch/distributed/_functional_collectives\.py$")
_DDP_FILE = re.compile(r"/torch/nn/parallel/distributed\.py$")
# A lock that no call of the standard library acquires, such as a queue's, which waits for the work of another thread.
_LOCK = re.compile(r"\bacquire\(|^\s*(async )?with [\w.\[\]\"']+( as \w+)?:")
_STANDARD_LIBRARY = re.compile(r"[/\\]lib(64)?[/\\]python3[^/\\]*[/\\](?!(site|dist)-packages)|^<frozen ")
_LIBRARY_FOLDER = r"[/\\]lib(64)?[/\\]python3[^/\\]*[/\\]"
_THREAD_FILES = re.compile(_LIBRARY_FOLDER + r"(threading|queue|concurrent[/\\]futures[/\\]\w+)\.py$")
_PROCESS_FILES = re.compile(_LIBRARY_FOLDER + r"(selectors|multiprocessing[/\\]\w+)\.py$")
_POOL_FILE = re.compile(_LIBRARY_FOLDER + r"multiprocessing[/\\]pool\.py$")
_LOOP_FILE = re.compile(_LIBRARY_FOLDER + r"asyncio[/\\]base_events\.py$")
_LOADER_FILE = re.compile(r"/torch/utils/data/_utils/worker\.py$")
_SHIM_FUNCTION = "_run_and_record"  # of worker.py, below which the script runs
_LINE_LIMIT = 100  # characters
SECONDS_FOR_STACKS = 5.0
_SECONDS_FOR_CHILD = 1.0
_MOST_CHILDREN = 4  # of a rank, whose stacks are read
_SECONDS_UNCHANGED = 1.0  # after which an incomplete stack is taken as final


class StackFrame(NamedTuple):
    """One call of a stack."""

    path: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.function} ({os.path.basename(self.path)}:{self.line})"


class Stack(NamedTuple):
    """A worker's main thread: its frames, the outermost first and without the launcher's, and as text."""

    frames: list[StackFrame]
    text: str

    @property
    def waits_for_peers(self) -> bool:
        """Whether the innermost frame is in a collective operation, as far as Python shows."""
        return self.is_in_torch or bool(self.frames and _COLLECTIVE_CALLS.search(self.innermost_line))

    @property
    def is_in_torch(self) -> bool:
        """Whether the innermost frame is in a module of torch that calls collective operations."""
        return bool(self.frames and _COLLECTIVE_FILES.search(self.frames[-1].path))

    @property
    def waits_for_result(self) -> bool:
        """Whether the innermost frame waits for the result of a functional collective, which was called before."""
        return bool(self.frames and _FUNCTIONAL_FILE.search(self.frames[-1].path))

    @property
    def waits_for_lock(self) -> bool:
        """Whether the innermost call acquires a lock, other than to wait for another thread."""
        if not self.frames or _STANDARD_LIBRARY.search(self.frames[-1].path):
            return False
        return bool(_LOCK.search(self.innermost_line))

    @property
    def waits_for_thread(self) -> bool:
        """Whether the innermost frame waits for another thread of the program."""
        return bool(self.frames and _THREAD_FILES.search(self.frames[-1].path))

    @property
    def waits_for_process(self) -> bool:
        """Whether the innermost frame waits for a message of another process of the program.

        A pool of processes has a thread for these messages, for which its callers wait.
        """
        if self.waits_for_thread:
            return any(_POOL_FILE.search(frame.path) for frame in self.frames)
        return bool(self.frames and _PROCESS_FILES.search(self.frames[-1].path))

    @property
    def innermost_line(self) -> str:
        """The source of the innermost frame's line."""
        return linecache.getline(self.frames[-1].path, self.frames[-1].line)

    @property
    def script_place(self) -> str:
        """The innermost line of the script, such as ``evaluate (train.py:20)``; empty without one."""
        return str(self.script_frame or "")

    @property
    def script_line(self) -> str:
        """The source of that line, without its indentation."""
        frame = self.script_frame
        return "" if frame is None else linecache.getline(frame.path, frame.line).strip()[:_LINE_LIMIT]

    @property
    def script_frame(self) -> StackFrame | None:
        """The innermost frame of the script; None without one."""
        return next((frame for frame in reversed(self.frames) if not LIBRARY.search(frame.path)), None)

    @property
    def library_call(self) -> str:
        """The function of the innermost module that others have called, such as ``new_group``; empty for the script's.

        A decorator of another module, which has the name ``wrapper``, may stand between.
        """
        if not self.frames or not LIBRARY.search(self.frames[-1].path):
            return ""
        return next(frame.function for frame in self.frames if frame.path == self.frames[-1].path)

    def has_called(self, path: str, function: str) -> bool:
        """Return whether a frame is that of a function."""
        return any(frame.path == path and frame.function == function for frame in self.frames)

    @property
    def is_in_forward(self) -> bool:
        """Whether the wait is one of those in which DDP's forward shares the model's buffers."""
        return any(frame.function == "_pre_forward" and _DDP_FILE.search(frame.path) for frame in self.frames)

    @property
    def place(self) -> str:
        """The innermost frame of the script, and the library's frame that it called.

        Of the standard library that is the function which the script calls, such as ``put`` of a queue; of others the
        innermost one.
        """
        if not self.frames:
            return "an unknown place"
        own = [number for number, frame in enumerate(self.frames) if not LIBRARY.search(frame.path)]
        called = self.frames[own[-1] + 1 :] if own else self.frames
        shown = [self.frames[own[-1]]] if own else []
        if called:
            shown.append(called[0 if _STANDARD_LIBRARY.search(called[0].path) else -1])
        return ", in ".join(map(str, shown))


def add_awaited(stack: Stack, awaited: Sequence[StackFrame]) -> Stack:
    """Return a stack that ends in an event loop with the coroutines for which the loop waits; any other unchanged."""
    waits = bool(stack.frames) and stack.waits_for_process
    if not waits or not any(_LOOP_FILE.search(frame.path) for frame in stack.frames):
        return stack
    lines = [_format_frame(frame) for frame in awaited]
    return Stack([*stack.frames, *awaited], "\n".join([stack.text, *lines]))


def read_stack(text: str) -> Stack:
    """Read faulthandler's output for the main thread; empty if another thread received the signal."""
    if not _is_complete(text):
        return Stack([], "")
    frames = [StackFrame(path, int(line), function) for path, line, function in _FRAME.findall(text)]
    frames = [frame for frame in reversed(frames) if not is_own_file(frame.path)]
    while frames and _is_interpreter_frame(frames[0]):
        del frames[0]
    if not frames:
        return Stack([], "")
    lines = [_format_frame(frame) for frame in frames]
    while len(frames) > 1 and _DISPATCH_FILES.search(frames[-1].path):
        del frames[-1]
    return Stack(frames, "\n".join(["Stack (most recent call last):", *lines]))


def _format_frame(frame: StackFrame) -> str:
    return f'  File "{frame.path}", line {frame.line}, in {frame.function}'


def _is_interpreter_frame(frame: StackFrame) -> bool:
    return frame.path.startswith("<frozen ") or os.path.basename(frame.path) == "runpy.py"


def _is_complete(text: str) -> bool:
    """Return whether the main thread's stack is written to its end: up to the shim, or to faulthandler's limit."""
    return f" in {_SHIM_FUNCTION}\n" in text or "\n  ...\n" in text  # faulthandler writes the innermost hundred frames


def _read_from(path: str, offset: int) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            file.seek(offset)
            return file.read(STACK_LIMIT)
    except OSError:
        return ""


def collect_stacks(
    pod: Pod, reader: RankReader, workers: Sequence[WorkerRecord], *, quiet: bool = False
) -> dict[int, Stack]:
    """Return the Python stacks of all ranks by local rank, and log them unless ``quiet``."""
    texts = _request_stacks(pod, [worker for worker in workers if _can_write_stack(pod, worker)])
    if not quiet:
        for worker in workers:
            _log_stack(worker, texts.get(worker.local_rank, ""), reader)
    return {rank: read_stack(text) for rank, text in texts.items()}


class ChildStack(NamedTuple):
    """The stack of a process that a rank has forked."""

    pid: int
    stack: Stack

    @property
    def name(self) -> str:
        """What the process is, with its id."""
        is_loader = any(_LOADER_FILE.search(frame.path) for frame in self.stack.frames)
        return f"{'DataLoader worker' if is_loader else 'process'} {self.pid}"


class Helper(NamedTuple):
    """A thread, a child or a file for which a rank may wait: the exception that ended it, or where it is.

    ``is_final``: nobody else could end the wait; ``has_ended``: whether a fault has ended it.
    """

    note: str = ""
    dead: PrintedTraceback | None = None
    child: ChildStack | None = None
    remedy: str = ""
    is_final: bool = False
    has_ended: bool = False


def find_working_child(pod: Pod, worker: WorkerRecord) -> ChildStack | None:
    """Return a child for which a rank may wait: idle ones, such as other DataLoader workers, wait for the rank.

    A forked process has the rank's signal handler, which writes into the rank's file.
    """
    for pid in find_family(worker.pid)[1 : 1 + _MOST_CHILDREN]:
        if process_state(pid) in STOPPED_STATES or not catches(pid, STACK_SIGNAL):
            continue
        stack = _request_stack(_stack_path(pod, worker), pid)
        if stack.frames and not stack.waits_for_process:
            return ChildStack(pid, stack)
    return None


def _request_stack(path: str, pid: int) -> Stack:
    """Return the stack of a child, empty if it does not respond. ``path``: of the file to which it writes."""
    try:
        offset = os.path.getsize(path)
    except OSError:
        return Stack([], "")
    kill(pid, STACK_SIGNAL)
    deadline = time.monotonic() + _SECONDS_FOR_CHILD
    text = ""
    while time.monotonic() < deadline and not _is_complete(text):
        time.sleep(0.05)
        text = _read_from(path, offset)
    return read_stack(text)


def _stack_path(pod: Pod, worker: WorkerRecord) -> str:
    return os.path.join(pod.runtime, "stacks", str(worker.local_rank))


def _can_write_stack(pod: Pod, worker: WorkerRecord) -> bool:
    """Return whether a worker writes its stack on a signal; others ignore it or are killed by it."""
    if worker.kind == "program" or process_state(worker.pid) in STOPPED_STATES:
        return False
    return os.path.exists(_stack_path(pod, worker)) and catches(worker.pid, STACK_SIGNAL)


def _request_stacks(pod: Pod, workers: Sequence[WorkerRecord]) -> dict[int, str]:
    """Signal the workers and return their output by local rank, within SECONDS_FOR_STACKS."""
    paths = {worker.local_rank: _stack_path(pod, worker) for worker in workers}
    offsets = {rank: os.path.getsize(path) for rank, path in paths.items()}
    for worker in workers:
        kill(worker.pid, STACK_SIGNAL)

    texts: dict[int, str] = {}
    start = time.monotonic()
    changed = start
    while time.monotonic() - start < SECONDS_FOR_STACKS:
        time.sleep(0.05)
        before = texts
        texts = {rank: _read_from(paths[rank], offset) for rank, offset in offsets.items()}
        if texts != before:
            changed = time.monotonic()
        settled = all(texts.values()) and time.monotonic() - changed > _SECONDS_UNCHANGED
        if settled or all(map(_is_complete, texts.values())):
            break
    return texts


def _log_stack(worker: WorkerRecord, text: str, reader: RankReader) -> None:
    state = process_state(worker.pid) or "gone"
    log(f"---- rank {worker.rank} (pid {worker.pid}, state {state}) ----")
    log(text or "no stack: the process does not respond")
    threads = reader.threads(worker.local_rank) if text else ""
    if threads:
        log(threads)

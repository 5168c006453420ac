"""The ranks' output on its way to the pod's log, in a process of its own."""

import dataclasses
import os
import re
import select
import signal
import time
from contextlib import suppress
from typing import Any, Callable, Optional

from .files import is_own_file, log, read_json
from .log_patterns import COLOURS, KnownLoops, LogProgress, PatternTooSlow, compile_log_pattern
from .pod import Pod
from .processes import STOP_SIGNALS, set_parent_death_signal
from .tracebacks import PLACE, describe

_LONGEST_LINE = 1 << 16  # what is longer is shown in pieces
_LINE_SECONDS = 1.0
_SECONDS_TO_READ = 30.0  # to pass on what ended workers have written
_END_BYTES = 8192  # of a rank's output, kept for a failure that leaves nothing else
_END_LINES = 15
_END_WIDTH = 300
# The first word of a torchrun that a shell has started: what follows is its own stack and summary, not the cause.
_TORCHRUNS_WORDS = re.compile(r'^(?!.*File ").*torch[./]distributed[./]elastic[./]', re.MULTILINE)


class Lines:
    """One rank's output as whole lines, each with the rank in front: a pod with several ranks has one log."""

    def __init__(self) -> None:
        self.rest = b""  # which has no end yet
        self._since = 0.0

    def feed(self, chunk: bytes, rank: int, now: float) -> bytes:
        """Take in output; return what to write. A line that has no end yet waits for it, at most a second."""
        if chunk and not self.rest:
            self._since = now
        *whole, self.rest = (self.rest + chunk).split(b"\n")
        if self.rest and (len(self.rest) > _LONGEST_LINE or now - self._since > _LINE_SECONDS):
            whole.append(self.rest)
            self.rest = b""
        elif whole:
            self._since = now
        front = b"[rank%d]: " % rank
        # torch marks the lines of an uncaught exception itself.
        return b"".join((line if line.startswith(front) else front + line) + b"\n" for line in whole)


def read_output(
    pod: Pod, sources: dict[int, int], done: int, *, marked: bool = False, known_loops: bool = False
) -> None:
    """Copy what the ranks write to this pod's log, keep a page of the progress that it shows, and at last its end.

    ``sources`` maps local ranks to their pipes; ``marked``: each line gets its rank in front; ``known_loops``: where
    the job has no patterns, rank 0's lines are those of a known loop. Ends when ``done`` is closed and the pipes are
    empty.
    """

    def give_up(number: int, frame: Any) -> None:
        raise PatternTooSlow

    signal.signal(signal.SIGVTALRM, give_up)
    patterns: list[re.Pattern[str]] = []
    for text in pod.log_patterns:
        try:
            patterns.append(compile_log_pattern(text))
        except ValueError as error:
            log(f"metrics.logPatterns: {text!r} {error}")
    known_loops = known_loops and not pod.log_patterns
    ranks = {
        descriptor: (rank, KnownLoops(pod.epochs, pod.steps) if known_loops else LogProgress(patterns, pod.epochs))
        for rank, descriptor in sources.items()
    }
    lines = {descriptor: Lines() for descriptor in ranks} if marked else {}
    processes: dict[int, Any] = {}
    ends = dict.fromkeys(ranks, b"")
    changed: set[int] = set()
    written = 0.0
    ending = False
    while True:
        pause = 0.0 if ending else 0.05 if changed else 0.5
        ready = select.select([*ranks, *([] if ending else [done])], [], [], pause)[0]
        ending = ending or done in ready
        received = False
        for descriptor in ready:
            if descriptor == done:
                continue
            chunk = os.read(descriptor, 65536)
            received = received or bool(chunk)
            rank = ranks[descriptor][0]
            about = _about_worker(pod, rank)
            if processes.setdefault(descriptor, about.get("pid")) != about.get("pid"):
                processes[descriptor] = about.get("pid")
                ranks[descriptor] = (rank, ranks[descriptor][1].restarted())  # counters begin anew with a process
                ends[descriptor] = b""
            ends[descriptor] = (ends[descriptor] + chunk)[-_END_BYTES:]
            shown = chunk
            if marked:
                shown = lines[descriptor].feed(chunk, _global_rank(pod, rank, about), time.monotonic())
            _write_all(1, shown)
            searched = _global_rank(pod, rank, about) == 0 if known_loops else bool(patterns)
            if searched and ranks[descriptor][1].feed(chunk, time.time()):
                changed.add(descriptor)
        over = ending and not received
        for descriptor, some in lines.items():
            if some.rest:
                local_rank = ranks[descriptor][0]
                rank = _global_rank(pod, local_rank, _about_worker(pod, local_rank))
                _write_all(1, some.feed(b"\n" if over else b"", rank, time.monotonic()))
        if changed and (over or not received or time.monotonic() - written > 0.5):
            written = time.monotonic()
            for descriptor in changed:
                write_page(pod, *ranks[descriptor], "log")
            changed.clear()
        if over:
            for descriptor, end in ends.items():
                _write_end(pod, ranks[descriptor][0], end)
            return


def keep_reading(pod: Pod, sources: dict[int, int], done: int, *, marked: bool = False) -> None:
    """Do as read_output does, and after an error of ours go on without patterns and marks.

    A pipe that nobody reads would end the training.
    """
    try:
        read_output(pod, sources, done, marked=marked, known_loops=True)
    except Exception as error:
        log(f"the log goes on without patterns and ranks, please report it: {describe(error)['traceback']}")
        read_output(dataclasses.replace(pod, log_patterns=()), sources, done)


def _end_path(pod: Pod, local_rank: int) -> str:
    return os.path.join(pod.runtime, "output", f"{local_rank}.end")


def _write_end(pod: Pod, local_rank: int, end: bytes) -> None:
    with suppress(OSError), open(_end_path(pod, local_rank), "wb") as file:  # else the log has it
        file.write(end)


def read_last_lines(pod: Pod, local_rank: int) -> str:
    """Return the last lines that a rank has written; empty where its output did not go through the reader."""
    try:
        with open(_end_path(pod, local_rank), "rb") as file:
            text = COLOURS.sub("", file.read(_END_BYTES).decode("utf-8", "replace"))
    except OSError:
        return ""
    torchruns = _TORCHRUNS_WORDS.search(text)
    if torchruns:
        text = text[: torchruns.start()].strip() or text
    lines = [line.rstrip() for line in text.splitlines() if line.strip() and not _is_of_shim(line)]
    return "\n".join(line[:_END_WIDTH] for line in lines[-_END_LINES:])


def _is_of_shim(line: str) -> bool:
    """Tell whether a line of a crash report names a place of the shim, or which modules are loaded."""
    place = PLACE.match(line)
    return is_own_file(place[1]) if place else "Extension modules: " in line


def _write_all(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def _about_worker(pod: Pod, local_rank: int) -> dict[str, Any]:
    """Return what a worker has recorded of itself, empty before it has."""
    return read_json(os.path.join(pod.runtime, "workers", f"{local_rank}.json"))


def _global_rank(pod: Pod, local_rank: int, about: dict[str, Any]) -> int:
    """Return the rank that a worker has, or that it would have if ranks went by the pods' order."""
    rank = about.get("rank")
    return rank if isinstance(rank, int) else pod.node * pod.nproc_per_node + local_rank


def write_page(pod: Pod, local_rank: int, progress: LogProgress, source: str) -> None:
    """Keep a rank's page for the metrics' endpoint. ``source``: ``log`` or ``post``."""
    path = os.path.join(pod.runtime, "metrics", f"{local_rank}.{source}")
    with suppress(OSError):  # a full disk must not end the log
        with open(f"{path}.tmp", "w", encoding="utf-8") as file:
            about = _about_worker(pod, local_rank)
            file.write(progress.page(_global_rank(pod, local_rank, about), about.get("worldSize")))
        os.replace(f"{path}.tmp", path)


class OutputReader:
    """The process through which the ranks' output goes, so that no pattern can hold up the launcher."""

    def __init__(self, pod: Pod, *, marked: bool) -> None:
        self._pod = pod
        self._marked = marked
        self.pid = 0
        self.guard: Optional[int] = None  # closed to end the process

    def start(self) -> None:
        """Make a pipe for each local rank, and fork the process that reads them."""
        sources: dict[int, int] = {}
        for rank in range(self._pod.nproc_per_node):
            path = os.path.join(self._pod.runtime, "output", str(rank))
            os.mkfifo(path, 0o600)
            sources[rank] = os.open(path, os.O_RDWR)  # never at its end, whoever closes it
        done, self.guard = os.pipe()
        launcher = os.getpid()
        self.pid = os.fork()
        if not self.pid:
            try:
                signal.set_wakeup_fd(-1)
                for number in (*STOP_SIGNALS, signal.SIGUSR1):
                    signal.signal(number, signal.SIG_IGN)
                os.close(self.guard)
                set_parent_death_signal(launcher)
                keep_reading(self._pod, sources, done, marked=self._marked)
            except BaseException as error:
                log(describe(error)["traceback"])
            finally:
                os._exit(0)
        for descriptor in (*sources.values(), done):
            os.close(descriptor)

    def finish(self, reap: Callable[[], None]) -> None:
        """Let the process pass on what is still in the pipes; ``reap`` notes the end of children."""
        if self.guard is None:
            return
        os.close(self.guard)
        self.guard = None
        deadline = time.monotonic() + _SECONDS_TO_READ
        while self.pid and time.monotonic() < deadline:
            reap()
            time.sleep(0.005)

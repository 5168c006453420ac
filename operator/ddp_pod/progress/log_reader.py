"""The program of the log reader: it copies the ranks' output to the pod's log, and searches it for progress."""

import dataclasses
import os
import re
import select
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from ..base.exceptions import describe
from ..base.files import log, write_json
from ..base.pod import Pod, WorkerRecord, read_worker
from ..contract.log_patterns import compile_log_pattern
from ..contract.records import to_json
from ..rank.counters import CounterMemory, RankCounters
from .line_progress import LineProgress
from .log_patterns import LogProgress, PatternTooSlow
from .output_ends import END_BYTES, SECONDS_TO_KEEP, end_path
from .step_hints import StepHint

_LONGEST_LINE = 1 << 16  # bytes; longer lines are written in pieces
_LINE_SECONDS = 1.0  # after which a line without an end is written
_CHUNK = 1 << 16
_FILE_SECONDS = 0.5  # between two files of progress while output arrives without a pause
_CRASH_MARK = b"terminate called after"  # by the C++ runtime, before it aborts the process

Progress = LogProgress | LineProgress


class Lines:
    """One rank's output as whole lines with the rank as prefix: the ranks of a pod share its log."""

    def __init__(self) -> None:
        self.rest = b""  # of a line without an end
        self._since = 0.0

    def feed(self, chunk: bytes, rank: int, now: float) -> bytes:
        """Return the lines to write. A line without an end is held back for at most a second."""
        if chunk and not self.rest:
            self._since = now
        *complete, self.rest = (self.rest + chunk).split(b"\n")
        if self.rest and (len(self.rest) > _LONGEST_LINE or now - self._since > _LINE_SECONDS):
            complete.append(self.rest)
            self.rest = b""
        elif complete:
            self._since = now
        prefix = b"[rank%d]: " % rank
        # torch itself prefixes the lines of an uncaught exception.
        return b"".join((line if line.startswith(prefix) else prefix + line) + b"\n" for line in complete)


class _RankOutput:
    """The output of one local rank. ``lines``: None if its lines get no prefix; ``end``: the last bytes."""

    def __init__(self, pod: Pod, local_rank: int, progress: Progress, lines: Lines | None) -> None:
        self.local_rank = local_rank
        self.progress = progress
        self.end = b""
        self._pod = pod
        self._lines = lines
        self._pid: int | None = None  # of the last chunk's process
        self._is_read = False
        self._is_kept = True  # whether the file has the last bytes
        self._kept_at = 0.0

    def observe_process(self, worker: WorkerRecord | None) -> None:
        """Restart the counters if the rank has a new process."""
        pid = worker.pid if worker else None
        if self._is_read and self._pid != pid:
            self.progress = self.progress.restarted()
            self.end = b""
        self._is_read = True
        self._pid = pid

    def write(self, chunk: bytes, rank: int) -> None:
        """Copy a chunk to the log."""
        self.end = (self.end + chunk)[-END_BYTES:]
        self._is_kept = False
        if _CRASH_MARK in self.end:
            self.write_end()  # the decision about a restart needs it before the reader ends
        _write_all(1, chunk if self._lines is None else self._lines.feed(chunk, rank, time.monotonic()))

    def flush(self, *, final: bool) -> None:
        """Write a held back line whose time is over, or any if ``final``."""
        if self._lines is None or not self._lines.rest:
            return
        rank = _global_rank(self._pod, self.local_rank, read_worker(self._pod, self.local_rank))
        _write_all(1, self._lines.feed(b"\n" if final else b"", rank, time.monotonic()))

    def write_end(self) -> None:
        """Keep the last bytes for the termination message; if the disk is full, only the log has them."""
        path = end_path(self._pod, self.local_rank)
        self._is_kept = True
        self._kept_at = time.monotonic()
        with suppress(OSError):
            with open(f"{path}.new", "wb") as file:
                file.write(self.end)
            os.replace(f"{path}.new", path)

    def keep_end(self) -> None:
        """Keep the last bytes, at most once a second: they explain why a rank is silent, or why its peers lost it."""
        if not self._is_kept and time.monotonic() - self._kept_at >= SECONDS_TO_KEEP:
            self.write_end()


class _Copier:
    """Copies the output of all ranks to the log and keeps the progress that it shows."""

    def __init__(self, pod: Pod, sources: Mapping[int, int], *, marked: bool, counters: CounterMemory | None) -> None:
        self._pod = pod
        self._counters = counters
        self._patterns = _compile_patterns(pod)
        self._outputs: dict[int, _RankOutput] = {}
        for local_rank, descriptor in sources.items():
            progress = self._build_progress(local_rank)
            self._outputs[descriptor] = _RankOutput(pod, local_rank, progress, Lines() if marked else None)
        self._hint = StepHint(pod, 0)
        self._changed: set[int] = set()  # descriptors whose progress is newer than its file
        self._written_at = 0.0

    def _build_progress(self, local_rank: int) -> Progress:
        counters = self._counters

        def read_counters() -> RankCounters | None:
            return None if counters is None else counters.read(local_rank)

        if self._pod.log_patterns:
            return LogProgress(self._patterns, self._pod.epochs, read_counters=read_counters)
        return LineProgress(read_counters, self._pod.epochs, self._pod.steps)

    def run(self, done: int) -> None:
        """Copy until ``done`` is closed and the pipes are empty."""
        ending = False
        while True:
            watched = list(self._outputs) if ending else [*self._outputs, done]
            ready = select.select(watched, [], [], self._find_timeout(ending))[0]
            ending = ending or done in ready
            received = False
            for descriptor in ready:
                if descriptor != done and self._copy(descriptor):
                    received = True

            self._log_hint()
            finished = ending and not received
            for output in self._outputs.values():
                output.flush(final=finished)
                output.keep_end()
            if finished or not received or time.monotonic() - self._written_at > _FILE_SECONDS:
                self._write_progress()
            if finished:
                for output in self._outputs.values():
                    output.observe_process(read_worker(self._pod, output.local_rank))  # it may have written nothing
                    output.write_end()
                return

    def _log_hint(self) -> None:
        """Log once how to make the steps of rank 0 visible, if they are not."""
        if self._pod.node != 0:
            return
        hint = self._hint.build(read_worker(self._pod, 0), self._counters.read(0) if self._counters else None)
        if not hint:
            return
        if any(output.end and not output.end.endswith(b"\n") for output in self._outputs.values()):
            _write_all(1, b"\n")  # the script has written a line without an end
        log(hint)

    def _find_timeout(self, ending: bool) -> float:
        if ending:
            return 0.0
        return 0.05 if self._changed else 0.5

    def _copy(self, descriptor: int) -> bool:
        """Copy one chunk. Returns whether the pipe had any."""
        chunk = os.read(descriptor, _CHUNK)
        output = self._outputs[descriptor]
        worker = read_worker(self._pod, output.local_rank)
        output.observe_process(worker)
        rank = _global_rank(self._pod, output.local_rank, worker)
        output.write(chunk, rank)
        if output.local_rank == 0 and self._pod.node == 0:
            self._hint.feed(chunk)
        searched = bool(self._patterns) if self._pod.log_patterns else rank == 0
        if searched and output.progress.feed(chunk, time.time()):
            self._changed.add(descriptor)
        return bool(chunk)

    def _write_progress(self) -> None:
        if not self._changed:
            return
        self._written_at = time.monotonic()
        for descriptor in self._changed:
            output = self._outputs[descriptor]
            _write_progress(self._pod, output.local_rank, output.progress)
        self._changed.clear()


def _compile_patterns(pod: Pod) -> list[re.Pattern[str]]:
    patterns = []
    for text in pod.log_patterns:
        try:
            patterns.append(compile_log_pattern(text))
        except ValueError as error:
            log(f"metrics.logPatterns: {text!r} is disabled: it {error}")
    return patterns


def read_output(
    pod: Pod,
    sources: Mapping[int, int],
    done: int,
    *,
    marked: bool = False,
    counters: CounterMemory | None = None,
) -> None:
    """Copy the ranks' output to this pod's log; keep the progress that it shows, and its last bytes.

    ``sources``: pipes by local rank; ``marked``: prefix each line with its rank; ``counters``: of the ranks, with which
    the lines of rank 0 are searched if the job has no patterns. Returns when ``done`` is closed and the pipes are
    empty.
    """

    def interrupt_match(number: int, frame: Any) -> None:
        raise PatternTooSlow

    signal.signal(signal.SIGVTALRM, interrupt_match)
    _Copier(pod, sources, marked=marked, counters=counters).run(done)


def keep_reading(
    pod: Pod,
    sources: Mapping[int, int],
    done: int,
    *,
    marked: bool = False,
    counters: CounterMemory | None = None,
) -> None:
    """Copy as read_output does; after an internal error, continue without patterns and prefixes.

    Workers block on a pipe that is not read.
    """
    try:
        read_output(pod, sources, done, marked=marked, counters=counters)
    except Exception as error:  # after any bug, the pipes must still be read
        log(
            "internal error in the log reader; log patterns and rank prefixes are disabled. Please report this: "
            f"{describe(error)['traceback']}"
        )
        read_output(dataclasses.replace(pod, log_patterns=()), sources, done)


def _write_all(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def _global_rank(pod: Pod, local_rank: int, worker: WorkerRecord | None) -> int:
    """Return the rank of a worker; before it is recorded, the rank by the order of the pods."""
    return pod.node * pod.nproc_per_node + local_rank if worker is None else worker.rank


def _write_progress(pod: Pod, local_rank: int, progress: Progress) -> None:
    """Write a rank's progress for the reader of the ranks."""
    worker = read_worker(pod, local_rank)
    record = progress.build(_global_rank(pod, local_rank, worker), worker.world_size if worker else None)
    with suppress(OSError):  # a full disk must not stop the log
        write_json(os.path.join(pod.runtime, "metrics", f"{local_rank}.log"), to_json(record))

"""The logs of a job in pieces: read backwards from the end, chosen by rank and text, and followed while it runs."""

import heapq
import os
import queue
import re
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Final, NamedTuple

from ddp_cli.client.errors import ClientError
from ddp_cli.client.job import Job
from ddp_cli.client.local import LocalBackend
from ddp_cli.client.logs import Line, LogPod, LogSource, PodLogs, RunLogs, split_line
from ddp_cli.local.folder import RunFolder
from ddp_cli.local.log_times import find_time, read_notes
from ddp_cli.view.terminal import make_printable
from ddp_operator.api.display_texts import format_micro_time
from ddp_operator.api.kubeobjects import utc_now

WINDOW_LINES: Final = 400
_CHUNK: Final = 256 << 10
_SEARCH_BYTES: Final = 8 << 20
"""Of all logs together, at most this much is read for one piece of a search; the next piece continues there."""
_LONGEST: Final = 2000
_MOST_PODS: Final = 16
_MOST_TAIL: Final = 20_000
SILENCE_SECONDS: Final = 20.0
_CURSOR: Final = re.compile(r"\d{0,9}(?:[:,]\d{1,15}){0,64}")


@dataclass(frozen=True, slots=True)
class LogQuery:
    """Which lines are shown. ``rank``: None stands for all; ``text``: a part of the line, in any case."""

    rank: int | None = None
    text: str = ""

    def takes(self, line: Line) -> bool:
        """Return whether a line is shown."""
        if self.rank is not None and not _is_of_rank(line.prefix, self.rank):
            return False
        return not self.text or self.text.casefold() in line.text.casefold()

    def choose(self, pods: Sequence[LogPod]) -> list[LogPod]:
        """Return the pods that may have lines of the query."""
        return [pod for pod in pods if self.rank is None or pod.node == self.rank // pod.nproc]


def _is_of_rank(prefix: str, rank: int) -> bool:
    """Return whether a line is that of a rank, or of all ranks of its pod."""
    first, _, last = prefix.rpartition(" ")[2].partition("-")
    return first.isdecimal() and (last or first).isdecimal() and int(first) <= rank <= int(last or first)


class LogPiece(NamedTuple):
    """Some lines, oldest first. ``before``: where older ones are read; empty: there are none. ``note``: what is cut.

    ``whole``: it has the lines of the newer pieces too.
    """

    lines: Sequence[Line] = ()
    before: str = ""
    note: str = ""
    whole: bool = False


def show_line(line: Line) -> Line:
    """Return a line without control characters, bounded."""
    text = make_printable(line.text[: 2 * _LONGEST])
    if len(text) > _LONGEST:
        text = f"{text[:_LONGEST]} … (cut; the line is longer)"
    return replace(line, text=text)


def read_piece(job: Job, query: LogQuery, cursor: str = "") -> LogPiece:
    """Return the last lines of a job before a cursor. Raises: ClientError."""
    if isinstance(job.backend, LocalBackend):
        return _read_run_piece(job.backend.folder(job.name), query, cursor)
    tail = int(cursor) if cursor.isdecimal() and len(cursor) < 9 else WINDOW_LINES
    tail = min(tail, _MOST_TAIL)
    return _read_pod_piece(job.backend.logs(job.name, node=None, attempt=None, tail=tail), query, tail)


def _read_run_piece(folder: RunFolder, query: LogQuery, cursor: str) -> LogPiece:
    """Return the last lines of a run before a cursor, of one attempt: those of earlier ones are older pieces.

    ``cursor``: the attempt and the offsets in the logs of its pods, as in 2:100,200; without offsets: their ends.
    """
    if not _CURSOR.fullmatch(cursor):
        raise ClientError("before: not the cursor of a piece; reload the page")
    number, _, rest = cursor.partition(":")
    pods = query.choose(RunLogs(folder, None, None, None).pods())
    attempts = sorted({pod.attempt for pod in pods if not number or pod.attempt <= int(number)})
    if not attempts:
        return LogPiece()
    chosen = [pod for pod in pods if pod.attempt == attempts[-1]][:_MOST_PODS]
    ends: list[int | None] = [int(offset) for offset in rest.split(",") if offset]
    piece = _read_attempt(folder, chosen, query, ends if len(ends) == len(chosen) else [None] * len(chosen))
    older = str(attempts[-2]) if len(attempts) > 1 else ""
    return piece._replace(before=piece.before or older)


class _FoundLine(NamedTuple):
    """A line, and its end in the log of its pod. ``pod``: the number of that among several."""

    line: Line
    end: int
    pod: int


def _read_attempt(folder: RunFolder, pods: Sequence[LogPod], query: LogQuery, ends: Sequence[int | None]) -> LogPiece:
    """Return the last lines of an attempt before some offsets, by their times; untimed logs have equal shares."""
    limit = (_CHUNK if query == LogQuery() else _SEARCH_BYTES) // len(pods)
    starts = []
    found: list[_FoundLine] = []
    for number, (pod, end) in enumerate(zip(pods, ends, strict=True)):
        notes = read_notes(folder, Path(pod.name))
        start, lines = _read_back(folder, pod, end, limit)
        lines = [(line, end) for line, end in lines if query.takes(line)]
        most = WINDOW_LINES if notes else WINDOW_LINES // len(pods)
        starts.append(lines[-most - 1][1] if len(lines) > most else start)
        found += [_FoundLine(replace(line, time=find_time(notes, end)), end, number) for line, end in lines[-most:]]
    found.sort(key=lambda item: item.line.time or "~")  # the newest have no time yet
    for item in found[:-WINDOW_LINES]:
        starts[item.pod] = item.end  # the next piece has it
    before = f"{pods[0].attempt}:{','.join(map(str, starts))}" if any(starts) else ""
    is_cut = any(starts) and len(found) < WINDOW_LINES and query != LogQuery()
    note = f"Searched {_SEARCH_BYTES >> 20} MiB; older lines are searched on request." if is_cut else ""
    return LogPiece([show_line(item.line) for item in found[-WINDOW_LINES:]], before, note)


def _read_back(folder: RunFolder, pod: LogPod, end: int | None, limit: int) -> tuple[int, list[tuple[Line, int]]]:
    """Return the lines in the bytes before ``end`` (None: all) with their ends, and the offset at which they begin."""
    try:
        with open(pod.name, "rb", opener=folder.open_file) as stream:
            size = stream.seek(0, os.SEEK_END)
            end = size if end is None else min(end, size)
            start = stream.seek(max(0, end - limit))
            data = stream.read(end - start)
    except OSError:
        return 0, []
    if start:
        start += data.find(b"\n", 0, -1) + 1  # a line that is longer than all is divided
    lines = []
    place = start
    for raw in data[start - end :].split(b"\n") if start < end else ():
        place += len(raw) + 1
        if raw:
            lines.append((split_line(f" {raw.decode('utf-8', 'replace')}", pod), min(place, end)))
    return start, lines


def _read_pod_piece(source: LogSource, query: LogQuery, tail: int) -> LogPiece:
    """Return the last lines of a job's pods, merged by their times. ``tail``: the number of lines of each pod.

    The API server reads from the end only, so older lines come with the newer ones. Raises: ClientError.
    """
    pods = query.choose(source.pods())
    shown = pods[-_MOST_PODS:]
    notes = [f"The last {len(shown)} of {len(pods)} pods; choose a rank for another one."] if shown != pods else []
    kept: deque[Line] = deque(maxlen=tail)
    total = 0
    streams = [islice(source.lines(pod, follow=False), _MOST_TAIL) for pod in shown]
    for line in heapq.merge(*streams, key=lambda line: (line.attempt, line.order)):
        total += 1
        if query.takes(line):
            kept.append(show_line(line))
    before = f"{4 * tail}" if tail <= total and tail < _MOST_TAIL else ""
    if total >= tail and not before:
        notes.append("Older lines: ddp logs.")
    return LogPiece(list(kept), before, " ".join(notes), whole=True)


class LogFollower:
    """Reads the lines that a job writes from now on: a thread for each pod, also for pods that start later."""

    def __init__(self, source: PodLogs | RunLogs) -> None:
        self._source = source
        self._queue: queue.Queue[Line] = queue.Queue(maxsize=_MOST_TAIL)
        self._threads: dict[str, threading.Thread] = {}

    def read(self, query: LogQuery) -> list[Line]:
        """Return the last new lines of a query."""
        for pod in query.choose(self._source.pods()):
            followed = sum(thread.is_alive() for thread in self._threads.values())
            if pod.name not in self._threads and followed < _MOST_PODS:
                self._threads[pod.name] = threading.Thread(target=self._follow, args=(pod,), daemon=True)
                self._threads[pod.name].start()
        now = format_micro_time(utc_now())
        taken: list[Line] = []
        with suppress(queue.Empty):
            for _ in range(_MOST_TAIL):
                line = self._queue.get_nowait()
                if query.takes(line):
                    taken.append(show_line(replace(line, time=line.time or now)))  # those of a run have none
        return taken[-WINDOW_LINES:]

    def _follow(self, pod: LogPod) -> None:
        with suppress(ClientError):  # the pod was deleted, or its log may not be read; the pieces state the reason
            for line in self._source.lines(pod, follow=True):
                if self._source.left.is_set():
                    return
                with suppress(queue.Full):  # more than a page shows
                    self._queue.put_nowait(line)

    def close(self) -> None:
        """End the threads at their next line, or after some seconds of silence."""
        self._source.left.set()

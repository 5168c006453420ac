"""The logs of a job in pieces: read backwards from the end, chosen by rank and text, and followed while it runs."""

import heapq
import os
import queue
import re
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Final, NamedTuple

from ddp_cli.client.api import Api
from ddp_cli.client.errors import ClientError
from ddp_cli.client.logs import Line, LogPod, LogSource, PodLogs, split_line
from ddp_cli.local.folder import RunFolder
from ddp_cli.local.log_times import find_time, read_notes
from ddp_cli.local.screen import LogFile, Tail, find_logs
from ddp_cli.view.terminal import make_printable
from ddp_operator.api.kubeobjects import format_micro_time, utc_now

WINDOW_LINES: Final = 400
_CHUNK: Final = 256 << 10
_MOST_BYTES: Final = 8 << 20
"""Of all logs together, at most this much is read for one piece; the next piece continues there."""
_LONGEST: Final = 2000
MOST_PODS: Final = 16
_MOST_TAIL: Final = 20_000
_SILENCE_SECONDS: Final = 20.0
_CURSOR: Final = re.compile(r"\d{1,9}(?:[:,]\d{1,15}){0,64}")


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


def _is_of_rank(prefix: str, rank: int) -> bool:
    """Return whether a line is that of a rank, or of all ranks of its pod."""
    word, _, numbers = prefix.partition(" ")
    first, _, last = numbers.partition("-")
    if word == "rank":
        return numbers == str(rank)
    return first.isdecimal() and (last or first).isdecimal() and int(first) <= rank <= int(last or first)


class ShownLine(NamedTuple):
    """A line as it is shown: its rank, its attempt, its time (empty: not known) and its text."""

    prefix: str
    attempt: int
    time: str
    text: str


class LogPiece(NamedTuple):
    """Some lines, oldest first. ``before``: where older ones are read; empty: there are none. ``note``: what is cut."""

    lines: Sequence[ShownLine]
    before: str = ""
    note: str = ""


def show_line(line: Line, attempt: int) -> ShownLine:
    """Return a line without control characters, bounded."""
    text = make_printable(line.text[: 2 * _LONGEST])
    if len(text) > _LONGEST:
        text = f"{text[:_LONGEST]} … (cut; the line is longer)"
    return ShownLine(line.prefix, attempt, line.time, text)


def read_run_piece(folder: RunFolder, nproc: int, query: LogQuery, cursor: str = "") -> LogPiece:
    """Return the last lines of a run before a cursor, of one attempt: those of earlier ones are older pieces."""
    files = find_logs(folder.logs)
    attempts = sorted({file.attempt for file in files}, reverse=True)
    attempt, offsets = _parse_cursor(cursor)
    for number in attempts:
        if attempt is not None and number > attempt:
            continue
        chosen = [file for file in files if file.attempt == number]
        chosen = _choose_pods(chosen, query, nproc)
        ends = offsets if number == attempt and len(offsets) == len(chosen) else None
        piece = _read_attempt(folder, chosen, nproc, query, ends)
        older = piece.before or (f"{number - 1}" if any(other < number for other in attempts) else "")
        if piece.lines or piece.before:
            return piece._replace(before=older)
        attempt, offsets = number - 1, ()
    return LogPiece(())


def _parse_cursor(cursor: str) -> tuple[int | None, tuple[int, ...]]:
    """Return the attempt and the offsets of a cursor. Raises: ClientError."""
    if not cursor:
        return None, ()
    if not _CURSOR.fullmatch(cursor):
        raise ClientError("before: not the cursor of a piece; reload the page")
    attempt, _, rest = cursor.partition(":")
    return int(attempt), tuple(map(int, filter(None, rest.split(","))))


def _choose_pods(files: Sequence[LogFile], query: LogQuery, nproc: int) -> list[LogFile]:
    """Return the files that may have lines of the query, at most ``MOST_PODS``."""
    if query.rank is not None:
        files = [file for file in files if file.node == query.rank // nproc]
    return list(files[:MOST_PODS])


class _FoundLine(NamedTuple):
    """A line, and its end in its file. ``file``: the number of its file among several."""

    line: Line
    end: int
    file: int = 0


def _read_attempt(
    folder: RunFolder, files: Sequence[LogFile], nproc: int, query: LogQuery, ends: Sequence[int] | None
) -> LogPiece:
    """Return the last lines of an attempt before some offsets, by their times; untimed files have equal shares."""
    starts = []
    is_cut = False
    found: list[_FoundLine] = []
    for number, file in enumerate(files):
        notes = read_notes(folder, file.path)
        pod = LogPod(str(file.path), "", file.attempt, file.node, nproc)
        most = WINDOW_LINES if notes else max(1, WINDOW_LINES // len(files))
        end = ends[number] if ends is not None else None
        start, lines, gave_up = _read_back(folder, pod, query, end, most, _MOST_BYTES // len(files))
        starts.append(start)
        is_cut = is_cut or gave_up
        found += [_FoundLine(replace(line, time=find_time(notes, end)), end, number) for line, end, _ in lines]
    found.sort(key=lambda item: item.line.time)
    for item in found[:-WINDOW_LINES]:
        starts[item.file] = item.end  # the next piece has it
    attempt = files[0].attempt if files else 0
    before = f"{attempt}:{','.join(map(str, starts))}" if any(starts) else ""
    note = f"Searched {_MOST_BYTES >> 20} MiB; older lines are searched on request." if is_cut and query.text else ""
    return LogPiece([show_line(item.line, attempt) for item in found[-WINDOW_LINES:]], before, note)


def _read_back(
    folder: RunFolder, pod: LogPod, query: LogQuery, end: int | None, most: int, limit: int
) -> tuple[int, list[_FoundLine], bool]:
    """Return the last lines of a file before ``end``, where they begin, and whether the limit of bytes was reached."""
    found: deque[_FoundLine] = deque()
    try:
        with open(Path(pod.name), "rb", opener=folder.open_file) as stream:
            size = stream.seek(0, os.SEEK_END)
            place = size if end is None else min(end, size)
            begin = place
            rest = b""
            while place > 0 and begin - place < limit:
                start = max(0, place - _CHUNK)
                stream.seek(start)
                data = stream.read(place - start) + rest
                head, *whole = data.split(b"\n")
                rest = head if start else b""
                texts = whole if start else [head, *whole]
                offset = start + len(data)
                for raw in reversed(texts):
                    offset -= len(raw)
                    line = split_line(f" {raw.decode('utf-8', 'replace')}", pod)
                    if raw and query.takes(line):
                        found.appendleft(_FoundLine(line, offset + len(raw)))
                        if len(found) >= most:
                            return max(0, offset), list(found), False
                    offset -= 1
                place = start
                if len(rest) > _CHUNK:  # one line without end
                    rest = b""
            return place + len(rest) if place else 0, list(found), place > 0
    except OSError:
        return 0, [], False


def read_tail(cursor: str) -> int:
    """Return how many lines of each pod a piece reads."""
    return min(int(cursor), _MOST_TAIL) if cursor.isdecimal() and len(cursor) < 9 else WINDOW_LINES


def read_pod_piece(source: LogSource, query: LogQuery, cursor: str = "") -> LogPiece:
    """Return the last lines of a job's pods, merged by their times. ``cursor``: see ``read_tail``.

    The API server reads from the end only, so older lines come with the newer ones. Raises: ClientError.
    """
    tail = read_tail(cursor)
    pods = source.pods()
    if query.rank is not None:
        pods = [pod for pod in pods if pod.node == query.rank // pod.nproc]
    shown = pods[-MOST_PODS:]
    note = (
        f"The last {len(shown)} of {len(pods)} pods; choose a rank for another one." if len(shown) < len(pods) else ""
    )
    streams = [_tag(source, pod) for pod in shown]
    kept: deque[ShownLine] = deque(maxlen=tail)
    total = 0
    for line, attempt in heapq.merge(*streams, key=lambda item: (item[1], item[0].order)):
        total += 1
        if query.takes(line):
            kept.append(show_line(line, attempt))
    more = f"{4 * tail}" if total >= tail and tail < _MOST_TAIL else ""
    if total >= tail and not more:
        note = f"{note} Older lines: ddp logs.".strip()
    return LogPiece(list(kept), more, note)


def _tag(source: LogSource, pod: LogPod) -> Iterator[tuple[Line, int]]:
    for line in islice(source.lines(pod, follow=False), _MOST_TAIL):
        yield line, pod.attempt


class RunFollower:
    """Reads the lines that a run writes from now on, a piece at each call."""

    def __init__(self, folder: RunFolder, nproc: int) -> None:
        self._nproc = nproc
        self._lines: list[ShownLine] = []
        self._tail = Tail(lambda: find_logs(folder.logs), self._add, folder.open_file)
        for file in find_logs(folder.logs):
            self._tail.skip_to(file, _size(file.path))

    def _add(self, file: LogFile, text: str) -> None:
        if len(self._lines) < _MOST_TAIL:
            pod = LogPod(str(file.path), "", file.attempt, file.node, self._nproc)
            self._lines.append(show_line(split_line(f"{format_micro_time(utc_now())} {text}", pod), file.attempt))

    def close(self) -> None:
        """End it: it holds nothing."""

    def read(self, query: LogQuery) -> list[ShownLine]:
        """Return the last new lines of a query."""
        self._tail.read()
        lines = self._lines
        self._lines = []
        return [line for line in lines if query.takes(Line(line.time, line.prefix, line.text))][-WINDOW_LINES:]


def _size(path: Path) -> int:
    try:
        return path.lstat().st_size
    except OSError:
        return 0


@dataclass(frozen=True, kw_only=True)
class _FollowedLogs(PodLogs):
    """The logs of pods until a viewer leaves."""

    left: threading.Event

    def _continues(self, pod: LogPod, *, is_broken: bool) -> bool:
        return not self.left.is_set() and super()._continues(pod, is_broken=is_broken)


class PodFollower:
    """Reads the lines that a job's pods write from now on: a stream for each pod, also of pods that start later."""

    def __init__(self, api: Api, name: str, list_pods: Callable[[], Sequence[LogPod]]) -> None:
        self._left = threading.Event()
        self._source = _FollowedLogs(
            api, name, None, None, None, since=1, silence_seconds=_SILENCE_SECONDS, left=self._left
        )
        self._list_pods = list_pods
        self._queue: queue.Queue[tuple[Line, int]] = queue.Queue(maxsize=_MOST_TAIL)
        self._started: set[str] = set()

    def read(self, query: LogQuery) -> list[ShownLine]:
        """Return the last new lines of a query."""
        for pod in self._list_pods():
            is_chosen = query.rank is None or pod.node == query.rank // pod.nproc
            if is_chosen and pod.name not in self._started and len(self._started) < MOST_PODS:
                self._started.add(pod.name)
                threading.Thread(target=self._follow, args=(pod,), daemon=True).start()
        taken: list[ShownLine] = []
        with suppress(queue.Empty):
            while len(taken) < _MOST_TAIL:
                line, attempt = self._queue.get_nowait()
                if query.takes(line):
                    taken.append(show_line(line, attempt))
        return taken[-WINDOW_LINES:]

    def _follow(self, pod: LogPod) -> None:
        with suppress(ClientError):  # the pod was deleted, or its log may not be read; the pieces state the reason
            for line in self._source.lines(pod, follow=True):
                if self._left.is_set():
                    return
                with suppress(queue.Full):  # more than a page shows
                    self._queue.put_nowait((line, pod.attempt))
        self._started.discard(pod.name)

    def close(self) -> None:
        """End the streams at their next line, or after some seconds of silence."""
        self._left.set()

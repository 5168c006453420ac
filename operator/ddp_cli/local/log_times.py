"""The times of a local run's log lines: processes write to the file themselves, so its size is noted while it grows.

Notes of a file become rarer as its run grows, up to ten seconds apart, so that they stay small beside the log.
"""

import asyncio
import time
from bisect import bisect_left
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, NamedTuple

from ddp_cli.local.folder import RunFolder
from ddp_cli.local.screen import find_logs
from ddp_pod.contract.numbers import parse_count
from ddp_pod.contract.plain_files import open_plain

_EVERY_SECONDS: Final = 0.2
_LONGEST_SECONDS: Final = 10.0
_NOTES: Final = 2000  # of the run's age, between the two


class LogNote(NamedTuple):
    """The size of a log at a time, in milliseconds since 1970."""

    size: int
    time: int


class LogClock:
    """Notes when the logs of a run grow."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._began = time.monotonic()
        self._noted_at = 0.0
        self._sizes: dict[Path, int] = {}

    async def run(self) -> None:
        """Note the sizes until cancelled."""
        while True:
            age = time.monotonic() - self._began
            if time.monotonic() - self._noted_at >= min(_LONGEST_SECONDS, age / _NOTES):
                self.note()
            await asyncio.sleep(_EVERY_SECONDS)

    def note(self) -> None:
        """Note the sizes that have changed. Raises: OSError."""
        self._noted_at = time.monotonic()
        for log in find_logs(self._folder.logs):
            size = log.path.lstat().st_size
            if size > self._sizes.get(log.path, 0):
                self._sizes[log.path] = size
                with open(_find_file(log.path), "a", opener=open_plain, encoding="ascii") as stream:
                    stream.write(f"{size} {time.time_ns() // 1_000_000}\n")


def _find_file(log: Path) -> Path:
    return log.with_suffix(".times")


def read_notes(folder: RunFolder, log: Path) -> list[LogNote]:
    """Return the notes on a log, by size; none for a run of an older release."""
    notes = []
    with suppress(OSError):
        for line in folder.read(_find_file(log)).splitlines():
            size, moment = map(parse_count, (*line.split(" ", 1), "")[:2])
            if size is not None and moment is not None and moment < 10**14:
                notes.append(LogNote(size, moment))
    return sorted(notes)


def find_time(notes: Sequence[LogNote], end: int) -> str:
    """Return when a line that ends at an offset was written, as RFC 3339 in UTC; empty: it is not known."""
    place = bisect_left(notes, end, key=lambda note: note.size)
    if place == len(notes):
        return ""
    return datetime.fromtimestamp(notes[place].time / 1000, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")

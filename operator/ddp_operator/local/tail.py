"""Follows the pods' log files."""

import asyncio
import re
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final, NamedTuple

_EVERY_SECONDS: Final = 0.2
_BAR_SECONDS: Final = 5.0  # after which the state of a progress bar that redraws itself is a line
_CHUNK: Final = 1 << 20
# The mark of the launcher for a rank, and that of torchrun --tee for a local rank.
_RANK: Final = re.compile(r"\[rank(\d+)\]: ?")
_LOCAL_RANK: Final = re.compile(r"\[[A-Za-z_]+(\d+)\]: ?")


_LOG: Final = re.compile(r"attempt-(\d+)-pod-(\d+)\.log")


class LogFile(NamedTuple):
    """The log of a pod (``node``: its index) in an attempt."""

    attempt: int
    node: int
    path: Path


def find_logs(folder: Path) -> list[LogFile]:
    """Return the logs in a run's folder of logs, by attempt and pod."""
    found = ((_LOG.fullmatch(path.name), path) for path in folder.glob("*.log"))
    return sorted(LogFile(int(match[1]), int(match[2]), path) for match, path in found if match)


class Tail:
    """Hands on the complete lines of files that grow, each with its file."""

    def __init__(self, files: Callable[[], Iterable[LogFile]], on_line: Callable[[LogFile, str], None]) -> None:
        self._files = files
        self._on_line = on_line
        self._read: dict[LogFile, tuple[int, bytes]] = {}
        self._last = time.monotonic()

    async def run(self) -> None:
        """Follow until cancelled."""
        while True:
            self.read()
            await asyncio.sleep(_EVERY_SECONDS)

    def read(self) -> None:
        """Hand on what has been written since."""
        for file in self._files():
            while self._read_chunk(file):
                pass

    def _read_chunk(self, file: LogFile) -> bool:
        offset, rest = self._read.get(file, (0, b""))
        try:
            with file.path.open("rb") as stream:
                stream.seek(offset)
                data = stream.read(_CHUNK)
        except OSError:
            return False
        *lines, rest = (rest + data).split(b"\n")
        if b"\r" in rest and time.monotonic() - self._last >= _BAR_SECONDS:
            lines, rest = [*lines, rest], b""
        self._last = time.monotonic() if lines else self._last
        self._read[file] = offset + len(data), rest
        for line in lines:
            self._on_line(file, line.decode("utf-8", "replace"))
        return bool(data)


def split_rank(line: str, node: int, procs: int) -> tuple[int | None, str]:
    """Return which rank wrote a line of a pod's log, None: not known, and the line without the rank's mark.

    A progress bar of the script's own redraws itself with carriage returns: only its last state counts.
    """
    mark = _RANK.match(line)
    rank = int(mark[1]) if mark else node if procs == 1 else None
    if mark is None and (local := _LOCAL_RANK.match(line)) and int(local[1]) < procs:
        mark, rank = local, node * procs + int(local[1])
    return rank, line[mark.end() if mark else 0 :].rstrip("\r").rpartition("\r")[2]

"""Follows pod 0's log file."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from pathlib import Path
from typing import Final

_EVERY_SECONDS: Final = 0.2
_LIMIT: Final = 1 << 20
_RANK: Final = re.compile(rb"\[rank\d+\]: ")


class Tail:
    """Hands on the complete lines of a file that grows, and of the next file once there is another one."""

    def __init__(self, current: Callable[[], Path | None], on_line: Callable[[str], None]) -> None:
        self._current = current
        self._on_line = on_line
        self._file: Path | None = None
        self._offset = 0
        self._rest = b""

    async def run(self) -> None:
        """Follow until cancelled."""
        while True:
            self.read()
            await asyncio.sleep(_EVERY_SECONDS)

    def read(self) -> None:
        """Hand on what has been written since."""
        current = self._current()
        if current != self._file:
            self._read_file()
            self._file, self._offset, self._rest = current, 0, b""
        self._read_file()

    def _read_file(self) -> None:
        if self._file is None:
            return
        try:
            with self._file.open("rb") as stream:
                stream.seek(self._offset)
                data = stream.read(_LIMIT)
        except OSError:
            return
        self._offset += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            # A progress bar of the script's own redraws itself with carriage returns: only its last state counts.
            first, _, last = line.rstrip(b"\r").rpartition(b"\r")
            front = _RANK.match(first)
            self._on_line(((front[0] if front else b"") + last).decode("utf-8", "replace"))

"""Starts the plot's program early and tells it when to draw, so that drawing hardly lengthens a run."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Final

from ddp_operator.api.status import Progress
from ddp_operator.local.folder import RunFolder
from ddp_operator.local.processes import die_with_parent

_EARLY_PERCENT: Final = 80.0
_EARLY_SECONDS: Final = 60
_PATIENCE_SECONDS: Final = 30.0


class Plotter:
    """The plot of one run, drawn in a process of its own."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None

    def prepare(self, progress: Progress | None) -> None:
        """Start the program once the end is near: it imports matplotlib at the lowest priority."""
        if self._process is not None or progress is None:
            return
        percent = float(progress.percent.rstrip("%")) if progress.percent else 0.0
        soon = progress.eta_seconds is not None and progress.eta_seconds <= _EARLY_SECONDS
        if percent >= _EARLY_PERCENT or (soon and percent > 0):
            self._start()

    async def draw(self) -> None:
        """Draw what metrics.csv holds; without any row there is no plot. A failure leaves its words in plot.log."""
        if not self._folder.metrics.exists():
            self.close()
            return
        if self._process is None:
            self._start()
        process = self._process
        if process is None:
            return
        assert process.stdin is not None
        with suppress(BrokenPipeError):
            process.stdin.write(b"\n")
            process.stdin.close()
        with suppress(TimeoutError):
            async with asyncio.timeout(_PATIENCE_SECONDS):
                while process.poll() is None:  # noqa: ASYNC110 (no event to wait for that needs no thread)
                    await asyncio.sleep(0.02)
        self.close()

    def close(self) -> None:
        """End the program."""
        process, self._process = self._process, None
        if process is None:
            return
        if process.stdin is not None:
            with suppress(BrokenPipeError):
                process.stdin.close()
        process.kill()
        if process.wait() == 0:
            with suppress(FileNotFoundError):
                self._log.unlink()

    @property
    def _log(self) -> Path:
        return self._folder.path / "plot.log"

    def _start(self) -> None:
        try:
            log = self._log.open("wb")
        except OSError:  # the folder has warned of its full disk already; the plot is not worth the run
            return
        with log:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "ddp_operator.local.plot", str(self._folder.path)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=die_with_parent(),  # noqa: PLW1509
            )

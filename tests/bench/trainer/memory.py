"""The most memory that something takes, of the device where it computes."""

from __future__ import annotations

import contextlib
import gc
from pathlib import Path

import torch


class PeakMemory:
    """Begin before a contender is built, :meth:`reset` when it runs, and :meth:`read` after some steps.

    On a GPU what torch's allocator has given out, above what was there at the beginning, so that others who are there
    too do not count. On a CPU under Linux the process's resident memory; that of others can't be told from it, because
    freed memory is used again, so there is to be nobody else.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        gc.collect()
        self._before = self._now()

    def _now(self) -> float:
        if self._device.type == "cuda":
            return float(torch.cuda.memory_allocated(self._device))
        return _status("VmRSS")

    def reset(self) -> None:
        """Forget how much it has been up to now."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        else:
            with contextlib.suppress(OSError):
                Path("/proc/self/clear_refs").write_text("5")  # proc(5): resets the peak resident set size

    def read(self) -> float:
        """Bytes at the peak since :meth:`reset`, above the beginning; NaN where it can't be known."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device) - self._before
        return _status("VmHWM") - self._before


def _status(name: str) -> float:
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(f"{name}:"):
                return float(line.split()[1]) * 1024
    except OSError:
        pass
    return float("nan")

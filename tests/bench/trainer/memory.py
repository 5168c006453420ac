"""The peak memory of an operation on its device."""

from __future__ import annotations

import contextlib
import gc
from pathlib import Path

import torch


class PeakMemory:
    """Create it before a contender is built, call :meth:`reset` when it runs, and :meth:`read` after some steps.

    On a GPU it is the memory of torch's allocator above its level at the start, so that other users do not count. On a
    CPU under Linux it is the process's resident memory. There, other users cannot be separated, because freed memory is
    used again: the process must run only the contender.
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
        """Forget the peak up to now."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        else:
            with contextlib.suppress(OSError):
                Path("/proc/self/clear_refs").write_text("5")  # proc(5): resets the peak resident set size

    def read(self) -> float:
        """Bytes at the peak since :meth:`reset`, above the start; NaN if unknown."""
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

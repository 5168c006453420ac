"""Whether another process handles a signal."""

import os


def catches(pid: int, number: int) -> bool:
    """Return whether a process has a handler for a signal; without one, as after an exec, most signals end it.

    Source: SigCgt in proc(5). True on systems without /proc.
    """
    try:
        with open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as file:
            caught = next(line for line in file if line.startswith("SigCgt:"))
        return bool(int(caught.split()[1], 16) >> (number - 1) & 1)
    except (OSError, ValueError, IndexError, StopIteration):
        return not os.path.exists("/proc/self/status")

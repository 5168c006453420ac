"""This machine, or its container: CPUs that may be used, memory that is left."""

import ctypes
import os
import socket
import sys
from pathlib import Path


def available_cpus(cgroup: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """CPUs this process may use: its affinity, cut by the cgroup's quota where there is one."""
    try:
        cpus = len(os.sched_getaffinity(0))
    except AttributeError:  # macOS
        cpus = os.cpu_count() or 1
    try:
        quota, period = cgroup.read_text().split()
        if quota != "max":
            cpus = min(cpus, int(quota) // int(period))
    except (OSError, ValueError):
        pass
    return max(1, cpus)


def identify_host(boot_id: Path = Path("/proc/sys/kernel/random/boot_id")) -> str:
    """Return a text that the processes of this machine, or of one container on it, have in common and no others."""
    name = socket.gethostname()
    try:
        return f"{name} {boot_id.read_text().strip()}"
    except OSError:
        return name


def available_memory(meminfo: Path = Path("/proc/meminfo"), cgroup: Path = Path("/sys/fs/cgroup")) -> float:
    """Bytes that can still be allocated on this machine or in its container; infinite where it can't be known."""
    room = float("inf")
    try:
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                room = float(line.split()[1]) * 1024
        limit = (cgroup / "memory.max").read_text().strip()
        if limit != "max":
            room = min(room, float(limit) - float((cgroup / "memory.current").read_text()))
    except (OSError, ValueError):
        pass
    return max(0.0, room)


def keep_freed_memory() -> bool:
    """Tell glibc to keep freed blocks for the next step instead of giving them back to the kernel and asking again.

    A step frees and allocates the same activations as the one before. Returns whether there is a glibc to tell.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # another C library
        return False
    trim_threshold, mmap_threshold = -1, -3  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD of malloc.h
    # The greatest values that 64-bit glibc takes for the second, and as good as never for the first.
    return bool(mallopt(mmap_threshold, 32 << 20)) and bool(mallopt(trim_threshold, 2**31 - 1))

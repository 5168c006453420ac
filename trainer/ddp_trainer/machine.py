"""The resources of this machine or container: CPUs and memory."""

import ctypes
import os
import socket
import sys
from pathlib import Path


def available_cpus(cgroup: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """Return the CPUs that this process may use: its affinity, limited by the cgroup's quota."""
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
    """Return a text that is equal in the processes of this machine, or container, and differs on others."""
    name = socket.gethostname()
    try:
        return f"{name} {boot_id.read_text().strip()}"
    except OSError:
        return name


def available_memory(meminfo: Path = Path("/proc/meminfo"), cgroup: Path = Path("/sys/fs/cgroup")) -> float:
    """Return the bytes that can still be allocated on this machine or in its container; infinite if unknown."""
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
    """Configure glibc to keep freed memory for the next step, which allocates the same activations again.

    Returns whether glibc accepted the settings; False without glibc.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # another C library
        return False
    # Parameters of malloc.h: M_MMAP_THRESHOLD, whose maximum is 32 MiB, and M_TRIM_THRESHOLD, practically unlimited.
    return bool(mallopt(-3, 32 << 20)) and bool(mallopt(-1, 2**31 - 1))

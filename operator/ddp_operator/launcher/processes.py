"""Processes of this machine, as far as the kernel tells about them."""

import functools
import os
import re
import signal
from typing import Any, Iterable, Optional

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
# Asks a worker for its stack. SIGUSR1 would be the script's own, which may save and end on it, as it does under Slurm.
STACK_SIGNAL = int(signal.SIGRTMAX) - 2 if hasattr(signal, "SIGRTMAX") else int(signal.SIGUSR1)
STOPPED_STATES = ("T", "t")  # states of a process: by SIGSTOP, by a debugger


def read_cpu_quota() -> Optional[float]:
    """Return how many CPUs the cgroup's quota allows, None where there is none."""
    try:
        with open("/sys/fs/cgroup/cpu.max", encoding="ascii") as file:
            quota, period = file.read().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        return None


def count_oom_kills() -> int:
    """Return how many processes of this cgroup the kernel has killed for memory."""
    for path in ("/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control"):
        try:
            with open(path, encoding="ascii") as file:
                found = re.search(r"^oom_kill (\d+)", file.read(), re.MULTILINE)
        except OSError:
            continue
        if found:
            return int(found[1])
    return 0


def has_gpu() -> bool:
    """Tell whether this pod has been given a device of NVIDIA's; where that is broken, another node may do better."""
    try:
        return any(re.fullmatch(r"nvidia\d+", name) for name in os.listdir("/dev"))
    except OSError:
        return False


@functools.cache
def load_libc() -> Any:
    """Return the C library. To be called before a fork that needs it: another thread may hold the loader's lock."""
    import ctypes

    return ctypes.CDLL(None)


def prctl(option: int, value: int) -> bool:
    """Call prctl(2) where there is one. Returns whether it did what it was asked."""
    try:
        return bool(load_libc().prctl(option, value, 0, 0, 0) == 0)
    except (ImportError, OSError, AttributeError):
        return False


def adopt_orphans(*, wanted: bool = True) -> bool:
    """Let orphaned descendants become children of this process, or of one above it again. Returns whether they do."""
    return prctl(36, wanted)  # PR_SET_CHILD_SUBREAPER


def set_parent_death_signal(parent: int) -> None:
    """Ask the kernel for SIGKILL when ``parent`` dies; it may be dead already."""
    prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(137)


def catches(pid: int, number: int) -> bool:
    """Tell whether a process handles a signal. One that does not, as after an exec, would be ended by most of them.

    Source: SigCgt in proc(5). True where there is no /proc to ask.
    """
    try:
        with open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as file:
            caught = next(line for line in file if line.startswith("SigCgt:"))
        return bool(int(caught.split()[1], 16) >> (number - 1) & 1)
    except (OSError, ValueError, IndexError, StopIteration):
        return not os.path.exists("/proc/self/status")


def process_state(pid: int) -> str:
    """Return the letter of a process's state, ``T`` for a stopped one; empty where it is gone or already a zombie."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            state = file.read().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        if os.path.isdir("/proc/self"):
            return ""
        try:
            os.kill(pid, 0)
        except OSError:
            return ""
        return "?"
    return "" if state in "ZX" else state


def find_family(pid: int) -> list[int]:
    """Return a process and its descendants (Linux), parents first."""
    family = [pid]
    for parent in family:
        try:
            threads = os.listdir(f"/proc/{parent}/task")
        except OSError:
            continue
        for thread in threads:
            try:
                with open(f"/proc/{parent}/task/{thread}/children", encoding="ascii") as file:
                    family += [int(child) for child in file.read().split() if int(child) not in family]
            except (OSError, ValueError):
                continue
    return family


def count_cpu_seconds(pids: Iterable[int]) -> float:
    """Return the CPU time of processes and their descendants (Linux)."""
    ticks = 0
    for pid in {member for worker in pids for member in find_family(worker)}:
        try:
            with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
                fields = file.read().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
        except (OSError, IndexError, ValueError):
            continue
    return ticks / os.sysconf("SC_CLK_TCK")


def kill(pid: int, number: int) -> None:
    """Send a signal to a process that may be gone."""
    try:
        os.kill(pid, number)
    except OSError:
        pass


def list_children() -> set[int]:
    """Return the children of this process; none where this is no Linux."""
    try:
        with open(f"/proc/self/task/{os.getpid()}/children", encoding="ascii") as file:
            return {int(pid) for pid in file.read().split()}
    except (OSError, ValueError):
        return set()

"""Processes of this machine: signals, states, CPU time and memory limits, mostly from /proc and cgroups."""

import functools
import math
import os
import re
import signal
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any

# Not those that were ignored at the start: SIGHUP under nohup, SIGINT and SIGQUIT in the background of a script.
STOP_SIGNALS = tuple(
    number
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    if number == signal.SIGTERM or signal.getsignal(number) is not signal.SIG_IGN
)
# Makes a worker write its stack. Scripts use SIGUSR1 themselves, for example to save before Slurm's time limit.
STACK_SIGNAL = int(signal.SIGRTMAX) - 2 if hasattr(signal, "SIGRTMAX") else int(signal.SIGUSR1)
STOPPED_STATES = ("T", "t")  # process states: stopped by a signal, by a debugger
SLEEPING_STATES = ("S", "D")  # for an event, for a device
_MOST_WORDS = 16  # of a command line
_COMMAND_LIMIT = 60  # characters


def read_cpu_quota() -> float | None:
    """Return the cgroup's CPU quota in CPUs; None without a quota."""
    try:
        with open("/sys/fs/cgroup/cpu.max", encoding="ascii") as file:
            quota, period = file.read().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        return None


def count_oom_kills() -> int:
    """Return how many processes of this cgroup the kernel's OOM killer has ended."""
    for path in ("/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control"):
        try:
            with open(path, encoding="ascii") as file:
                match = re.search(r"^oom_kill (\d+)", file.read(), re.MULTILINE)
        except OSError:
            continue
        if match:
            return int(match[1])
    return 0


def has_gpu() -> bool:
    """Return whether the container has an NVIDIA device, even one that does not work."""
    try:
        return any(re.fullmatch(r"nvidia\d+", name) for name in os.listdir("/dev"))
    except OSError:
        return False


@functools.cache
def load_libc() -> Any:
    """Return the C library. Call it before a fork that needs it: another thread may hold the loader's lock."""
    import ctypes

    return ctypes.CDLL(None)


def prctl(option: int, value: int) -> bool:
    """Call prctl(2). Returns whether it succeeded; False on systems without it."""
    try:
        return bool(load_libc().prctl(option, value, 0, 0, 0) == 0)
    except (ImportError, OSError, AttributeError):
        return False


def adopt_orphans(*, enabled: bool = True) -> bool:
    """Make this process the subreaper of its descendants, or no longer. Returns whether the system supports it."""
    return prctl(36, enabled)  # PR_SET_CHILD_SUBREAPER


def set_environment(environment: Mapping[str, str]) -> None:
    """Replace the environment of this process."""
    for name in set(os.environ) - set(environment):
        del os.environ[name]
    os.environ.update(environment)


def set_parent_death_signal(parent: int) -> None:
    """Have the kernel send SIGKILL when ``parent`` dies; exit if it is dead already."""
    prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(137)


def read_stat(pid: int | str) -> list[str]:
    """Return the fields behind a process's name in proc(5), stat (Linux). ``pid``: or ``self``. Raises: OSError.

    Their indices are by 3 lower than the numbers in the manual. The name may have blanks and brackets.
    """
    with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
        return file.read().rpartition(")")[2].split()


def process_state(pid: int) -> str:
    """Return the letter of a process's state, ``T`` for a stopped one; empty if it has ended or is a zombie."""
    try:
        state = read_stat(pid)[0]
    except (OSError, IndexError):
        if os.path.isdir("/proc/self"):
            return ""
        try:
            os.kill(pid, 0)
        except OSError:
            return ""
        return "?"
    return "" if state in "ZX" else state


def find_family(pid: int, most: float = math.inf) -> list[int]:
    """Return a process and its descendants (Linux), parents first. ``most``: after so many no further one is sought."""
    family = [pid]
    for parent in family:
        if len(family) >= most:
            break
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
    return count_own_cpu_seconds({member for worker in pids for member in find_family(worker)})


def count_own_cpu_seconds(pids: Iterable[int]) -> float:
    """Return the CPU time of processes without their descendants (Linux)."""
    ticks = 0
    for pid in pids:
        try:
            fields = read_stat(pid)
            ticks += int(fields[11]) + int(fields[12])
        except (OSError, IndexError, ValueError):
            continue
    return ticks / os.sysconf("SC_CLK_TCK")


def kill(pid: int, number: int) -> None:
    """Send a signal to a process; ignore one that has ended."""
    try:
        os.kill(pid, number)
    except OSError:
        pass


def list_children() -> set[int]:
    """Return the process ids of this process's children (Linux)."""
    try:
        with open(f"/proc/self/task/{os.getpid()}/children", encoding="ascii") as file:
            return {int(pid) for pid in file.read().split()}
    except (OSError, ValueError):
        return set()


def name_command(words: Iterable[str]) -> str:
    """Return the program of a command line, and its script: other arguments may have tokens and other secrets."""
    program, *arguments = [os.path.basename(word) for word in islice(words, _MOST_WORDS)] or [""]
    script = next((word for word in arguments if word.endswith((".py", ".sh"))), "")
    return f"{program} {script}".strip()[:_COMMAND_LIMIT]

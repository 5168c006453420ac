"""What the machine gives a rank and takes from it, by the kernel's counters.

Sources: proc(5), sched-stats, cgroup-v1 and -v2, and psi in Linux's documentation. Elsewhere nothing is known.
"""

import os
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ...base.launcher_part import LauncherPart
from ...base.pod import Pod, list_workers
from ...base.service import Service
from ...contract.processes import count_own_cpu_seconds, find_family, process_state
from ...contract.progress import MachineTime, RankProgress

_CGROUP = "/sys/fs/cgroup"
_MOST_PROCESSES = 64  # of a rank
_FILE_LIMIT = 4096


class MachineClock(Service):
    """Measures for each rank what its machine gives it."""

    name = "machine"

    def __init__(self, pod: Pod) -> None:
        self._pod = pod

    def complete(self, ranks: Sequence[RankProgress]) -> Sequence[RankProgress]:
        """Return the progress with the machine's counters of the ranks that this pod runs."""
        try:
            processes = {worker.rank: worker.pid for worker in list_workers(self._pod)}
        except OSError:
            return ranks
        shared = read_cgroup_time()
        return [replace(rank, machine=_add_processes(shared, processes.get(rank.rank))) for rank in ranks]


def read_cgroup_time(folder: str = _CGROUP) -> MachineTime:
    """Return what the container's cgroup has waited for. ``folder``: where the cgroups are mounted."""
    return MachineTime(
        throttled_seconds=_find_number(
            [
                (os.path.join(folder, "cpu.stat"), r"^throttled_usec (\d+)", 1e-6),
                (os.path.join(folder, "cpu", "cpu.stat"), r"^throttled_time (\d+)", 1e-9),
            ]
        ),
        storage_seconds=_find_number([(os.path.join(folder, "io.pressure"), r"^some .*total=(\d+)", 1e-6)]),
        memory_seconds=_find_number([(os.path.join(folder, "memory.pressure"), r"^some .*total=(\d+)", 1e-6)]),
    )


def _add_processes(shared: MachineTime, pid: int | None) -> MachineTime:
    if pid is None:
        return shared
    waited = _read_wait(pid) if process_state(pid) else None
    if waited is None:
        return shared
    children = find_family(pid, _MOST_PROCESSES)[1:_MOST_PROCESSES]
    return replace(
        shared,
        cpu_seconds=count_own_cpu_seconds([pid]),
        cpu_wait_seconds=waited,
        child_cpu_seconds=count_own_cpu_seconds(children),
        child_cpu_wait_seconds=max((_read_wait(child) or 0.0 for child in children), default=0.0),
    )


def _read_wait(pid: int) -> float | None:
    """Return for how long the main thread of a process was ready to run and had no CPU; None: it has ended."""
    try:
        with open(f"/proc/{pid}/schedstat", encoding="ascii") as file:
            return int(file.read().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return None


def _find_number(sources: Sequence[tuple[str, str, float]]) -> float | None:
    """Return the number in the first file that has it, in seconds. ``sources``: path, pattern and unit."""
    for path, pattern, unit in sources:
        try:
            with open(path, encoding="ascii", errors="replace") as file:
                match = re.search(pattern, file.read(_FILE_LIMIT), re.MULTILINE)
        except OSError:
            continue
        if match:
            return int(match[1]) * unit
    return None


def _create(pod: Pod, reader: Any) -> Sequence[Service]:
    return (MachineClock(pod),)


PART = LauncherPart(create=_create)

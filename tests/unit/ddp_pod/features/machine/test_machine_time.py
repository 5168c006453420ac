"""What the machine gives a rank and takes from it: the kernel's counters of processes and cgroups."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ddp_pod.base.files import write_json
from ddp_pod.base.pod import Pod, list_workers
from ddp_pod.contract.processes import find_family
from ddp_pod.contract.progress import MachineTime, RankProgress
from ddp_pod.features.machine.launcher import MachineClock, read_cgroup_time
from tests.support.launcher_config import launcher_pod

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has these counters")

V2 = {
    "cpu.stat": "usage_usec 9\nnr_throttled 2\nthrottled_usec 2500000\n",
    "io.pressure": "some avg10=0.00 avg60=0.00 avg300=0.00 total=1500000\nfull avg10=0.00 total=7\n",
    "memory.pressure": "some avg10=0.00 avg60=0.00 avg300=0.00 total=500000\nfull avg10=0.00 total=7\n",
}
V1 = {"cpu/cpu.stat": "nr_periods 3\nnr_throttled 2\nthrottled_time 2500000000\n"}
BURN = "while True: pass"
BY_CHILD = f"import os, subprocess, sys; subprocess.run([sys.executable, '-c', '{BURN}'])"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (V2, MachineTime(throttled_seconds=2.5, storage_seconds=1.5, memory_seconds=0.5)),
        (V1, MachineTime(throttled_seconds=2.5)),
        ({"cpu.stat": "usage_usec 9\n", "io.pressure": "?"}, MachineTime()),
        ({}, MachineTime()),
    ],
)
def test_cgroup_of_either_version_is_read(tmp_path: Path, files: dict[str, str], expected: MachineTime) -> None:
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    assert read_cgroup_time(str(tmp_path)) == expected


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[str], Pod]]:
    """Return a function that starts a program as the pod's rank 3, alone on one CPU with a busy process."""
    cpu = min(os.sched_getaffinity(0))
    processes: list[subprocess.Popen[bytes]] = []

    def run(program: str) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, "-c", f"import os; os.sched_setaffinity(0, {{{cpu}}})\n{program}"], start_new_session=True
        )
        processes.append(process)
        return process

    def create(program: str) -> Pod:
        pod = launcher_pod(tmp_path)
        (tmp_path / "workers").mkdir()
        run(BURN)
        worker = {"pid": run(program).pid, "rank": 3, "localRank": 0, "restart": 0}
        write_json(str(tmp_path / "workers" / "0.json"), worker)
        return pod

    yield create
    for process in processes:
        os.killpg(process.pid, 9)
        process.wait()


def until(pod: Pod, holds: Callable[[MachineTime], bool]) -> MachineTime:
    deadline = time.monotonic() + 120
    while not holds(machine := MachineClock(pod).complete([RankProgress(3)])[0].machine):
        assert time.monotonic() < deadline, machine
        time.sleep(0.05)
    return machine


def test_rank_that_competes_for_a_cpu_waits_for_it(start: Callable[[str], Pod]) -> None:
    pod = start(BURN)
    # On a busy machine it waits for that long before the kernel has counted a tick of its own.
    machine = until(pod, lambda machine: (machine.cpu_wait_seconds or 0) > 0.3 and bool(machine.cpu_seconds))
    assert machine.child_cpu_seconds == 0


def test_work_of_its_children_is_not_the_ranks_own(start: Callable[[str], Pod]) -> None:
    pod = start(BY_CHILD)
    machine = until(pod, lambda machine: (machine.child_cpu_seconds or 0) > 0.5)
    (worker,) = list_workers(pod)
    assert len(find_family(worker.pid)) == 2
    assert find_family(worker.pid, 1) == [worker.pid]
    assert machine.cpu_seconds is not None
    assert machine.cpu_wait_seconds is not None
    assert machine.cpu_wait_seconds > 0


def test_rank_of_another_pod_and_an_ended_one_have_no_processes(start: Callable[[str], Pod]) -> None:
    pod = start("pass")
    until(pod, lambda machine: machine.cpu_seconds is None)
    other = MachineClock(pod).complete([RankProgress(0)])[0].machine
    assert (other.cpu_seconds, other.cpu_wait_seconds) == (None, None)

"""The times of recovery on this machine, by what is killed, for the file that the simulation reads.

A rank, torchrun's agent or a pod of a job of two pods is killed; the time ends with the first step afterwards. A lost
node needs kubelets: its times are from ``tests.bench.node_faults``, and stay as the file has them.
"""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import psutil

from tests.bench.recovery import STEP, TRAIN, first_step
from tests.support.launcher_pods import LauncherPods

PAUSE: Final = 0.5  # of training before a kill


def kill_rank(job: LauncherPods, pid: int) -> None:
    """Kill the rank of pod 1."""
    os.kill(pid, signal.SIGKILL)


def kill_agent(job: LauncherPods, pid: int) -> None:
    """Kill torchrun's agent of pod 1: the child of its launcher that is an ancestor of the rank."""
    (agent,) = [
        process
        for process in psutil.Process(job.running[1].pid).children()
        if pid in (child.pid for child in process.children(recursive=True))
    ]
    agent.kill()


def kill_pod(job: LauncherPods, pid: int) -> None:
    """Kill the launcher of pod 1 and all its processes."""
    launcher = psutil.Process(job.running[1].pid)
    for process in [launcher, *launcher.children(recursive=True)]:
        process.kill()


def replace_pod(job: LauncherPods, pid: int) -> None:
    """Kill pod 1, and start another in its place at once."""
    kill_pod(job, pid)
    job.running[1].wait(60)
    (job.folder / "port-1").unlink(missing_ok=True)
    job.start(1)


# Name in the file -> what is killed, the number of spares, and the pod whose first step ends the time.
FAULTS: Final[dict[str, tuple[Callable[[LauncherPods, int], None], int, int]]] = {
    "rank": (kill_rank, 0, 1),
    "agent": (kill_agent, 0, 1),
    "pod": (replace_pod, 0, 1),
    "pod with a spare": (kill_pod, 1, 2),
}


def measure_once(fault: str) -> float:
    """Return the seconds from a fault to the next step. Raises TimeoutError after two minutes without a step."""
    kill, spares, successor = FAULTS[fault]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "train.py").write_text(TRAIN.replace('f"rank {rank} pid', 'f"rank 1 pid'))
        save = "import torch; torch.save({'weights': torch.zeros(250000)}, 'checkpoint.pt')"
        subprocess.run([sys.executable, "-c", save], cwd=folder, check=True)
        config = {"restarts_without_progress": 3}
        job = LauncherPods(folder, ["train.py"], spares=spares, max_restarts=3, warm=False, config=config)
        if spares:
            job.start(2)  # whoever comes last waits; here a spare that is ready before the fault
        job.start(0, 1)
        try:
            pid, _ = first_step(folder / "log-1", set())
            time.sleep(PAUSE)
            known = {int(found[1]) for found in STEP.finditer((folder / "log-1").read_text())}
            begun = time.time()
            kill(job, pid)
            return first_step(folder / f"log-{successor}", known)[1] - begun
        finally:
            job.stop()


def measure_recovery(rounds: int) -> dict[str, float]:
    """Return the median of each fault's seconds."""
    measured = {}
    for fault in FAULTS:
        seconds = [measure_once(fault) for _ in range(rounds)]
        print(f"{fault}: {', '.join(f'{value:.2f}' for value in seconds)} s", flush=True)
        measured[fault] = round(statistics.median(seconds), 2)
    return measured

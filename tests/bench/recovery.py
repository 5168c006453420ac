"""The time without training after a worker is killed, compared with the minimum.

The minimum is measured in the same run, alternately with the recoveries: from the start of as many Python processes
until they have imported torch, joined over gloo, loaded the checkpoint and completed a step. Every solution that starts
new worker processes needs this time; ours are forked from one that has imported torch. Prints medians and their
ratio, asserts nothing:

    python -m tests.bench.recovery [--rounds 5] [--megabytes 50] [--pods 2]
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from ddp_cli.local.ports import hold_free_port
from tests.bench.figures import ratio, table
from tests.support.launcher_pods import LauncherPods

PATIENCE: Final = 120.0
RESTARTS_AT_ONCE: Final = 3  # the launcher delays further ones of a script that shows no progress
TRAIN = """
import os, sys, time
import torch
import torch.distributed as dist

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
state = torch.load("checkpoint.pt", weights_only=True)
print(f"pid {os.getpid()} has loaded {state['weights'].numel()} numbers", flush=True)
while True:
    dist.all_reduce(torch.ones(1))
    print(f"rank {rank} pid {os.getpid()} step at {time.time():.4f}", flush=True)
    time.sleep(0.2)
"""
STEP = re.compile(r"rank 1 pid (\d+) step at ([\d.]+)")


def by_hand(folder: Path, ranks: int) -> float:
    """Start the workers without launcher and agents. Return seconds to the first step."""
    port = hold_free_port()
    log = folder / "by-hand"
    begun = time.time()
    workers = []
    with log.open("wb") as output:
        for rank in range(ranks):
            env = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": 0, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            workers.append(
                subprocess.Popen(
                    [sys.executable, "-u", "train.py"], cwd=folder, stdout=output, stderr=subprocess.STDOUT,
                    env=os.environ | {name: str(value) for name, value in env.items()} | {"OMP_NUM_THREADS": "1"},
                )
            )  # fmt: skip
    try:
        return first_step(log, {0})[1] - begun
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()


def killed(job: LauncherPods, folder: Path, known: set[int]) -> float:
    """Kill the second pod's worker. Return seconds until its successor has completed a step."""
    log = folder / "log-1"
    pid, _ = first_step(log, known)
    known.add(pid)
    time.sleep(0.5)
    begun = time.time()
    os.kill(pid, signal.SIGKILL)
    return first_step(log, known)[1] - begun


def first_step(log: Path, known: set[int]) -> tuple[int, float]:
    """Wait for a step by a new process. Return the process, and the time of the step."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        for result in STEP.finditer(log.read_text(errors="replace") if log.exists() else ""):
            if int(result[1]) not in known:
                return int(result[1]), float(result[2])
        time.sleep(0.02)
    raise TimeoutError(f"no step: {log.read_text(errors='replace')[-2000:]}")


def measure(folder: Path, rounds: int, pods: int, megabytes: int, floor: list[float], ours: list[float]) -> None:
    """Run one job, and add the seconds of each round to the lists: by hand, and after a kill."""
    (folder / "train.py").write_text(TRAIN)
    save = f"import torch; torch.save({{'weights': torch.zeros({megabytes} * 250000)}}, 'checkpoint.pt')"
    subprocess.run([sys.executable, "-c", save], cwd=folder, check=True)
    job = LauncherPods(folder, ["train.py"], nodes=pods, max_restarts=rounds, warm=False)
    job.start()
    try:
        known: set[int] = set()
        first_step(folder / "log-1", known)
        for _ in range(rounds):
            floor.append(by_hand(folder, pods))
            ours.append(killed(job, folder, known))
    finally:
        job.stop()


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--megabytes", type=int, default=50, help="the checkpoint's size")
    parser.add_argument("--pods", type=int, default=2, help="of one rank each")
    options = parser.parse_args(argv)
    floor: list[float] = []
    ours: list[float] = []
    while len(ours) < options.rounds:
        rounds = min(options.rounds - len(ours), RESTARTS_AT_ONCE)
        with tempfile.TemporaryDirectory() as name:
            measure(Path(name), rounds, options.pods, options.megabytes, floor, ours)
    rows = {
        "by hand: start, imports, rendezvous, checkpoint": floor,
        "a killed worker, restarted in the same pods": ours,
    }
    print(table("seconds until the next step", rows))
    print(ratio("a killed worker over by hand (target: at most 0.5)", ours, floor))


if __name__ == "__main__":
    main()

"""The cost of `ddp rerun` for the pods of a job on this machine: seconds, and CPU seconds for each pod.

    python -m tests.bench.rerun [--pods 2 16] [--spares 14] [--reruns 3]

The script trains three steps, so most of the time belongs to the pods. What the held pods use at rest is not counted.
The last lines have the cost of one more pod that trains, and of one more that is on standby, beside the smallest job.
Asserts nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

from tests.bench.figures import table

_DDP: Final = (sys.executable, "-m", "ddp_cli")
_PATIENCE: Final = 300.0
_REST: Final = 5.0
"""Seconds after a run in which its pods have made the next launcher ready."""
_JOB: Final = """
apiVersion: ddp-operator.dev/v1alpha1
kind: DDPTrainingJob
metadata:
  name: {name}
spec:
  nodes: {nodes}
  spares: {spares}
  dev: {{}}
  template:
    spec:
      containers:
        - name: trainer
          image: python
          command: [python3, train.py]
"""
_SCRIPT: Final = """
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
dist.destroy_process_group()
"""


def count_cpu(process: psutil.Process) -> float:
    """Return the CPU seconds of a process and its descendants, with those of children that have ended."""
    total = 0.0
    for member in [process, *process.children(recursive=True)]:
        with contextlib.suppress(psutil.Error):
            times = member.cpu_times()
            total += times.user + times.system + times.children_user + times.children_system
    return total


def wait_until_held(log: Path, job: subprocess.Popen[bytes]) -> None:
    """Wait for the end of the first run."""
    deadline = time.monotonic() + _PATIENCE
    while "the pods are held" not in log.read_text(errors="replace"):
        assert job.poll() is None, log.read_text(errors="replace")
        assert time.monotonic() < deadline, log.read_text(errors="replace")
        time.sleep(0.2)


@dataclass(frozen=True)
class Costs:
    """``seconds``: of each rerun; ``cpu``: CPU seconds of each in all pods, without what they use at rest."""

    seconds: list[float]
    cpu: list[float]


def measure(folder: Path, nodes: int, spares: int, reruns: int) -> Costs:
    """Rerun a job of so many pods that train, and others on standby."""
    (folder / "train.py").write_text(_SCRIPT)
    name = f"rerun-{nodes}-{spares}"
    log = folder / f"log-{name}"
    (folder / "job.yaml").write_text(_JOB.format(name=name, nodes=nodes, spares=spares))
    words = ["dev", "job.yaml", "--workdir", str(folder), "--local", "--cpu"]
    with log.open("wb") as output:
        job = subprocess.Popen([*_DDP, *words], cwd=folder, stdout=output, stderr=output, start_new_session=True)
    seconds: list[float] = []
    costs: list[float] = []
    try:
        wait_until_held(log, job)
        for _ in range(reruns):
            time.sleep(_REST)
            at_rest = count_cpu(psutil.Process(job.pid))
            time.sleep(_REST)
            before = count_cpu(psutil.Process(job.pid))
            rate = (before - at_rest) / _REST
            began = time.monotonic()
            subprocess.run([*_DDP, "rerun", name], cwd=folder, capture_output=True, check=True, timeout=_PATIENCE)
            seconds.append(time.monotonic() - began)
            time.sleep(_REST)
            spent = count_cpu(psutil.Process(job.pid)) - before
            costs.append(spent - rate * (time.monotonic() - began))
        subprocess.run([*_DDP, "release", name], cwd=folder, capture_output=True, check=True, timeout=_PATIENCE)
        job.wait(_PATIENCE)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)
    return Costs(seconds, costs)


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pods", type=int, nargs="+", default=[2, 16])
    parser.add_argument("--spares", type=int, default=14, help="pods on standby, beside the first of --pods")
    parser.add_argument("--reruns", type=int, default=3)
    options = parser.parse_args()
    jobs = [(pods, 0) for pods in options.pods]
    if options.spares:
        jobs.append((options.pods[0], options.spares))
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        figures = {job: measure(Path(scratch), *job, options.reruns) for job in jobs}
    names = {(nodes, spares): f"{nodes} pods" + f", {spares} on standby" * bool(spares) for nodes, spares in jobs}
    print(table("ddp rerun", {names[job]: costs.seconds for job, costs in figures.items()}))
    per_pod = {names[job]: [cpu / sum(job) for cpu in costs.cpu] for job, costs in figures.items()}
    print(table("CPU time for each pod", per_pod))
    smallest = statistics.median(figures[jobs[0]].cpu)
    for job, costs in list(figures.items())[1:]:
        more = (statistics.median(costs.cpu) - smallest) / (sum(job) - sum(jobs[0]))
        print(f"one more pod {'on standby' if job[1] else 'that trains'}: {more:.3f} CPU s")


if __name__ == "__main__":
    main()

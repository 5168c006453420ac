"""The cost of `ddp rerun` for the pods of a job on this machine: seconds, and CPU seconds for each pod.

    python -m tests.bench.rerun [--pods 2 16] [--reruns 3]

The script trains three steps, so most of the time belongs to the pods. Asserts nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

import psutil

from tests.bench.figures import table

_DDP: Final = (sys.executable, "-m", "ddp_cli")
_PATIENCE: Final = 300.0
_REST: Final = 5.0
"""Seconds after a run in which its pods have made the next launcher ready."""
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


def measure(folder: Path, pods: int, reruns: int) -> tuple[list[float], list[float]]:
    """Return the seconds of each rerun, and its CPU seconds for each pod."""
    (folder / "train.py").write_text(_SCRIPT)
    log = folder / f"log-{pods}"
    name = f"rerun-{pods}"
    words = ["dev", "train.py", "--nodes", str(pods), "--local", "--cpu", "--name", name]
    with log.open("wb") as output:
        job = subprocess.Popen([*_DDP, *words], cwd=folder, stdout=output, stderr=output, start_new_session=True)
    seconds: list[float] = []
    costs: list[float] = []
    try:
        wait_until_held(log, job)
        for _ in range(reruns):
            time.sleep(_REST)
            before = count_cpu(psutil.Process(job.pid))
            began = time.monotonic()
            subprocess.run([*_DDP, "rerun", name], cwd=folder, capture_output=True, check=True, timeout=_PATIENCE)
            seconds.append(time.monotonic() - began)
            time.sleep(_REST)
            costs.append((count_cpu(psutil.Process(job.pid)) - before) / pods)
        subprocess.run([*_DDP, "release", name], cwd=folder, capture_output=True, check=True, timeout=_PATIENCE)
        job.wait(_PATIENCE)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)
    return seconds, costs


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pods", type=int, nargs="+", default=[2, 16])
    parser.add_argument("--reruns", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        figures = {f"{pods} pods": measure(Path(scratch), pods, options.reruns) for pods in options.pods}
    print(table("ddp rerun", {name: seconds for name, (seconds, _) in figures.items()}))
    print(table("CPU time for each pod", {name: costs for name, (_, costs) in figures.items()}))


if __name__ == "__main__":
    main()

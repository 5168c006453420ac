"""Start the ranks of a measurement as separate processes, and clean all of them up."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddp_cli.local.ports import hold_port
from ddp_trainer.machine import available_cpus

if TYPE_CHECKING:
    from tests.bench.trainer.worker import MeasurementSpec


class MeasurementFailed(Exception):
    """A measurement ended without a result; the text is the reason."""


def run(
    spec: MeasurementSpec,
    ranks: int,
    folder: Path,
    timeout: float,
    *,
    nodes: int = 1,
) -> dict[str, Any]:
    """Measure ``spec`` on ``ranks`` processes of this machine; ``folder`` receives their output.

    With several ``nodes`` each rank uses only its own share of the machine and sees only that share's GPUs.
    Raises :class:`MeasurementFailed`.
    """
    path = folder / "spec.json"
    path.write_text(json.dumps(asdict(spec)))
    # A bound port that does not listen is reserved for rank 0, which opens it seconds later. Linux only.
    holder = hold_port()
    port = holder.getsockname()[1]
    if sys.platform != "linux":
        holder.close()
    processes = []
    try:
        for rank in range(ranks):
            with (folder / f"rank-{rank}.log").open("w") as log:
                processes.append(
                    subprocess.Popen(
                        [sys.executable, "-m", "tests.bench.trainer.worker", str(path)],
                        env=_environment(rank, ranks, port, nodes),
                        stdout=log,
                        stderr=subprocess.STDOUT,
                    )
                )
        _wait(processes, timeout)
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.wait()
        holder.close()
    for rank, process in enumerate(processes):
        if process.returncode:
            tail = (folder / f"rank-{rank}.log").read_text(errors="replace").strip().splitlines()[-1:]
            raise MeasurementFailed(f"rank {rank} ended with {process.returncode}: {' '.join(tail)[:300]}")
    result: dict[str, Any] = json.loads(Path(spec.result).read_text())
    return result


def _environment(rank: int, ranks: int, port: int, nodes: int) -> dict[str, str]:
    ours = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "DDP_RUNTIME_DIR", "DDP_CHECKPOINT_DIR")
    env = {name: value for name, value in os.environ.items() if name not in ours}
    if ranks > 1:
        local = ranks // nodes
        env |= {"RANK": str(rank), "LOCAL_RANK": str(rank % local), "WORLD_SIZE": str(ranks)}
        env |= {"LOCAL_WORLD_SIZE": str(local)}
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    if nodes > 1:
        source = env.get("CUDA_VISIBLE_DEVICES")
        gpus = source.split(",") if source is not None else list(map(str, range(ranks)))
        env["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[rank // local * local :][:local])
        env.setdefault("OMP_NUM_THREADS", str(max(1, available_cpus() // ranks)))
    return env


def _wait(processes: list[subprocess.Popen[bytes]], timeout: float) -> None:
    """Wait until all have ended, or one has failed, without which the others cannot continue."""
    deadline = time.monotonic() + timeout
    while any(process.poll() is None for process in processes):
        if any(process.poll() for process in processes):
            time.sleep(0.5)  # the others may still print errors
            return
        if time.monotonic() > deadline:
            raise MeasurementFailed(f"not done after {timeout:.0f} s")
        time.sleep(0.05)

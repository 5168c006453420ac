"""The undisturbed run and the floors, without this project except for the training script.

A floor is the time of a bare restart.

``ranks``: two Python processes that start, import, join, load the same checkpoint and make a step.
``agents``: the same under two torchrun commands. A restart of workers in the same pods is compared with the first,
a restart with a new agent with the second.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO

from ddp_cli.local.ports import hold_free_port
from tests.drills.core import Perished
from tests.drills.scene import ARGUMENTS, MARK, PATIENCE, PAUSE, TRAINEE, find_marked
from tests.support import ROOT

Begin = Callable[[list[str], dict[str, str], IO[bytes]], "list[subprocess.Popen[bytes]]"]


def train(folder: Path) -> Path:
    """Train to the end without an interruption. Return the folder, with a checkpoint at a fixed interval of steps."""
    with _by_hand(folder, start_ranks, ["--checkpoint-keep", "1000"]) as started:
        deadline = time.monotonic() + PATIENCE
        for process in started:
            if process.wait(max(1.0, deadline - time.monotonic())):
                raise Perished("training by hand fails; see " + str(folder / "output"))
    return folder / "ckpt"


def measure_floor(name: str, folder: Path, checkpoints: Path) -> float:
    """Return seconds from the start to the first new step, beginning at the middle one of some checkpoints."""
    names = sorted(path.stem for path in checkpoints.glob("step-*.pt"))
    (folder / "ckpt").mkdir(parents=True)
    for suffix in (".pt", ".json"):
        shutil.copy(checkpoints / f"{names[len(names) // 2]}{suffix}", folder / "ckpt")
    since = time.monotonic()
    witness = folder / "witness" / "steps-0"
    with _by_hand(folder, WAYS[name]) as started:
        while not witness.exists() or not witness.read_text().endswith("\n"):
            if time.monotonic() - since > PATIENCE or any(process.poll() for process in started):
                raise Perished("training by hand does not begin; see " + str(folder / "output"))
            time.sleep(0.01)
        return float(witness.read_text().split()[0]) - since


@contextlib.contextmanager
def _by_hand(folder: Path, begin: Begin, more: Sequence[str] = ()) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Start training in a folder. Kill all its processes after the block."""
    (folder / "witness").mkdir(parents=True, exist_ok=True)
    mark = uuid.uuid4().hex
    path = os.pathsep.join([str(ROOT / "operator"), str(ROOT / "trainer")])
    env = os.environ | {
        "PYTHONPATH": path, "DRILL_FOLDER": str(folder / "witness"), "DRILL_PAUSE": str(PAUSE), MARK: mark,
        "OMP_NUM_THREADS": "1", "DDP_CHECKPOINT_DIR": str(folder / "ckpt"), "DDP_METRICS_PORT": "0",
    }  # fmt: skip
    with (folder / "output").open("wb") as output:
        started = begin([str(TRAINEE), *ARGUMENTS, *more], env, output)
    try:
        yield started
    finally:
        for pid in [process.pid for process in started if process.poll() is None] + find_marked(mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in started:
            process.wait()


def start_ranks(command: Sequence[str], env: dict[str, str], output: IO[bytes]) -> list[subprocess.Popen[bytes]]:
    """Start two ranks without agents."""
    common = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    common["MASTER_PORT"] = str(hold_free_port())
    return [_start([sys.executable, *command], env | common | {"RANK": str(rank)}, output) for rank in range(2)]


def start_agents(command: Sequence[str], env: dict[str, str], output: IO[bytes]) -> list[subprocess.Popen[bytes]]:
    """Start two torchrun commands."""
    torchrun = [
        sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d",
        "--rdzv-id=floor", f"--rdzv-endpoint=127.0.0.1:{hold_free_port()}",
    ]  # fmt: skip
    return [_start([*torchrun, *command], env, output) for _ in range(2)]


def _start(command: Sequence[str], env: dict[str, str], output: IO[bytes]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command, env=env, stdout=output, stderr=output)


WAYS: dict[str, Begin] = {"ranks": start_ranks, "agents": start_agents}

"""The training script of the drills: the trainer, with a record of every step and, on request, a fault.

Runs inside a pod. ``DRILL_FOLDER`` contains ``steps-<rank>``, with a line for each completed step: time of the
machine's
monotonic clock, attempt, restart, pid, step (from 0). ``DRILL_PAUSE`` is a sleep after each step, seconds, or before it
with ``DRILL_PAUSE_BEFORE``.
``DRILL_FAULT`` is ``kind:rank:step:times``: the fault of that rank before that step, and how often it may occur.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Any

from ddp_trainer.cli import main
from ddp_trainer.engine import Engine

FOLDER = Path(os.environ["DRILL_FOLDER"])
PAUSE = float(os.environ.get("DRILL_PAUSE", "0"))
PAUSE_BEFORE = bool(os.environ.get("DRILL_PAUSE_BEFORE"))
RANK = int(os.environ.get("RANK", "0"))
SLOW_SYNC = float(os.environ.get("DRILL_SLOW_SYNC", "0"))


def take_turn(times: int) -> bool:
    """Return whether the fault may still occur; every occurrence leaves a file."""
    for number in range(times):
        try:
            (FOLDER / f"fault-{number}").touch(exist_ok=False)
        except FileExistsError:
            continue
        return True
    return False


def strike(batch: Any, step: int) -> None:
    """Inject the requested fault into this rank."""
    kind, rank, at, times = os.environ.get("DRILL_FAULT", "none:-1:-1:0").split(":")
    if int(rank) != RANK or int(at) != step or not take_turn(int(times)):
        return
    (FOLDER / "struck").write_text(str(time.monotonic()))
    if kind == "raise":
        raise RuntimeError(f"broken on purpose at step {step}")
    if kind == "nan":
        batch.inputs.fill_(float("nan"))
    if kind == "hang":
        time.sleep(1e6)
    if kind == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if kind == "limit":
        resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
    if kind in ("eat", "limit"):
        hoard = []
        while True:
            hoard.append(bytearray(os.urandom(1 << 20)) * 64)


def watch_steps() -> None:
    """Write a line for every step."""
    inner = Engine.step
    about = f"{os.environ.get('DDP_ATTEMPT', '1')} {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')} {os.getpid()}"

    def step(self: Engine, batch: Any, number: int, lr: float) -> Any:
        strike(batch, number)
        time.sleep(PAUSE if PAUSE_BEFORE else 0)
        result = inner(self, batch, number, lr)
        with open(FOLDER / f"steps-{RANK}", "a") as file:
            file.write(f"{time.monotonic():.4f} {about} {number}\n")
        time.sleep(0 if PAUSE_BEFORE else PAUSE)
        return result

    setattr(Engine, inner.__name__, step)


def slow_disk() -> None:
    """Delay every sync, as on an overloaded disk."""
    inner = os.fsync

    def fsync(fd: Any) -> None:
        time.sleep(SLOW_SYNC)
        inner(fd)

    os.fsync = fsync


if __name__ == "__main__":
    watch_steps()
    if SLOW_SYNC:
        slow_disk()
    sys.exit(main())

"""Stands in for a training script in the pictures of the docs: it reports what the exporter reports, and only waits.

Without torch 64 ranks of it run on two cores. It fails where it is told to, once each: ``--fail 60:kill 150:data``; the
other ranks wait there for the failed one, as in a collective.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import signal
import time
from pathlib import Path

from ddp_sdk import Exporter


def fail(how: str) -> None:
    """End as the kernel ends a process that takes too much memory, or by an exception."""
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    raise ValueError(f"label 1000 is out of range for 1000 classes in shard-0{random.randint(1, 9)}.tar ({how})")


def read(path: Path) -> int:
    """Return the step in a file; 0: there is none."""
    return int(path.read_text()) if path.exists() else 0


def main() -> None:
    """Wait for so many steps."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--seconds", type=float, default=0.2, help="of a step")
    parser.add_argument("--slow", type=int, nargs="*", default=[], metavar="RANK", help="ranks that compute longer")
    parser.add_argument("--fail", nargs="*", default=[], metavar="STEP:HOW", help="where the last rank fails")
    arguments = parser.parse_args()
    rank = int(os.environ["RANK"])
    ranks = int(os.environ["WORLD_SIZE"])
    chance = random.Random(rank)
    folder = Path(os.environ["DDP_CHECKPOINT_DIR"])
    saved = folder / "step"
    first = read(saved)
    failed = read(folder / "failed")
    failures = [entry.split(":") for entry in arguments.fail]
    exporter = Exporter.start(total_steps=arguments.steps, epochs=4)
    for step in range(first + 1, arguments.steps + 1):
        data = arguments.seconds * chance.uniform(0.04, 0.1)
        own = arguments.seconds * chance.uniform(0.5, 0.55) * (1.7 if rank in arguments.slow else 1.0)
        time.sleep(arguments.seconds * (1.0 + 0.1 * math.sin(step / 20)))
        loss = 0.3 + 2 * math.exp(-step / 80) + chance.gauss(0, 0.03)
        epoch = 1 + 4 * (step - 1) // arguments.steps
        rate = 0.1 * (1 + math.cos(math.pi * step / arguments.steps)) / 2
        exporter.step(samples=64, loss=loss, step=step, epoch=epoch, learning_rate=rate, data_wait=data, compute=own)
        for place, how in failures:
            if step == int(place) > failed:
                if rank < ranks - 1:
                    time.sleep(3600)
                (folder / "failed").write_text(place)
                fail(how)
        if rank == 0 and step % 40 == 0:
            with exporter.saving():
                saved.write_text(str(step))
            exporter.set("ddp_checkpoint_step", step)


if __name__ == "__main__":
    main()

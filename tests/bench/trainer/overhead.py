"""The cost of the loop around a step for the host, on one rank and on two: all except the batch and the step itself.

``python -m tests.bench.trainer.overhead``: exporter, log, the agreement on stopping, schedule and records. On a busy
machine the median is more reliable than the mean.
"""

from __future__ import annotations

import contextlib
import io
import os
import statistics
import sys
import time
from typing import Any

import torch.multiprocessing as mp

from ddp_cli.local.ports import hold_port
from ddp_trainer.distributed import DistributedConfig, RankEnv
from ddp_trainer.distributed.world import World
from tests.bench.trainer.contenders import Ours, build_config, start_exporter

STEPS = 400


def measure(local_rank: int, ranks: int, results: Any) -> None:
    """Take steps of the digits' preset on this rank. Put microseconds per step, median and mean, into ``results``."""
    env = RankEnv.spawned(local_rank, ranks)
    world = World.start(DistributedConfig(device="cpu"), env)
    with contextlib.redirect_stdout(io.StringIO()):
        exporter = start_exporter(env)
        ours = Ours(build_config("digits-resnet", {"data": {"batch_size": 8}}), world, exporter)
        step = ours.trainer.engine.step
        inside = 0.0

        def timed(*arguments: Any) -> Any:
            nonlocal inside
            started = time.perf_counter()
            result = step(*arguments)
            inside = time.perf_counter() - started
            return result

        ours.trainer.engine.step = timed  # type: ignore[assignment, method-assign]
        around = []
        last = time.perf_counter()
        for number, waited in enumerate(ours.steps()):
            now = time.perf_counter()
            if number >= 20:
                around.append(1e6 * (now - last - inside - waited))
            if number == STEPS:
                break
            last = time.perf_counter()
    if world.is_main:
        results.put((statistics.median(around), statistics.fmean(around)))
    exporter.close()
    world.close()


def main() -> int:
    """Print a line for one rank and one for two; returns 0."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}
    for ranks in (1, 2):
        results = mp.get_context("spawn").SimpleQueue()
        with hold_port() as holder:  # keeps the port from all but rank 0, see launch.run
            os.environ["MASTER_PORT"] = str(holder.getsockname()[1])
            mp.spawn(measure, args=(ranks, results), nprocs=ranks)  # type: ignore[attr-defined, no-untyped-call]
        median, mean = results.get()
        print(f"{ranks} rank(s): the loop takes {median:.0f} microseconds a step (median; mean {mean:.0f})", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

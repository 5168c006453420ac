"""The gain of one import of PyTorch per pod: the same job with ``recovery.warmStart`` Auto and Off, alternately.

Prints medians and ratios of the time from a pod's start to its first step, of the memory of its ranks before they have
a model, and of the time from the death of a rank to the next step, which is also compared with as many plain Python
processes. Asserts nothing:

    python -m tests.bench.warm_start [--rounds 5] [--ranks 4]
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tests.bench.figures import ratio, table
from tests.bench.recovery import PATIENCE, by_hand
from tests.support.launcher_pods import LauncherPods

TRAIN: Final = """
import os, time
import torch
import torch.distributed as dist

optimizer = torch.optim.AdamW([torch.zeros(1, requires_grad=True)])
memory = dict(line.split()[:2] for line in open("/proc/self/smaps_rollup") if "kB" in line)
rank, pid = os.environ["RANK"], os.getpid()
print(f"rank {rank} pid {pid} holds {memory['Pss:']} {int(memory['Private_Clean:']) + int(memory['Private_Dirty:'])}", flush=True)
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
optimizer = torch.optim.AdamW(model.parameters())
while True:
    model(torch.ones(8, 64)).sum().backward()
    optimizer.step()
    print(f"rank {rank} pid {pid} step at {time.time():.4f}", flush=True)
    time.sleep(0.2)
"""  # noqa: E501
STEP: Final = re.compile(r"rank \d+ pid (\d+) step at ([\d.]+)")
HOLDS: Final = re.compile(r"rank \d+ pid \d+ holds (\d+) (\d+)")


def steps(log: Path, known: set[str], ranks: int) -> dict[str, float]:
    """Wait for the first steps of this many new processes. Return the time of each, by process."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        first: dict[str, float] = {}
        for result in STEP.finditer(log.read_text(errors="replace")):
            if result[1] not in known:
                first.setdefault(result[1], float(result[2]))
        if len(first) >= ranks:
            return first
        time.sleep(0.02)
    raise TimeoutError(f"no step: {log.read_text(errors='replace')[-2000:]}")


def measure(folder: Path, ranks: int, *, warm: bool) -> tuple[float, float, float, float]:
    """Return seconds to the first step and from a rank's death to the next; MiB of all ranks, by share and private."""
    folder.mkdir()
    (folder / "train.py").write_text(TRAIN)
    with contextlib.ExitStack() as ends:
        config = {"warm_start": warm}
        job = LauncherPods(folder, ["train.py"], nodes=1, nproc=ranks, max_restarts=1, warm=False, config=config)
        ends.callback(job.stop)
        begun = time.time()
        log = folder / "log-0"
        job.start()
        first = steps(log, set(), ranks)
        time.sleep(0.5)
        killed = time.time()
        os.kill(int(next(iter(first))), signal.SIGKILL)
        second = steps(log, set(first), ranks)
        held = [(int(result[1]), int(result[2])) for result in HOLDS.finditer(log.read_text())][:ranks]
    shared, private = (sum(column) / 1024 for column in zip(*held, strict=True))
    return max(first.values()) - begun, max(second.values()) - killed, shared, private


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=4)
    options = parser.parse_args(argv)
    taken: dict[bool, list[tuple[float, float, float, float]]] = {True: [], False: []}
    floor = []
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        for number in range(options.rounds):
            for warm in taken:
                taken[warm].append(measure(root / f"{number}-{warm}", options.ranks, warm=warm))
            bare = root / f"{number}-bare"
            bare.mkdir()
            (bare / "train.py").write_text(TRAIN)
            floor.append(by_hand(bare, options.ranks))
            print(f"round {number + 1}: {taken[True][-1]} {taken[False][-1]} {floor[-1]:.2f}", file=sys.stderr)
    rows = {warm: list(zip(*values, strict=True)) for warm, values in taken.items()}
    titles = (
        "seconds to the first step of all ranks", "seconds from a rank's death to the next step of all",
        "MiB of all ranks before the model, shared pages divided", "MiB of all ranks before the model, private pages",
    )  # fmt: skip
    for index, title in enumerate(titles):
        print(table(title, {"Auto": rows[True][index], "Off": rows[False][index]}, unit="", digits=1))
        print(ratio("Auto over Off", rows[True][index], rows[False][index]))
    print(table("seconds of bare processes to the first step", {"by hand": floor}))
    print(ratio("from a rank's death to the next step, over that", rows[True][1], floor))


if __name__ == "__main__":
    main()

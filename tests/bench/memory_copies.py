"""The cost of copies in memory in one process: the interval, the mean stall per step, and the time of the steps.

    python -m tests.bench.memory_copies [--rounds N]

Blocks of steps without copies, with the automatic interval and with a copy after each step alternate, so that the load
of the machine is the same for all. The stall contains the time for which ``save`` waits for its copy.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable

import torch

from ddp_trainer.memory import MemoryCheckpoint
from ddp_trainer.models import ModelConfig, build_model

Parts = tuple[torch.nn.Module, torch.optim.Optimizer, Callable[[], torch.Tensor]]
ROW = "{:<22} {:>9} {:>8} {:>9} {:>6} {:>9} {:>8} {:>9}"
_STEPS_PER_BLOCK = 4


def build_resnet(batch: int) -> Parts:
    """Return ResNet-18 of the CIFAR-10 preset, SGD with momentum, and a loss on a random batch."""
    model = build_model(ModelConfig(name="resnet18"), 3, 10)
    images = torch.randn(batch, 3, 32, 32)
    labels = torch.randint(0, 10, (batch,))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    return model, optimizer, lambda: torch.nn.functional.cross_entropy(model(images), labels)


def build_gpt(batch: int) -> Parts:
    """Return a GPT of the preset's size, AdamW, and a loss on random tokens."""
    model = build_model(ModelConfig(name="gpt", width=128), 1, 256)
    tokens = torch.randint(0, 256, (batch, 128))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def loss() -> torch.Tensor:
        logits = model(tokens)
        return torch.nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), tokens.reshape(-1))

    return model, optimizer, loss


class Copies:
    """Copies of a model's state in memory. ``interval``: None for the automatic one."""

    def __init__(self, parts: Parts, interval: int | None) -> None:
        model, optimizer, _ = parts
        self.folder = tempfile.mkdtemp(prefix="ddp-bench-", dir="/dev/shm")
        self.memory = MemoryCheckpoint({"model": model, "optimizer": optimizer}, folder=self.folder, interval=interval)
        self.memory.restore()
        self.durations: list[float] = []
        self.stalls: list[float] = []

    def close(self) -> None:
        """Delete the copies."""
        self.memory.close()
        shutil.rmtree(self.folder)


def train_block(parts: Parts, copies: Copies | None, first: int) -> list[float]:
    """Train a block of steps from step ``first``, and return their durations in seconds."""
    _, optimizer, compute_loss = parts
    durations = []
    for step in range(first, first + _STEPS_PER_BLOCK):
        started = time.perf_counter()
        optimizer.zero_grad()
        compute_loss().backward()
        optimizer.step()
        if copies is not None:
            stalled = copies.memory.stalled_seconds
            copies.memory.save(step)
            copies.stalls.append(copies.memory.stalled_seconds - stalled)  # of the save before
        durations.append(time.perf_counter() - started)
    return durations


def measure(name: str, parts: Parts, rounds: int) -> None:
    """Print the rows of one model: with the automatic interval, and with a copy after each step."""
    kinds = [None, Copies(parts, None), Copies(parts, 1)]
    without: list[float] = []
    try:
        for block in range(rounds + 1):
            for copies in kinds:
                durations = train_block(parts, copies, block * _STEPS_PER_BLOCK + 1)
                if block:  # the first block allocates memory
                    (without if copies is None else copies.durations).extend(durations)
    finally:
        for copies in kinds:
            if copies is not None:
                copies.close()
    step = statistics.median(without)
    size = sum(tensor.numel() * tensor.element_size() for tensor in parts[0].state_dict().values())
    for label, copies in (("automatic", kinds[1]), ("1", kinds[2])):
        assert copies is not None
        stall = statistics.mean(copies.stalls[_STEPS_PER_BLOCK:])
        cells = (
            name,
            f"{size / 2**20:.1f} MiB",
            f"{1e3 * step:.0f} ms",
            label,
            copies.memory.interval,
            f"{1e3 * stall:.2f} ms",
            f"{100 * stall / step:.2f} %",
            f"{statistics.median(copies.durations) / step:.3f}",
        )
        print(ROW.format(*cells), flush=True)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="blocks of each kind; default: 5")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(ROW.format("model", "weights", "step", "interval", "steps", "stall", "share", "step time"))
    measure("ResNet-18, batch 128", build_resnet(128), arguments.rounds)
    measure("ResNet-18, batch 32", build_resnet(32), arguments.rounds)
    measure("GPT, batch 64", build_gpt(64), arguments.rounds)


if __name__ == "__main__":
    main()

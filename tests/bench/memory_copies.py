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
from typing import NamedTuple

import torch

from ddp_sdk.memory import MemoryCheckpoint
from ddp_trainer.models import ModelConfig, build_model

Parts = tuple[torch.nn.Module, torch.optim.Optimizer, Callable[[], torch.Tensor]]
FIRST_STEPS = 8  # which allocate the memory and choose the interval
ROW = "{:<22} {:>9} {:>8} {:>9} {:>6} {:>9} {:>8} {:>9}"


class CopyCost(NamedTuple):
    """The cost of copies of one model. ``setting``: the interval in steps, or ``automatic``; times in seconds."""

    model: str
    state_bytes: int
    step_seconds: float  # without copies
    setting: str
    interval: int  # at the end
    stall_seconds: float  # mean per step
    step_ratio: float  # time of a step over that without copies


def build_resnet(batch: int, device: str = "cpu") -> Parts:
    """Return ResNet-18 of the CIFAR-10 preset, SGD with momentum, and a loss on a random batch."""
    model = build_model(ModelConfig(name="resnet18"), 3, 10).to(device)
    images = torch.randn(batch, 3, 32, 32, device=device)
    labels = torch.randint(0, 10, (batch,), device=device)
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


def train_block(parts: Parts, copies: Copies | None, steps: range) -> float:
    """Train ``steps``, and return the mean seconds of a step."""
    model, optimizer, compute_loss = parts
    is_on_gpu = next(model.parameters()).is_cuda
    started = time.perf_counter()
    for step in steps:
        optimizer.zero_grad()
        compute_loss().backward()
        optimizer.step()
        if copies is not None:
            stalled = copies.memory.stalled_seconds
            copies.memory.save(step)
            copies.stalls.append(copies.memory.stalled_seconds - stalled)  # of the save before
    if is_on_gpu:
        torch.cuda.synchronize()
    return (time.perf_counter() - started) / len(steps)


def measure(name: str, parts: Parts, rounds: int, steps_per_block: int = 4) -> list[CopyCost]:
    """Return the costs for one model: with the automatic interval, and with a copy after each step."""
    kinds = [None, Copies(parts, None), Copies(parts, 1)]
    without: list[float] = []
    try:
        for copies in kinds:
            train_block(parts, copies, range(1, FIRST_STEPS + 1))
        for first in range(FIRST_STEPS + 1, FIRST_STEPS + 1 + rounds * steps_per_block, steps_per_block):
            for copies in kinds:
                duration = train_block(parts, copies, range(first, first + steps_per_block))
                (without if copies is None else copies.durations).append(duration)
    finally:
        for copies in kinds:
            if copies is not None:
                copies.close()
    step = statistics.median(without)
    size = sum(tensor.numel() * tensor.element_size() for tensor in parts[0].state_dict().values())
    costs = []
    for setting, copies in (("automatic", kinds[1]), ("1", kinds[2])):
        assert copies is not None
        stall = statistics.mean(copies.stalls[FIRST_STEPS:])
        ratio = statistics.median(copies.durations) / step
        costs.append(CopyCost(name, size, step, setting, copies.memory.interval, stall, ratio))
    return costs


def print_costs(costs: list[CopyCost]) -> None:
    """Print the rows of one model."""
    for cost in costs:
        cells = (
            cost.model,
            f"{cost.state_bytes / 2**20:.1f} MiB",
            f"{1e3 * cost.step_seconds:.0f} ms",
            cost.setting,
            cost.interval,
            f"{1e3 * cost.stall_seconds:.2f} ms",
            f"{100 * cost.stall_seconds / cost.step_seconds:.2f} %",
            f"{cost.step_ratio:.3f}",
        )
        print(ROW.format(*cells), flush=True)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="blocks of each kind; default: 5")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(ROW.format("model", "weights", "step", "interval", "steps", "stall", "share", "step time"))
    print_costs(measure("ResNet-18, batch 128", build_resnet(128), arguments.rounds))
    print_costs(measure("ResNet-18, batch 32", build_resnet(32), arguments.rounds))
    print_costs(measure("GPT, batch 64", build_gpt(64), arguments.rounds))


if __name__ == "__main__":
    main()

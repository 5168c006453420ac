"""The cost of copies in memory: the stall of a save, the resulting interval, and the time of all steps beside it.

    python -m tests.bench.memory_copies [--rounds N]

Blocks of steps with a copy after each step and without copies alternate in one process, so that the load of the machine
is the same for both.
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
from ddp_trainer.memory.interval import compute_interval
from ddp_trainer.models import ModelConfig, build_model

Parts = tuple[torch.nn.Module, torch.optim.Optimizer, Callable[[], torch.Tensor]]
ROW = "{:<24} {:>9} {:>9} {:>9} {:>8} {:>9} {:>10}"
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


def measure(name: str, parts: Parts, rounds: int) -> None:
    """Print the row of one model."""
    model, optimizer, compute_loss = parts
    folder = tempfile.mkdtemp(prefix="ddp-bench-", dir="/dev/shm")
    memory = MemoryCheckpoint({"model": model, "optimizer": optimizer}, folder=folder, interval=1)
    memory.restore()
    durations: dict[bool, list[float]] = {True: [], False: []}
    stalls: list[float] = []
    step = 0
    try:
        for block in range(2 * rounds + 2):
            has_copies = block % 2 == 0
            for _ in range(_STEPS_PER_BLOCK):
                step += 1
                stalled = memory.stalled_seconds
                started = time.perf_counter()
                optimizer.zero_grad()
                compute_loss().backward()
                optimizer.step()
                if has_copies:
                    memory.save(step)
                    stalls.append(memory.stalled_seconds - stalled)
                durations[has_copies].append(time.perf_counter() - started)
    finally:
        memory.close()
        shutil.rmtree(folder)
    stall = statistics.median(stalls[_STEPS_PER_BLOCK:])
    without = statistics.median(durations[False][_STEPS_PER_BLOCK:])
    with_copies = statistics.median(durations[True][_STEPS_PER_BLOCK:])
    size = sum(tensor.numel() * tensor.element_size() for tensor in model.state_dict().values())
    cells = (
        name,
        f"{size / 2**20:.1f} MiB",
        f"{1e3 * without:.0f} ms",
        f"{1e3 * stall:.2f} ms",
        f"{100 * stall / without:.2f} %",
        compute_interval([stall], [without]),
        f"{with_copies / without:.3f}",
    )
    print(ROW.format(*cells), flush=True)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="blocks of each kind; default: 5")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(ROW.format("model", "weights", "step", "stall", "share", "interval", "step time"))
    measure("ResNet-18, batch 128", build_resnet(128), arguments.rounds)
    measure("ResNet-18, batch 32", build_resnet(32), arguments.rounds)
    measure("GPT, batch 64", build_gpt(64), arguments.rounds)


if __name__ == "__main__":
    main()

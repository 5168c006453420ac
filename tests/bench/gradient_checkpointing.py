"""Peak memory and time of a step with and without --gradient-checkpointing.

    python -m tests.bench.gradient_checkpointing

Each value is that of a process of its own, on one thread of the CPU.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from ddp_trainer.models import ModelConfig, build_model
from tests.bench.trainer.memory import PeakMemory

# Model -> its settings and the shape of a batch.
CASES: Mapping[str, tuple[Mapping[str, Any], tuple[int, ...]]] = {
    "gpt": ({"width": 128}, (64, 128)),
    "wide-resnet": ({"widen": 4}, (128, 3, 32, 32)),
    "resnet50": ({}, (128, 3, 64, 64)),
}
STEPS = 2
# glibc returns freed tensors to the kernel at once: the resident memory is then that in use.
RETURN_FREED_MEMORY = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0"}


class StepCost(NamedTuple):
    """Peak memory in bytes above that before the model was built, and CPU seconds of a step."""

    peak: float
    seconds: float


def measure(name: str, gradient_checkpointing: bool) -> StepCost:
    """Measure steps of forward and backward in this process."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    settings, shape = CASES[name]
    memory = PeakMemory(torch.device("cpu"))
    config = ModelConfig(name=name, gradient_checkpointing=gradient_checkpointing, **settings)
    model = build_model(config, shape[1], 256).train()
    inputs = torch.randint(256, shape) if name == "gpt" else torch.rand(shape)

    def step() -> None:
        model(inputs).square().mean().backward()
        model.zero_grad(set_to_none=False)

    step()
    memory.reset()
    started = time.process_time()
    for _ in range(STEPS):
        step()
    return StepCost(memory.read(), (time.process_time() - started) / STEPS)


def measure_in_process(name: str, gradient_checkpointing: bool) -> StepCost:
    """Measure in a new process."""
    command = [sys.executable, "-m", __spec__.name, name, str(int(gradient_checkpointing))]
    environ = {**os.environ, **RETURN_FREED_MEMORY}
    output = subprocess.run(command, env=environ, check=True, capture_output=True, text=True).stdout
    peak, seconds = output.split()
    return StepCost(float(peak), float(seconds))


def main(arguments: list[str]) -> None:
    """Print a row per model, or with arguments one measurement."""
    if arguments:
        cost = measure(arguments[0], arguments[1] == "1")
        print(cost.peak, cost.seconds)
        return
    print("model        MiB plain  recomputed  ratio | s/step plain  recomputed  ratio")
    for name in CASES:
        plain = measure_in_process(name, False)
        recomputed = measure_in_process(name, True)
        print(
            f"{name:12} {plain.peak / 2**20:9.0f} {recomputed.peak / 2**20:11.0f} {recomputed.peak / plain.peak:6.2f} "
            f"| {plain.seconds:12.2f} {recomputed.seconds:11.2f} {recomputed.seconds / plain.seconds:6.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main(sys.argv[1:])

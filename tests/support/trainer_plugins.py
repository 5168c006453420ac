"""Data and models that the trainer loads by name in tests: they record their inputs, or interrupt.

``recorded`` data have their index in their pixels, and the ``recording`` model records the indexes in its inputs: the
samples that a run really trained and validated on. The ``interrupting`` model applies the fault of
``TEST_INTERRUPT`` to its own process in the middle of a step.
"""

from __future__ import annotations

import math
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ddp_trainer.data import DataConfig
from ddp_trainer.data.arrays import Datasets, ImageData
from ddp_trainer.models import ModelConfig
from ddp_trainer.models.networks import build_small as small_resnet

RECORDED = f"{__name__}:recorded"
RECORDING = f"{__name__}:recording"
INTERRUPTING = f"{__name__}:interrupting"
VALIDATION = 7


def recorded(config: DataConfig) -> Datasets:
    """TEST_SAMPLES training samples, and VALIDATION for validation, of two channels and one pixel."""
    return Datasets(_numbered(int(os.environ["TEST_SAMPLES"])), _numbered(VALIDATION), 2, mean=(0.0,), std=(1.0,))


def _numbered(length: int) -> ImageData:
    numbers = torch.arange(length)
    # Counted from 1: before it starts, the trainer passes a black image to the model.
    pixels = torch.stack([(numbers + 1) // 256, (numbers + 1) % 256], 1).to(torch.uint8).view(-1, 2, 1, 1)
    return ImageData(pixels, numbers % 2)


class _RecordingModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        numbers = (x[:, 0, 0, 0] * 256 + x[:, 1, 0, 0]).round().long() - 1
        kind = "train" if self.training else "valid"
        if int(numbers.min()) >= 0:
            with (Path(os.environ["TEST_RECORD"]) / f"{kind}-{os.environ.get('RANK', '0')}.txt").open("a") as file:
                print(*numbers.tolist(), file=file)
        outputs: Tensor = self.linear(x.flatten(1) / 256)
        return outputs


def recording(config: ModelConfig, in_channels: int, num_classes: int) -> nn.Module:
    """Writes one line per forward pass into the folder TEST_RECORD."""
    return _RecordingModel()


def read_record(folder: Path, kind: str) -> list[list[list[int]]]:
    """Return the batches of each rank, in order. Remove the record."""
    ranks = []
    for path in sorted(folder.glob(f"{kind}-*.txt")):
        ranks.append([[int(word) for word in line.split()] for line in path.read_text().splitlines()])
        path.unlink()
    return ranks


def interrupting(config: ModelConfig, in_channels: int, num_classes: int) -> nn.Module:
    """A small ResNet that, if TEST_INTERRUPT is "rank:forward:fault", fails before that rank's forward pass.

    ``fault`` is the name of a signal to its own process, or NAN for outputs that are not numbers. VALIDATION before it
    counts the batches of validations instead. TEST_SLOW_DISK makes every fsync take this many seconds.
    """
    model = small_resnet(config, in_channels, num_classes)
    if slow := os.environ.get("TEST_SLOW_DISK"):
        sync = os.fsync

        def slow_sync(descriptor: Any) -> None:
            time.sleep(float(slow))
            sync(descriptor)

        os.fsync = slow_sync
    rank, forward, fault = os.environ.get("TEST_INTERRUPT", "-1:0:").split(":")
    if rank == os.environ.get("RANK", "0"):
        remaining = [int(forward)]
        training = not fault.startswith("VALIDATION")
        fault = fault.removeprefix("VALIDATION")

        def count(module: nn.Module, inputs: Any, outputs: Tensor) -> Tensor:
            # A single image is the trainer's check before training.
            counts = module.training == training and len(outputs) > 1
            remaining[0] -= int(counts)
            if remaining[0] or not counts:
                return outputs
            if fault == "NAN":
                return outputs * math.nan
            os.kill(os.getpid(), getattr(signal, fault))
            return outputs

        model.register_forward_hook(count)
    return model


COLOURED = f"{__name__}:coloured"


def coloured(config: DataConfig) -> Datasets:
    """A few small pictures, each class of another colour, for runs that must learn within few steps."""
    generator = torch.Generator().manual_seed(0)

    def pictures(length: int) -> ImageData:
        labels = torch.arange(length) % 3
        images = torch.randint(0, 60, (length, 3, 16, 16), generator=generator, dtype=torch.uint8)
        images[torch.arange(length), labels] += 180
        return ImageData(images, labels)

    return Datasets(pictures(60), pictures(12), 3, mean=(0.5, 0.5, 0.5), std=(0.25, 0.25, 0.25))

"""The number of GPU launches in a step of each preset, counted on tensors without values.

``python -m tests.bench.trainer.launches``
"""

from __future__ import annotations

import sys
import warnings

import torch

from ddp_trainer.config.presets import PRESETS
from ddp_trainer.config.run import resolve
from ddp_trainer.data.arrays import Datasets, ImageData
from ddp_trainer.data.loader import TrainLoader
from ddp_trainer.data.sources import CachedSource, Normalize, Place
from ddp_trainer.distributed import RankEnv
from ddp_trainer.distributed.world import World
from ddp_trainer.engine import Engine
from ddp_trainer.models import build_model
from ddp_trainer.optim import build_optimizer
from ddp_trainer.precision import Precision
from ddp_trainer.tasks import build_task
from tests.support.launches import counted

DEVICE = torch.device("meta")
# Images of 2x2 pixels are too small for the networks' strides; the number of launches does not depend on the size.
SHAPES = {"cifar10": (3, 32, 32), "fashion-mnist": (1, 28, 28), "digits": (1, 8, 8), "voc2012": (3, 64, 64)}
BATCH = 2
BATCHES = 32


def count(preset: str) -> dict[str, float]:
    """Launches in a step of ``preset``: for its batch, alone and of sixteen, and for all of it."""
    plain = {"precision": {"name": "fp32"}, "data": {"batch_size": BATCH}}
    config = resolve(preset, None, plain | {"model": {"widen": 2}})
    shape = SHAPES[config.data.name]
    classes = 21
    images = torch.zeros(BATCH * BATCHES, *shape, dtype=torch.uint8)
    masks = config.data.name == "voc2012"
    labels = torch.zeros(len(images), *(shape[1:] if masks else ()), dtype=torch.uint8 if masks else torch.int64)
    data = ImageData(images, labels)
    datasets = Datasets(data, data, classes, (0.5,), (0.5,))
    place = Place(0, 1, torch.device("cpu"))
    loader = TrainLoader(datasets, config.data, place, samples_per_step=BATCH, seed=0)
    normalize = Normalize(datasets, DEVICE, torch.channels_last)
    loader.source = source = CachedSource(data, loader.augmentation, normalize, DEVICE)

    def load() -> None:
        for _ in batches:
            pass

    batches = loader.epoch(0)
    next(batches)
    together = counted(load) / (BATCHES - 16)
    source.group_size = 1
    batches = loader.epoch(0)
    next(batches)
    alone = counted(load) / (BATCHES - 1)
    with DEVICE:
        model = build_model(config.model, shape[0], classes)
    optimizer = build_optimizer(config.optim, model.parameters())
    optimizer._need_device_dtype_check_for_fused = False  # type: ignore[attr-defined]
    precision = Precision(config.precision, torch.device("cpu"))
    task = build_task(datasets)
    engine = Engine(model, task, optimizer, precision, World(RankEnv(), DEVICE), config)
    batches = loader.epoch(0)

    def step() -> None:
        engine.step(next(batches), 0, 0.1)

    counted(step)  # the first one allocates memory
    return {"batch": alone, "batch of 16": together, "step": counted(step)}


def main() -> int:
    """Print a line for each preset; returns 0."""
    warnings.filterwarnings("ignore", category=UserWarning)
    print(f"{'preset':38} {'batch':>6} {'of 16':>6} {'step':>6}")
    for preset in PRESETS:
        if resolve(preset, None, {}).data.name not in SHAPES:
            continue  # no images: its batches are not made on the device
        alone, together, step = count(preset).values()
        print(f"{preset:38} {alone:6.0f} {together:6.1f} {step:6.0f}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

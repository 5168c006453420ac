"""MixUp and CutMix of training batches, by torchvision's transforms.v2."""

from collections.abc import Callable
from typing import Any

import torch

from ddp_trainer.data import MIXES, DataConfig
from ddp_trainer.data.arrays import Datasets
from ddp_trainer.data.sources import Batch
from ddp_trainer.errors import require
from ddp_trainer.imports import import_torchvision

MixBatch = Callable[[Batch], Batch]


def build_mixing(config: DataConfig, datasets: Datasets, memory_format: torch.memory_format) -> MixBatch | None:
    """Return the function that mixes the images of a batch and their labels; None if ``config`` names no mixing.

    Labels become the shares of the classes, float32 (B, num_classes). MixUp (Zhang et al., 2017) adds the images of
    pairs, CutMix (Yun et al., 2019) pastes a rectangle; with both, each batch has one of them at random. The random
    numbers are those of torch's generator on the CPU. Raises :class:`UserError` unless each image has one class.
    """
    names = [name for name in config.augment if name in MIXES]
    if not names:
        return None
    require(
        datasets.num_classes > 0 and not datasets.masks,
        "data.augment",
        f"{', '.join(names)} needs one class per image",
        "omit it",
    )
    import_torchvision()
    from torchvision.transforms import v2

    transforms: list[Any] = []
    if "mixup" in names:
        transforms.append(v2.MixUp(alpha=config.mixup_alpha, num_classes=datasets.num_classes))
    if "cutmix" in names:
        transforms.append(v2.CutMix(alpha=config.cutmix_alpha, num_classes=datasets.num_classes))
    mix = transforms[0] if len(transforms) == 1 else v2.RandomChoice(transforms)

    def mix_batch(batch: Batch) -> Batch:
        images, shares = mix(batch.inputs, batch.targets)
        return Batch(images.contiguous(memory_format=memory_format), shares)

    return mix_batch

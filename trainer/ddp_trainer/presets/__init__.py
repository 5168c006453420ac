"""Ready configurations, one per system; ``--preset NAME`` starts from one and flags or a file change it."""

from __future__ import annotations

import difflib
from collections.abc import Mapping

from ddp_trainer.errors import UserError
from ddp_trainer.presets.digits import DIGITS_RESNET
from ddp_trainer.presets.preset import Preset
from ddp_trainer.presets.resnets import CIFAR10_RESNET18, CIFAR10_RESNET50
from ddp_trainer.presets.segmentation import VOC2012_DEEPLABV3_RESNET101
from ddp_trainer.presets.wide_resnets import (
    CIFAR10_WIDERESNET,
    FASHION_MNIST_WIDERESNET,
    FASHION_MNIST_WIDERESNET_LARGE_BATCH,
)

PRESETS: Mapping[str, Preset] = {
    preset.name: preset
    for preset in (
        DIGITS_RESNET,
        CIFAR10_RESNET18,
        CIFAR10_RESNET50,
        CIFAR10_WIDERESNET,
        FASHION_MNIST_WIDERESNET,
        FASHION_MNIST_WIDERESNET_LARGE_BATCH,
        VOC2012_DEEPLABV3_RESNET101,
    )
}


def get_preset(name: str) -> Preset:
    """The preset of that name; raises :class:`UserError` with the nearest known name otherwise."""
    if name in PRESETS:
        return PRESETS[name]
    close = difflib.get_close_matches(name, PRESETS, n=1)
    remedy = f"did you mean {close[0]!r}?" if close else "choose one"
    raise UserError("preset", f"{name!r} is not known", f"{remedy} Known: {', '.join(PRESETS)}")

"""Models by name. Builders are imported when asked for, so that a small model never pays for torchvision."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddp_trainer.config.options import option
from ddp_trainer.errors import require
from ddp_trainer.plugins import load_callable

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class ModelConfig:
    """Which network, and its knobs. Channels and classes come from the data."""

    name: str = option("small-resnet", "a built-in model, or module:function of your own", flag="--model")
    width: int = option(16, "channels of the first stage (small-resnet)", flag="--model-width")
    norm: str = option(
        "batch", "normalisation layers (small-resnet)", flag="--model-norm", choices=("batch", "group", "none")
    )
    dropout: float = option(0.0, "dropout probability, where the model has dropout")
    widen: int = option(10, "how many times wider than its stem the first stage is (wide-resnet)", flag="--model-widen")
    pool: int | None = option(
        None, "side of the window averaged at the end; none: the whole image (wide-resnet)", flag="--model-pool"
    )
    num_outputs: int | None = option(
        None, "outputs of the last layer, if more than the data has classes", flag="--model-outputs"
    )
    small_maps: bool = option(
        True, "on CPUs, convolutions of images of a few pixels as matrix products (resnet18, resnet50)"
    )
    sparse_dropout: bool = option(
        True, "on CPUs, draw which values dropout drops instead of drawing for each (wide-resnet)"
    )
    sync_batchnorm: bool = option(False, "batch norm over the batches of all ranks together")

    def __post_init__(self) -> None:
        for name in ("widen", "pool", "num_outputs"):
            value = getattr(self, name)
            require(value is None or value > 0, f"model.{name}", f"{value} is not positive", "give at least 1")
        require(
            self.width > 0 and self.width % 4 == 0,
            "model.width",
            f"{self.width} is not a positive multiple of 4",
            "give for example 16",
        )
        require(
            0.0 <= self.dropout < 1.0,
            "model.dropout",
            f"{self.dropout} is not a probability below 1",
            "give for example 0.1",
        )
        if ":" not in self.name:
            require(
                self.name in MODELS,
                "model.name",
                f"{self.name!r} is not known",
                f"choose one of {', '.join(MODELS)}, or module:function",
            )


# name -> module:function(config, in_channels, num_classes) -> torch.nn.Module
MODELS = {
    "small-resnet": "ddp_trainer.models.small_resnet:build",
    "resnet18": "ddp_trainer.models.torchvision_models:build",
    "resnet50": "ddp_trainer.models.torchvision_models:build",
    "wide-resnet": "ddp_trainer.models.wide_resnet:build",
    "deeplabv3_resnet50": "ddp_trainer.models.deeplab:build",
    "deeplabv3_resnet101": "ddp_trainer.models.deeplab:build",
}


def build_model(config: ModelConfig, in_channels: int, num_classes: int) -> torch.nn.Module:
    """The network for images of ``in_channels`` channels and ``num_classes`` classes, on the CPU.

    ``config.num_outputs`` takes the place of ``num_classes`` where given. A user's ``module:function`` is called with
    the same three arguments. Raises :class:`UserError` where it can't be imported or doesn't return a module.
    """
    import torch

    if config.num_outputs is not None:
        require(
            config.num_outputs >= num_classes,
            "model.num_outputs",
            f"{config.num_outputs} is less than the data's {num_classes} classes",
            "leave it out",
        )
        num_classes = config.num_outputs
    build = load_callable(MODELS.get(config.name, config.name), "model.name")
    model = build(config, in_channels, num_classes)
    require(
        isinstance(model, torch.nn.Module),
        "model.name",
        f"{config.name} returned {type(model).__name__}",
        "return a torch.nn.Module",
    )
    assert isinstance(model, torch.nn.Module)
    return model

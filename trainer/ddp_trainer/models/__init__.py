"""Models by name. A builder is imported when it is used, so that only torchvision's models import torchvision."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddp_trainer.config.options import Component, SettingsGroup, option
from ddp_trainer.errors import UserError, require
from ddp_trainer.imports import check_name, load_callable

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class ModelConfig(SettingsGroup, group="model"):
    """The network and its parameters. The data decide the numbers of channels and classes."""

    name: str = option("small-resnet", "a built-in model, or your own module:function", flag="--model")
    width: int = option(
        16,
        "channels (small-resnet: its first stage's, a multiple of 4; gpt: a multiple of 32)",
        flag="--model-width",
        at_least=4,
    )
    norm: str = option(
        "batch", "normalization layers (small-resnet)", flag="--model-norm", choices=("batch", "group", "none")
    )
    dropout: float = option(0.0, "dropout probability", at_least=0, below=1)
    widen: int = option(
        10, "width of the first stage, in multiples of the stem's (wide-resnet)", flag="--model-widen", at_least=1
    )
    pool: int | None = option(
        None,
        "side of the window averaged at the end; none: the whole image (wide-resnet)",
        flag="--model-pool",
        at_least=1,
    )
    num_outputs: int | None = option(
        None, "outputs of the last layer, if more than the data has classes", flag="--model-outputs", at_least=1
    )
    init_from: str | None = option(
        None,
        "initial weights: a file of torch.save or safetensors, or torchvision's such as ResNet50_Weights.DEFAULT; "
        "tensors that don't fit stay random; none: all random",
        flag="--init-from",
    )
    sync_batchnorm: bool = option(False, "batch norm statistics over the batches of all ranks")

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.width % 4 == 0, "model.width", f"{self.width} is not a multiple of 4", "give for example 16")
        check_name(self.name, MODELS, "model.name")


_IMAGES = ("precision.channels_last",)
_BATCH_NORM = (*_IMAGES, "model.sync_batchnorm")

# name -> module:function(config, in_channels, num_classes) -> torch.nn.Module
MODELS = {
    "small-resnet": Component(
        "ddp_trainer.models.small_resnet:build", (*_BATCH_NORM, "model.width", "model.norm", "model.dropout")
    ),
    "resnet18": Component("ddp_trainer.models.torchvision_models:build", _BATCH_NORM),
    "resnet50": Component("ddp_trainer.models.torchvision_models:build", _BATCH_NORM),
    "gpt": Component("ddp_trainer.models.gpt:build", ("model.width",)),
    "wide-resnet": Component(
        "ddp_trainer.models.wide_resnet:build",
        (*_BATCH_NORM, "model.widen", "model.dropout", "model.pool"),
    ),
    "deeplabv3_resnet50": Component("ddp_trainer.models.torchvision_models:build_deeplab", _BATCH_NORM),
    "deeplabv3_resnet101": Component("ddp_trainer.models.torchvision_models:build_deeplab", _BATCH_NORM),
}
# By the value of ``norm``.
NORMS: Mapping[str, tuple[str, ...]] = {"batch": ("model.sync_batchnorm",), "group": (), "none": ()}


def build_model(config: ModelConfig, in_channels: int, num_classes: int) -> "torch.nn.Module":
    """Build the network for inputs of ``in_channels`` channels and ``num_classes`` classes, on the CPU.

    ``config.num_outputs`` replaces ``num_classes`` if set. A user's ``module:function`` is called with the same three
    arguments. Raises :class:`UserError` if it can't be imported or doesn't return a module.
    """
    import torch

    if config.num_outputs is not None:
        require(
            config.num_outputs >= num_classes,
            "model.num_outputs",
            f"{config.num_outputs} is less than the data's {num_classes} classes",
            "omit it",
        )
        num_classes = config.num_outputs
    target = MODELS[config.name].target if config.name in MODELS else config.name
    build = load_callable(target, "model.name")
    model = build(config, in_channels, num_classes)
    if not isinstance(model, torch.nn.Module):
        raise UserError("model.name", f"{config.name} returned {type(model).__name__}", "return a torch.nn.Module")
    return model

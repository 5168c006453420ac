"""Models by name. A builder is imported when it is used, so that only torchvision's models import torchvision."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddp_sdk.errors import UserError, require
from ddp_trainer.imports import check_name, load_callable
from ddp_trainer.options import SettingsGroup, option

if TYPE_CHECKING:
    import torch


# name -> module:function(config, in_channels, num_classes) -> torch.nn.Module
MODELS: Mapping[str, str] = {
    "small-resnet": "ddp_trainer.models.networks:build_small",
    "resnet18": "ddp_trainer.models.networks:build_torchvision",
    "resnet50": "ddp_trainer.models.networks:build_torchvision",
    "gpt": "ddp_trainer.models.gpt:build",
    "wide-resnet": "ddp_trainer.models.networks:build_wide",
    "deeplabv3_resnet50": "ddp_trainer.models.networks:build_deeplab",
    "deeplabv3_resnet101": "ddp_trainer.models.networks:build_deeplab",
}


@dataclass(frozen=True)
class ModelConfig(SettingsGroup, group="model"):
    """The network and its parameters. The data decide the numbers of channels and classes."""

    name: str = option("small-resnet", "a built-in model, or your own module:function", flag="--model")
    width: int = option(
        16,
        "channels (small-resnet: its first stage's, a multiple of 4; gpt: a multiple of 32)",
        flag="--model-width",
        only={"model.name": ("small-resnet", "gpt")},
        at_least=4,
    )
    dropout: float = option(
        0.0, "dropout probability", only={"model.name": ("small-resnet", "wide-resnet")}, at_least=0, below=1
    )
    widen: int = option(
        10,
        "width of the first stage, in multiples of the stem's (wide-resnet)",
        flag="--model-widen",
        only={"model.name": ("wide-resnet",)},
        at_least=1,
    )
    pool: int | None = option(
        None,
        "side of the window averaged at the end; none: the whole image (wide-resnet)",
        flag="--model-pool",
        only={"model.name": ("wide-resnet",)},
        at_least=1,
    )
    num_outputs: int | None = option(
        None, "outputs of the last layer, if more than the data has classes", flag="--model-outputs", at_least=1
    )
    sync_batchnorm: bool = option(
        False,
        "batch norm statistics over the batches of all ranks",
        only={"model.name": tuple(name for name in MODELS if name != "gpt")},
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.width % 4 == 0, "model.width", f"{self.width} is not a multiple of 4", "give for example 16")
        check_name(self.name, MODELS, "model.name")


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
    target = MODELS.get(config.name, config.name)
    build = load_callable(target, "model.name")
    model = build(config, in_channels, num_classes)
    if not isinstance(model, torch.nn.Module):
        raise UserError("model.name", f"{config.name} returned {type(model).__name__}", "return a torch.nn.Module")
    return model

"""torchvision's networks without weights: classifiers, and segmentation networks."""

from torch import Tensor, nn

from ddp_trainer.errors import require
from ddp_trainer.imports import import_torchvision
from ddp_trainer.models import ModelConfig


def build(config: ModelConfig, in_channels: int, num_classes: int) -> nn.Module:
    """Build torchvision's ``config.name`` with ``num_classes`` outputs and a first convolution of ``in_channels``."""
    import_torchvision()
    from torchvision import models

    model: nn.Module = models.get_model(config.name, weights=None, num_classes=num_classes)
    if in_channels != 3:
        old = model.conv1
        assert isinstance(old, nn.Conv2d)
        model.conv1 = nn.Conv2d(in_channels, old.out_channels, 7, 2, 3, bias=False)
    return model


class PixelLogits(nn.Module):
    """A segmentation network of torchvision that returns its main output instead of a dictionary."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        """Map images (N, 3, H, W) to logits (N, num_classes, H, W)."""
        logits: Tensor = self.network(x)["out"]
        return logits


def build_deeplab(config: ModelConfig, in_channels: int, num_classes: int) -> nn.Module:
    """Build torchvision's ``config.name`` with ``num_classes`` outputs per pixel and no auxiliary classifier."""
    require(
        in_channels == 3,
        "model.name",
        f"{config.name} needs images of 3 channels, but the data has {in_channels}",
        "choose another model",
    )
    import_torchvision()
    from torchvision import models

    network = models.get_model(config.name, weights=None, weights_backbone=None, num_classes=num_classes)
    return PixelLogits(network)

"""The convolutional networks: two of the trainer's own, and torchvision's without weights.

``SmallResNet`` is for tiny images (8x8 and larger), which it learns in seconds on one core: three stages of one basic
block each, of widths w, 2w, 4w, after He et al., "Deep Residual Learning for Image Recognition" (2015), section 4.2.

``WideResNet`` is that of the Fashion-MNIST and CIFAR-10 presets, after Zagoruyko and Komodakis, "Wide Residual
Networks" (2016), in the form that the presets' document uses: a narrow stem of 16 channels, three stages of two wide
blocks, 16k, 32k, 64k wide (k = 10: 160, 320, 640), without stride but with a 2x2 max pooling between them, batch norm
and ReLU after every convolution, and a sum with the shortcut without an activation after it.
"""

import torch
from torch import Tensor, nn

from ddp_sdk.errors import require
from ddp_trainer.imports import import_torchvision
from ddp_trainer.models import ModelConfig


class BasicBlock(nn.Module):
    """Two 3x3 convolutions with a shortcut; a 1x1 convolution on the shortcut where the shape changes."""

    def __init__(self, in_channels: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, channels, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or in_channels != channels:
            self.shortcut = nn.Sequential(
                nn.Conv2d(in_channels, channels, 1, stride, bias=False), nn.BatchNorm2d(channels)
            )

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, in_channels, H, W) to (N, channels, H/stride, W/stride)."""
        out = torch.relu(self.norm1(self.conv1(x)))
        out = self.norm2(self.conv2(out))
        return torch.relu(out + self.shortcut(x))


class SmallResNet(nn.Module):
    """Stem, three residual stages, global average pooling, one linear layer."""

    def __init__(self, in_channels: int, num_classes: int, width: int, dropout: float) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(in_channels, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        self.stages = nn.Sequential(
            BasicBlock(width, width, 1),
            BasicBlock(width, 2 * width, 2),
            BasicBlock(2 * width, 4 * width, 2),
        )
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(4 * width, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Map images (N, in_channels, H, W) to logits (N, num_classes)."""
        out = self.stages(self.stem(x)).mean(dim=(2, 3))
        logits: Tensor = self.head(self.dropout(out))
        return logits


def build_small(config: ModelConfig, in_channels: int, num_classes: int) -> nn.Module:
    """Build the network that ``config`` describes."""
    return SmallResNet(in_channels, num_classes, config.width, config.dropout)


STEM = 16


def _conv_norm_relu(in_channels: int, channels: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(in_channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels), nn.ReLU(inplace=True)
    )


class WideBlock(nn.Module):
    """Two 3x3 convolutions with dropout between them; a 1x1 convolution on the shortcut where channels change."""

    def __init__(self, in_channels: int, channels: int, dropout: nn.Module) -> None:
        super().__init__()
        self.body = nn.Sequential(_conv_norm_relu(in_channels, channels), dropout, _conv_norm_relu(channels, channels))
        self.shortcut: nn.Module = nn.Identity()
        if in_channels != channels:
            self.shortcut = nn.Conv2d(in_channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, in_channels, H, W) to (N, channels, H, W)."""
        out: Tensor = self.body(x) + self.shortcut(x)
        return out


class WideResNet(nn.Module):
    """Stem, six wide blocks, an average over the whole image, one linear layer.

    With ``pool``, a window of that side from the top left corner is averaged instead of the whole image. The document
    averages 7x7 pixels: the whole last stage of a 28x28 image, but not of a 32x32 image.
    """

    def __init__(self, config: ModelConfig, in_channels: int, num_classes: int) -> None:
        super().__init__()
        widths = [times * STEM * config.widen for times in (1, 2, 4)]
        self.stem = _conv_norm_relu(in_channels, STEM)
        stages: list[nn.Module] = []
        last = STEM
        for number, width in enumerate(widths):
            if number:
                stages.append(nn.MaxPool2d(2))
            stages.append(WideBlock(last, width, nn.Dropout(config.dropout)))
            stages.append(WideBlock(width, width, nn.Dropout(config.dropout)))
            last = width
        self.stages = nn.Sequential(*stages)
        self.pool = config.pool
        self.head = nn.Linear(last, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Map images (N, in_channels, H, W) to logits (N, num_classes)."""
        out = self.stages(self.stem(x))
        if self.pool is not None:
            out = out[:, :, : self.pool, : self.pool]
        logits: Tensor = self.head(out.mean(dim=(2, 3)))
        return logits


def build_wide(config: ModelConfig, in_channels: int, num_classes: int) -> nn.Module:
    """Build the network that ``config`` describes."""
    return WideResNet(config, in_channels, num_classes)


def build_torchvision(config: ModelConfig, in_channels: int, num_classes: int) -> nn.Module:
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

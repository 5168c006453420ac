"""A small ResNet for tiny images (8x8 and larger): three stages of one basic block each.

After He et al., "Deep Residual Learning for Image Recognition" (2015), section 4.2, with widths w, 2w, 4w. It learns
the digits in seconds on one core.
"""

import torch
from torch import Tensor, nn

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


def build(config: ModelConfig, in_channels: int, num_classes: int) -> nn.Module:
    """Build the network that ``config`` describes."""
    return SmallResNet(in_channels, num_classes, config.width, config.dropout)

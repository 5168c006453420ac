"""The WideResNet of the Fashion-MNIST and CIFAR-10 presets: three stages of two wide blocks, no stride.

After Zagoruyko and Komodakis, "Wide Residual Networks" (2016), in the form that the presets' document uses: a narrow
stem of 16 channels, stages 16k, 32k, 64k wide (k = 10: 160, 320, 640) with a 2x2 max pooling between them, batch norm
and ReLU after every convolution, and a sum with the shortcut without an activation after it.
"""

from torch import Tensor, nn

from ddp_trainer.models import ModelConfig

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


def build(config: ModelConfig, in_channels: int, num_classes: int) -> nn.Module:
    """Build the network that ``config`` describes."""
    return WideResNet(config, in_channels, num_classes)

"""torchvision's own networks, from scratch, with a head for the data's classes."""

from __future__ import annotations

from torch import nn

from ddp_trainer.models import ModelConfig
from ddp_trainer.models.small_maps import use_matrix_products
from ddp_trainer.torchvision_compat import import_torchvision


def build(config: ModelConfig, in_channels: int, num_classes: int) -> nn.Module:
    """torchvision's ``config.name`` with ``num_classes`` outputs; its first convolution fitted to ``in_channels``."""
    import_torchvision()
    from torchvision import models

    model: nn.Module = models.get_model(config.name, weights=None, num_classes=num_classes)
    if in_channels != 3:
        old = model.conv1
        assert isinstance(old, nn.Conv2d)
        model.conv1 = nn.Conv2d(in_channels, old.out_channels, 7, 2, 3, bias=False)
    if config.small_maps:
        use_matrix_products(model)
    return model

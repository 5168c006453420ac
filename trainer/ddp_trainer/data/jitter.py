"""Random brightness, contrast and saturation on batches, with strengths and an order of its own for every image."""

import functools
import itertools

import torch
from torch import Tensor

BRIGHTNESS, CONTRAST, SATURATION = range(3)
ORDERS = tuple(itertools.permutations((BRIGHTNESS, CONTRAST, SATURATION)))


def jitter(images: Tensor, factors: Tensor, order: Tensor) -> Tensor:
    """Change ``images`` in place and return them.

    ``images`` are float32 (B, C, H, W) with whole numbers 0 to 255, C 1 or 3; ``factors`` (B, 3) has those of
    brightness, contrast and saturation; ``order`` (B,) chooses one of the six :data:`ORDERS`. Each change moves the
    image away from or towards its opposite, ``opposite + factor * (image - opposite)``, cut to 0 … 255 and to whole
    numbers: black for brightness, the mean grey for contrast, the image's own grey for saturation. This is what
    Pillow's ImageEnhance computes, roundings included.
    """
    for kinds in _orders(images.device)[order].unbind(1):
        factor = factors.gather(1, kinds.view(-1, 1)).view(-1, 1, 1, 1)
        grey = _grey(images)
        mean = (grey.mean(dim=(1, 2, 3), keepdim=True) + 0.5).floor_()
        kinds = kinds.view(-1, 1, 1, 1)
        opposite = grey.mul_(kinds == SATURATION).add_(mean.mul_(kinds == CONTRAST))
        images.sub_(opposite).mul_(factor).add_(opposite).clamp_(0.0, 255.0).floor_()
    return images


@functools.cache
def _orders(device: torch.device) -> Tensor:
    """:data:`ORDERS` on the device, int64 (6, 3). Sent once: a GPU would stand still for it in every batch."""
    return torch.tensor(ORDERS, device=device)


def _grey(images: Tensor) -> Tensor:
    """Luma of ITU-R 601, (B, 1, H, W), in Pillow's whole-number arithmetic, which float32 holds exactly."""
    if images.shape[1] == 1:
        return images.clone()
    red, green, blue = images.unbind(1)
    grey = (red * 19595.0).add_(green, alpha=38470.0).add_(blue, alpha=7471.0).add_(32768.0)
    return grey.mul_(1.0 / 65536.0).floor_().unsqueeze(1)

"""Random augmentation of whole batches, with separate parameters for every image.

The functions receive uniform random numbers instead of drawing them, see :mod:`ddp_trainer.data.sampling`.
"""

import functools
import itertools
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from ddp_sdk.errors import require
from ddp_trainer.data import DataConfig
from ddp_trainer.data.geometry import PixelMap, between, offsets, zoomed_crops

# Columns of an image's uniform random numbers, and their number. The first two are the position of a crop.
_FLIP = 2
_ANGLE = 3
_SHEAR = 4
_SCALE = 5
_STRENGTHS = slice(6, 9)
_ORDER = 9
DRAWS = 10
BRIGHTNESS, CONTRAST, SATURATION = range(3)
ORDERS = tuple(itertools.permutations((BRIGHTNESS, CONTRAST, SATURATION)))


@dataclass(frozen=True)
class Augmentation:
    """The augmentation of an image, in this order: crop, flip, rotation, shear and scale, color jitter.

    ``padding`` is the border of black pixels around the image before the crop; 0 disables the crop, which has the
    image's size. ``rotation`` and ``shear`` are maximum angles in degrees, ``scale`` is a range of factors, ``jitter``
    a maximum relative change. ``zoom`` replaces all steps before the jitter: images and masks are enlarged by a factor
    of ``scale``, flipped, and cut to their size, at a random position with ``crop``, otherwise in the center.
    """

    padding: int = 0
    flip: bool = False
    rotation: float = 0.0
    shear: float | None = None
    scale: tuple[float, float] = (1.0, 1.0)
    jitter: float = 0.0
    zoom: bool = False
    crop: bool = False

    @classmethod
    def from_config(cls, config: DataConfig, *, channels: int, masks: bool) -> Self:
        """Build what ``config.augment`` names; raises :class:`UserError` for what the data don't support."""
        chosen = set(config.augment)
        zoom = masks or "scale" in chosen
        mapped = chosen & {"rotate", "affine"}
        require(
            not (zoom and mapped),
            "data.augment",
            f"{', '.join(sorted(mapped))} can't be combined with scale or with masks",
            "use scale, crop and flip",
        )
        require(
            masks or "scale" not in chosen, "data.augment", "scale needs data with masks", "use affine, crop or flip"
        )
        if "jitter" in chosen:
            require(channels in (1, 3), "data.augment", f"jitter needs 1 or 3 channels, not {channels}", "omit it")
        scaled = "affine" in chosen or "scale" in chosen
        return cls(
            padding=config.crop_padding if "crop" in chosen and not zoom else 0,
            flip="flip" in chosen,
            rotation=config.rotation if "rotate" in chosen else 0.0,
            shear=config.shear if "affine" in chosen else None,
            scale=(config.scale_min, config.scale_max) if scaled else (1.0, 1.0),
            jitter=config.jitter if "jitter" in chosen else 0.0,
            zoom=bool(zoom and chosen & {"scale", "crop", "flip"}),
            crop=zoom and "crop" in chosen,
        )

    @property
    def active(self) -> bool:
        return self != Augmentation()

    def batch(self, images: Tensor, labels: Tensor, draws: Tensor | None) -> tuple[Tensor, Tensor]:
        """Augment images, uint8 (B, C, H, W), and labels, (B,) or masks (B, H, W), by ``draws``, (B, :data:`DRAWS`).

        All arguments are on one device. Returns images, uint8 or float32 in units of raw pixel values, and labels,
        int64.
        """
        if draws is None:
            return images, labels.long()
        if self.zoom:
            scale = between(draws[:, _SCALE], *self.scale)
            flip = draws[:, _FLIP] < (0.5 if self.flip else 0.0)
            positions = draws[:, :2] if self.crop else torch.full_like(draws[:, :2], 0.5)
            down, right = positions.unbind(1)
            images, labels = zoomed_crops(images.float(), labels, scale, down, right, flip)
            images = images.round_() if self.jitter else images
        else:
            images = self._map(images, draws)
        if self.jitter:
            strengths = between(draws[:, _STRENGTHS], max(0.0, 1.0 - self.jitter), 1.0 + self.jitter)
            images = jitter(images.float(), strengths, offsets(draws[:, _ORDER], len(ORDERS)))
        return images, labels.long()

    def _map(self, images: Tensor, draws: Tensor) -> Tensor:
        """Trace every output pixel back through the maps, from the last to the first."""
        pixels = PixelMap(images.shape[2], images.shape[3], images.device)
        if self.shear is not None:
            shear = between(draws[:, _SHEAR], -self.shear, self.shear)
            pixels.shear_and_scale(shear, between(draws[:, _SCALE], *self.scale))
        if self.rotation:
            pixels.rotate(between(draws[:, _ANGLE], -self.rotation, self.rotation))
        if self.flip:
            pixels.flip(draws[:, _FLIP] < 0.5)
        if self.padding:
            top, left = offsets(draws[:, :2], 2 * self.padding + 1).unbind(1)
            pixels.shift(top - self.padding, left - self.padding)
        return pixels.gather(images)


def jitter(images: Tensor, factors: Tensor, order: Tensor) -> Tensor:
    """Change brightness, contrast and saturation of ``images`` in place, and return them.

    ``images`` are float32 (B, C, H, W) with integers 0 to 255, C 1 or 3; ``factors`` (B, 3) are those of brightness,
    contrast and saturation; ``order`` (B,) selects one of the six :data:`ORDERS`. Each change computes
    ``reference + factor * (image - reference)``, clamped to 0 … 255 and rounded down. The reference is black for
    brightness, the mean gray for contrast, the image's gray version for saturation. The results, including rounding,
    equal those of Pillow's ImageEnhance.
    """
    for kinds in _orders(images.device)[order].unbind(1):
        factor = factors.gather(1, kinds.view(-1, 1)).view(-1, 1, 1, 1)
        gray = _to_gray(images)
        # Exact in float64, so that it does not depend on the number of images in the batch.
        mean = (gray.mean(dim=(1, 2, 3), keepdim=True, dtype=torch.float64) + 0.5).floor_().float()
        kinds = kinds.view(-1, 1, 1, 1)
        reference = gray.mul_(kinds == SATURATION).add_(mean.mul_(kinds == CONTRAST))
        images.sub_(reference).mul_(factor).add_(reference).clamp_(0.0, 255.0).floor_()
    return images


@functools.cache
def _orders(device: torch.device) -> Tensor:
    """Return :data:`ORDERS` on the device, int64 (6, 3); copied once, because a GPU would wait for each copy."""
    return torch.tensor(ORDERS, device=device)


def _to_gray(images: Tensor) -> Tensor:
    """Compute the luma of ITU-R 601, (B, 1, H, W), by Pillow's integer arithmetic, which is exact in float32."""
    if images.shape[1] == 1:
        return images.clone()
    red, green, blue = images.unbind(1)
    gray = (red * 19595.0).add_(green, alpha=38470.0).add_(blue, alpha=7471.0).add_(32768.0)
    return gray.mul_(1.0 / 65536.0).floor_().unsqueeze(1)

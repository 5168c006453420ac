"""Random changes of whole batches, with parameters of its own for every image.

The functions take uniform numbers instead of drawing them, see :mod:`ddp_trainer.data.sampling`.
"""

import functools
import itertools
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from ddp_trainer.data import DataConfig
from ddp_trainer.data.geometry import PixelMap, between, offsets, zoomed_crops
from ddp_trainer.errors import UserError, require

# Columns of an image's uniform numbers.
# The first two place a crop.
_FLIP, _ANGLE, _SHEAR, _SCALE, _STRENGTHS, _ORDER = 2, 3, 4, 5, slice(6, 9), 9
BRIGHTNESS, CONTRAST, SATURATION = range(3)
ORDERS = tuple(itertools.permutations((BRIGHTNESS, CONTRAST, SATURATION)))


@dataclass(frozen=True)
class Augmentation:
    """What happens to an image, in this order: crop, flip, rotation, shear and scale, jitter of colours.

    ``padding`` is a border of black pixels out of which the crop is cut; 0 turns the crop off, as a crop as large as
    the image has nothing to choose. ``rotation`` and ``shear`` are greatest angles in degrees, ``scale`` is a range of
    factors, ``jitter`` a greatest relative change. ``zoom`` takes the place of all before the jitter: images and masks
    are enlarged by a factor of ``scale``, flipped, and cut to their size, anywhere if ``crop``, else in the centre.
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
        """The changes that ``config.augment`` names; raises :class:`UserError` for what such data can't have."""
        chosen = set(config.augment)
        zoom = masks or "scale" in chosen
        moved = chosen & {"rotate", "affine"}
        require(
            not (zoom and moved),
            "data.augment",
            f"{', '.join(sorted(moved))} does not go with scale or with masks",
            "use scale, crop and flip",
        )
        require(
            masks or "scale" not in chosen, "data.augment", "scale is for data with masks", "use affine, crop or flip"
        )
        if "jitter" in chosen and channels not in (1, 3):
            raise UserError("data.augment", f"jitter knows grey and colour, not {channels} channels", "leave it out")
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
        """Whether a batch is changed at all."""
        return self != Augmentation()

    @property
    def draws(self) -> int:
        """Uniform numbers that an image needs."""
        return 3 if self._sliceable and not self.jitter else 10

    @property
    def _sliceable(self) -> bool:
        """Whether a part of the bordered image, mirrored or not, is all that is asked for."""
        return not (self.rotation or self.shear is not None or self.zoom)

    def prepare(self, images: Tensor) -> Tensor:
        """The cache that batches are cut from: ``images`` (N, C, H, W) with their border, which is added only once."""
        return pad(images, (self.padding,) * 4) if self.padding and self._sliceable else images

    def batch(self, cache: Tensor, labels: Tensor, indices: Tensor, draws: Tensor | None) -> tuple[Tensor, Tensor]:
        """The images ``indices`` of ``cache`` and what they show, changed by ``draws`` (B, :attr:`draws`) where given.

        All on one device. Returns new tensors: images uint8 or float32 (B, C, H, W) in units of raw pixel values, and
        labels int64 (B,), or (B, H, W) from masks.
        """
        chosen = labels[indices]
        if draws is None or self._sliceable:
            images = self._cut(cache, indices, draws)
        elif self.zoom:
            scale = between(draws[:, _SCALE], *self.scale)
            flip = draws[:, _FLIP] < (0.5 if self.flip else 0.0)
            pixels = cache[indices].float()
            places = draws[:, :2] if self.crop else torch.full_like(draws[:, :2], 0.5)
            down, right = places.unbind(1)
            images, chosen = zoomed_crops(pixels, chosen, scale, down, right, flip)
            images = images.round_() if self.jitter else images
        else:
            images = self._map(cache[indices], draws)
        if draws is not None and self.jitter:
            low, high = max(0.0, 1.0 - self.jitter), 1.0 + self.jitter
            strengths = between(draws[:, _STRENGTHS], low, high)
            images = jitter(images.float(), strengths, offsets(draws[:, _ORDER], len(ORDERS)))
        return images, chosen.long()

    def _map(self, images: Tensor, draws: Tensor) -> Tensor:
        """Follow every output pixel back through the maps, the last one first."""
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

    def _cut(self, cache: Tensor, indices: Tensor, draws: Tensor | None) -> Tensor:
        padding = self.padding if self._sliceable else 0
        height, width = cache.shape[2] - 2 * padding, cache.shape[3] - 2 * padding
        if draws is None or not (padding or self.flip):
            chosen = cache[indices]
            return chosen[:, :, padding : padding + height, padding : padding + width] if padding else chosen
        places = offsets(draws[:, :2], 2 * padding + 1)
        flips = draws[:, _FLIP] < (0.5 if self.flip else 0.0)
        if cache.device.type == "cpu":
            return _slice_numpy(cache, indices, places.numpy(), flips.numpy(), height, width)
        return _gather_indexed(cache, indices, places, flips, height, width)


def _slice_numpy(
    cache: Tensor, indices: Tensor, offsets: NDArray[np.int64], flips: NDArray[np.bool_], height: int, width: int
) -> Tensor:
    """One NumPy slice an image: on a CPU half the cost of gathering pixels by index."""
    source = cache.numpy()
    out = np.empty((len(indices), source.shape[1], height, width), source.dtype)
    rows = zip(indices.tolist(), offsets.tolist(), flips.tolist(), strict=True)
    for position, (index, (top, left), flip) in enumerate(rows):
        image = source[index, :, top : top + height, left : left + width]
        out[position] = image[:, :, ::-1] if flip else image
    return torch.from_numpy(out)


def _gather_indexed(cache: Tensor, indices: Tensor, offsets: Tensor, flips: Tensor, height: int, width: int) -> Tensor:
    """The same in a fixed number of operations, for devices on which a launch an image is dear."""
    device = cache.device
    tops, lefts = offsets.unbind(1)
    y = tops[:, None] + torch.arange(height, device=device)
    x = torch.arange(width, device=device).expand(len(indices), width)
    x = torch.where(flips[:, None], width - 1 - x, x) + lefts[:, None]
    # Indices on both sides of the channel slice put the channels last: (B, H, W, C).
    return cache[indices[:, None, None], :, y[:, :, None], x[:, None, :]].permute(0, 3, 1, 2)


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
        # Exact, so that it does not hang on how many images are changed together.
        mean = (grey.mean(dim=(1, 2, 3), keepdim=True, dtype=torch.float64) + 0.5).floor_().float()
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

"""Random maps of whole batches with parameters of its own for every image: rotation, shear and scale, zoomed crops."""

import torch
from torch import Tensor
from torch.nn.functional import grid_sample

from ddp_trainer.data.arrays import VOID


def between(draws: Tensor, low: float, high: float) -> Tensor:
    """Uniform numbers in [0, 1) stretched to [low, high)."""
    return draws * (high - low) + low


def offsets(draws: Tensor, count: int) -> Tensor:
    """Whole numbers 0 … count - 1 (int64) from uniform ones; float32 may round the greatest up to ``count``."""
    return (draws * count).long().clamp_(max=count - 1)


class PixelMap:
    """For every pixel of a batch of outputs the pixel of the source image it is taken from.

    Maps are added from the last one applied to the first: an output pixel is followed back. Every map takes the nearest
    pixel, and one that lies outside is black for good, as when images are resampled after each map. So the result is
    that of the maps one by one, though pixels are gathered once.
    """

    def __init__(self, height: int, width: int, device: torch.device) -> None:
        self.height, self.width = height, width
        y, x = torch.arange(height, device=device), torch.arange(width, device=device)
        # In pixels, whole numbers held as float32, which is exact far beyond any image's side. Of a shape that goes
        # with (B, H, W): as long as all images and rows have the same numbers, they are there once.
        self.y = y.view(1, -1, 1).float()
        self.x = x.view(1, 1, -1).float()
        self.inside: Tensor | None = None

    def _take(self, y: Tensor, x: Tensor) -> None:
        self.y, self.x = y, x
        inside = (y >= 0) & (y < self.height) & (x >= 0) & (x < self.width)
        self.inside = inside if self.inside is None else self.inside & inside

    def linear(self, xx: Tensor, xy: Tensor, yx: Tensor, yy: Tensor) -> None:
        """About the image's centre: source x = xx * x + xy * y, source y = yx * x + yy * y; coefficients (B,)."""
        # Positions are those of pixels' centres, half a pixel from their corner.
        x, y = self.x + (0.5 - self.width / 2), self.y + (0.5 - self.height / 2)
        a, b, c, d = (value.view(-1, 1, 1) for value in (xx, xy, yx, yy))
        self._take((c * x + d * y).add_(self.height / 2).floor_(), (a * x + b * y).add_(self.width / 2).floor_())

    def rotate(self, degrees: Tensor) -> None:
        """Turn counter-clockwise by ``degrees`` (B,)."""
        angle = torch.deg2rad(degrees)
        cos, sin = angle.cos(), angle.sin()
        self.linear(cos, -sin, sin, cos)

    def shear_and_scale(self, degrees: Tensor, scale: Tensor) -> None:
        """Shear along the horizontal by ``degrees`` (B,) and enlarge by ``scale`` (B,)."""
        zero = torch.zeros_like(scale)
        self.linear(1.0 / scale, torch.deg2rad(degrees).tan() / scale, zero, 1.0 / scale)

    def flip(self, chosen: Tensor) -> None:
        """Mirror left to right where ``chosen`` (bool, (B,))."""
        self.x = torch.where(chosen.view(-1, 1, 1), self.width - 1 - self.x, self.x)

    def shift(self, down: Tensor, right: Tensor) -> None:
        """Begin ``down`` and ``right`` pixels (int64, (B,)) into the source, which is black outside."""
        self._take(self.y + down.view(-1, 1, 1), self.x + right.view(-1, 1, 1))

    def gather(self, images: Tensor) -> Tensor:
        """The mapped images of ``images`` (B, C, H, W), of the same type."""
        count, channels = images.shape[:2]
        shape = count, self.height, self.width
        index = (self.y * self.width + self.x).long().expand(shape).reshape(count, 1, -1)
        if self.inside is not None:
            inside = self.inside.expand(shape).reshape(count, 1, -1)
            # Coordinates outside are anything; black is put in afterwards.
            index = index.mul_(inside)
        flat = images.reshape(count, channels, -1).gather(2, index.expand(count, channels, -1))
        if self.inside is not None:
            flat = flat.mul_(inside)
        return flat.view_as(images)


def zoomed_crops(
    images: Tensor, masks: Tensor, scale: Tensor, down: Tensor, right: Tensor, flip: Tensor
) -> tuple[Tensor, Tensor]:
    """Images and masks enlarged by ``scale``, mirrored where ``flip``, and cut back to their size.

    ``images`` are float32 (B, C, H, W), ``masks`` uint8 (B, H, W). ``down`` and ``right``, in [0, 1), place the cut in
    what the enlarged image has too much; where it has too little, the rest is black, and void in the mask. Images are
    interpolated, masks take the nearest pixel, at the very same places. Returns float32 and uint8.
    """
    height, width = images.shape[2:]
    device = images.device

    def axis(length: int, start: Tensor, mirrored: Tensor | None) -> Tensor:
        """Source positions, (B, length), from -1 to 1 over the image, as grid_sample has them."""
        side = scale * length
        first = (start * (side - length).clamp(min=0.0)).view(-1, 1)
        places = (torch.arange(length, device=device) + 0.5 + first) / side.view(-1, 1) * 2.0 - 1.0
        return places if mirrored is None else torch.where(mirrored.view(-1, 1), -places, places)

    y, x = axis(height, down, None), axis(width, right, flip)
    shape = (len(images), height, width)
    grid = torch.stack([x[:, None, :].expand(shape), y[:, :, None].expand(shape)], dim=-1)
    moved = grid_sample(images, grid, mode="bilinear", padding_mode="zeros", align_corners=False)
    # grid_sample fills with zeros: void becomes zero for the while.
    shifted = masks.unsqueeze(1).float().sub_(VOID)
    classes = grid_sample(shifted, grid, mode="nearest", padding_mode="zeros", align_corners=False)
    return moved, classes.add_(VOID).round_().to(torch.uint8).squeeze(1)

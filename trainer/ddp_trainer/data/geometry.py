"""Geometric maps of whole batches, with separate parameters for every image: rotation, shear, scale, zoomed crops."""

import torch
from torch import Tensor
from torch.nn.functional import grid_sample

from ddp_trainer.data.arrays import VOID


def between(draws: Tensor, low: float, high: float) -> Tensor:
    """Map uniform numbers from [0, 1) to [low, high)."""
    return draws * (high - low) + low


def offsets(draws: Tensor, count: int) -> Tensor:
    """Map uniform numbers to integers 0 … count - 1 (int64); float32 may round the greatest up to ``count``."""
    return (draws * count).long().clamp_(max=count - 1)


class PixelMap:
    """The source pixel of every pixel of a batch of outputs.

    Maps are added from the last to the first, because output pixels are traced back to the source. Every map selects
    the nearest pixel; a pixel outside the image is black, and stays black in all further maps. The result equals that
    of resampling after each map, but pixels are gathered only once.
    """

    def __init__(self, height: int, width: int, device: torch.device) -> None:
        self.height = height
        self.width = width
        # Source positions in pixels: integers, which float32 represents exactly. Their shapes broadcast to (B, H, W).
        self.y = torch.arange(height, device=device).view(1, -1, 1).float()
        self.x = torch.arange(width, device=device).view(1, 1, -1).float()
        self.inside: Tensor | None = None

    def _move(self, y: Tensor, x: Tensor) -> None:
        self.y = y
        self.x = x
        inside = (y >= 0) & (y < self.height) & (x >= 0) & (x < self.width)
        self.inside = inside if self.inside is None else self.inside & inside

    def linear(self, xx: Tensor, xy: Tensor, yx: Tensor, yy: Tensor) -> None:
        """Map about the image's center: source x = xx * x + xy * y, source y = yx * x + yy * y; coefficients (B,)."""
        # Positions of the pixels' centers, which are half a pixel from their corners.
        x = self.x + (0.5 - self.width / 2)
        y = self.y + (0.5 - self.height / 2)
        xx, xy, yx, yy = (coefficient.view(-1, 1, 1) for coefficient in (xx, xy, yx, yy))
        source_y = (yx * x + yy * y).add_(self.height / 2).floor_()
        source_x = (xx * x + xy * y).add_(self.width / 2).floor_()
        self._move(source_y, source_x)

    def rotate(self, degrees: Tensor) -> None:
        """Rotate counterclockwise by ``degrees`` (B,)."""
        angle = torch.deg2rad(degrees)
        cos = angle.cos()
        sin = angle.sin()
        self.linear(cos, -sin, sin, cos)

    def shear_and_scale(self, degrees: Tensor, scale: Tensor) -> None:
        """Shear horizontally by ``degrees`` (B,) and enlarge by ``scale`` (B,)."""
        zero = torch.zeros_like(scale)
        self.linear(1.0 / scale, torch.deg2rad(degrees).tan() / scale, zero, 1.0 / scale)

    def flip(self, chosen: Tensor) -> None:
        """Mirror left to right where ``chosen`` (bool, (B,))."""
        self.x = torch.where(chosen.view(-1, 1, 1), self.width - 1 - self.x, self.x)

    def shift(self, down: Tensor, right: Tensor) -> None:
        """Shift the source by ``down`` and ``right`` pixels (int64, (B,)); it is black outside."""
        self._move(self.y + down.view(-1, 1, 1), self.x + right.view(-1, 1, 1))

    def gather(self, images: Tensor) -> Tensor:
        """Return ``images`` (B, C, H, W) mapped, of the same type."""
        count, channels = images.shape[:2]
        shape = (count, self.height, self.width)
        index = (self.y * self.width + self.x).long().expand(shape).reshape(count, 1, -1)
        if self.inside is not None:
            inside = self.inside.expand(shape).reshape(count, 1, -1)
            # Indices outside the image may be invalid: read pixel 0, which is set to black below.
            index = index.mul_(inside)
        flat = images.reshape(count, channels, -1).gather(2, index.expand(count, channels, -1))
        if self.inside is not None:
            flat = flat.mul_(inside)
        return flat.view_as(images)


def zoomed_crops(
    images: Tensor, masks: Tensor, scale: Tensor, down: Tensor, right: Tensor, flip: Tensor
) -> tuple[Tensor, Tensor]:
    """Enlarge images and masks by ``scale``, mirror those with ``flip``, and crop them to their original size.

    ``images`` are float32 (B, C, H, W), ``masks`` uint8 (B, H, W). ``down`` and ``right``, in [0, 1), are the position
    of the crop in the enlarged image. If the image shrinks, the rest is black, and void in the mask. Images are
    interpolated; masks take the nearest pixel at the same positions. Returns float32 and uint8.
    """
    height, width = images.shape[2:]
    device = images.device

    def axis(length: int, start: Tensor, mirrored: Tensor | None) -> Tensor:
        """Compute source positions, (B, length), from -1 to 1 over the image, for grid_sample."""
        side = scale * length
        first = (start * (side - length).clamp(min=0.0)).view(-1, 1)
        positions = (torch.arange(length, device=device) + 0.5 + first) / side.view(-1, 1) * 2.0 - 1.0
        return positions if mirrored is None else torch.where(mirrored.view(-1, 1), -positions, positions)

    y = axis(height, down, None)
    x = axis(width, right, flip)
    shape = (len(images), height, width)
    grid = torch.stack([x[:, None, :].expand(shape), y[:, :, None].expand(shape)], dim=-1)
    moved = grid_sample(images, grid, mode="bilinear", padding_mode="zeros", align_corners=False)
    # grid_sample fills with zeros: subtract void before, and add it afterwards.
    shifted = masks.unsqueeze(1).float().sub_(VOID)
    classes = grid_sample(shifted, grid, mode="nearest", padding_mode="zeros", align_corners=False)
    return moved, classes.add_(VOID).round_().to(torch.uint8).squeeze(1)

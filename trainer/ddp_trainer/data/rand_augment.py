"""RandAugment of whole batches, with separate operations for every image (Cubuk et al., 2019).

The operations are those of ``torchvision.transforms.v2.functional``, with the magnitudes and the probabilities of
torchvision's RandAugment, which would apply one choice to the whole batch.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ddp_trainer.data.geometry import offsets
from ddp_trainer.imports import import_torchvision

# Operations of an image, of which each needs two uniform random numbers.
LAYERS = 2
DRAWS = 2 * LAYERS
_BINS = 31


class Operation(NamedTuple):
    """``apply`` changes images, uint8 (B, C, H, W). ``opposite``: with half the probability, in the other direction."""

    name: str
    apply: Callable[[Tensor], Tensor]
    opposite: Callable[[Tensor], Tensor] | None = None


class RandAugment:
    """Two random operations for each image; ``magnitude`` is from 0 to 30. Raises UserError without torchvision."""

    def __init__(self, magnitude: int, height: int, width: int) -> None:
        self.operations = _list_operations(magnitude, height, width)

    def __call__(self, images: Tensor, draws: Tensor) -> Tensor:
        """Change ``images``, uint8 (B, 1 or 3, H, W), in place by ``draws`` (B, :data:`DRAWS`), and return them.

        The host chooses the operations: it waits for ``draws`` of a GPU.
        """
        numbers = draws.cpu()
        for layer in range(LAYERS):
            choices = offsets(numbers[:, 2 * layer], len(self.operations))
            reversed_ = numbers[:, 2 * layer + 1] <= 0.5
            for number in sorted(set(choices.tolist())):
                operation = self.operations[number]
                chosen = choices == number
                if operation.opposite is None:
                    _apply(operation.apply, images, chosen)
                else:
                    _apply(operation.apply, images, chosen & ~reversed_)
                    _apply(operation.opposite, images, chosen & reversed_)
        return images


def _apply(change: Callable[[Tensor], Tensor], images: Tensor, chosen: Tensor) -> None:
    """Replace the images where ``chosen`` (bool, (B,), on the host) by the changed ones."""
    indices = chosen.nonzero().flatten().to(images.device)
    if len(indices):
        images[indices] = change(images[indices])


@functools.cache
def _list_operations(magnitude: int, height: int, width: int) -> list[Operation]:
    """Return the fourteen operations in torchvision's order."""
    import_torchvision()
    from torchvision.transforms.v2 import functional as vision

    def scale(end: float, start: float = 0.0) -> float:
        return float(torch.linspace(start, end, _BINS)[magnitude])

    def affine(images: Tensor, *, shear: tuple[float, float] = (0, 0), translate: tuple[int, int] = (0, 0)) -> Tensor:
        # torchvision shears about the corner, but translates about the center; for a translation both are equal.
        center = [0.0, 0.0] if any(shear) else None
        return vision.affine(images, 0.0, list(translate), 1.0, list(shear), center=center)  # type: ignore[no-any-return]

    def both(
        name: str, change: Callable[[Tensor, Any], Tensor], build: Callable[[float], Any], size: float
    ) -> Operation:
        """Build an operation by ``size`` and by its negative."""

        def apply(value: float) -> Callable[[Tensor], Tensor]:
            return lambda images: change(images, build(value))

        return Operation(name, apply(size), apply(-size))

    angle = math.degrees(math.atan(scale(0.3)))
    factor = scale(0.9)
    bits = int((8 - (torch.arange(_BINS) / ((_BINS - 1) / 4))).round()[magnitude])
    return [
        Operation("Identity", lambda images: images),
        both("ShearX", lambda images, shear: affine(images, shear=shear), lambda size: (size, 0.0), angle),
        both("ShearY", lambda images, shear: affine(images, shear=shear), lambda size: (0.0, size), angle),
        both(
            "TranslateX",
            lambda images, way: affine(images, translate=way),
            lambda size: (int(size), 0),
            scale(150.0 / 331.0 * width),
        ),
        both(
            "TranslateY",
            lambda images, way: affine(images, translate=way),
            lambda size: (0, int(size)),
            scale(150.0 / 331.0 * height),
        ),
        both("Rotate", vision.rotate, float, scale(30.0)),
        both("Brightness", vision.adjust_brightness, lambda size: 1.0 + size, factor),
        both("Color", vision.adjust_saturation, lambda size: 1.0 + size, factor),
        both("Contrast", vision.adjust_contrast, lambda size: 1.0 + size, factor),
        both("Sharpness", vision.adjust_sharpness, lambda size: 1.0 + size, factor),
        Operation("Posterize", functools.partial(vision.posterize, bits=bits)),
        Operation("Solarize", functools.partial(vision.solarize, threshold=255.0 * scale(0.0, start=1.0))),
        Operation("AutoContrast", vision.autocontrast),
        Operation("Equalize", vision.equalize),
    ]

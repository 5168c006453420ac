"""Photographs in folders named after their classes, as ImageNet's usually are: decoded and cut for every batch."""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ddp_trainer.data import DataConfig
from ddp_trainer.data.arrays import Datasets
from ddp_trainer.data.published import IMAGENET_MEAN, IMAGENET_STD
from ddp_trainer.errors import UserError, require
from ddp_trainer.imports import import_torchvision

if TYPE_CHECKING:
    from PIL import Image

_SIZE = 224
# The whole picture is shrunk to so much more than what is cut out of its middle, as 256 is to 224.
_MARGIN = 256 / 224


def load(config: DataConfig) -> Datasets:
    """Find ``train/CLASS/…`` and ``val/CLASS/…`` below ``config.dir``, by torchvision's ImageFolder.

    Training images are cut at random (RandomResizedCrop) if ``config.augment`` has crop, and mirrored if it has flip;
    others are shrunk and cut out of their middle. Raises :class:`UserError` where there are no such folders.
    """
    import_torchvision()
    from torchvision.datasets import ImageFolder
    from torchvision.transforms import (
        CenterCrop,
        Compose,
        PILToTensor,
        RandomHorizontalFlip,
        RandomResizedCrop,
        Resize,
    )

    size = config.image_size or _SIZE
    unknown = ", ".join(set(config.augment) - {"crop", "flip"})
    require(not unknown, "data.augment", f"imagefolder knows no {unknown}", "use crop and flip")
    middle = [Resize(round(size * _MARGIN)), CenterCrop(size)]
    changes = [RandomResizedCrop(size)] if "crop" in config.augment else list(middle)
    if "flip" in config.augment:
        changes.append(RandomHorizontalFlip())
    parts = []
    for name, steps in (("train", changes), ("val", changes if config.validation_augment else middle)):
        folder = Path(config.dir) / name
        try:
            parts.append(ImageFolder(str(folder), Compose([*steps, PILToTensor()]), loader=read_image))
        except OSError as error:
            reason = " ".join(str(error).split())[:200]
            remedy = "give --data-dir with train/CLASS/ and val/CLASS/, of JPEG or PNG files"
            raise UserError("data.dir", f"no images in {folder.resolve()}: {reason}", remedy) from error
    train, validation = parts
    other = set(train.classes) ^ set(validation.classes)
    require(
        not other,
        "data.dir",
        f"train and val in {Path(config.dir).resolve()} differ in the classes {', '.join(sorted(other)[:8])}",
        "give both the same folders",
    )
    return Datasets(train, validation, len(train.classes), IMAGENET_MEAN, IMAGENET_STD)


def read_image(path: str) -> "Image.Image":
    """Decode a file to RGB; 16-bit grey is scaled to 8 bits. Raises :class:`UserError` with the path where it can't."""
    from PIL import Image

    try:
        with Image.open(path) as image:
            image.load()
            deep = image.mode.startswith("I;16") or (image.mode == "I" and image.format == "PNG")
            require(
                deep or image.mode not in ("I", "F"),
                "data.dir",
                f"{Path(path).resolve()} has 32-bit pixels (mode {image.mode}), whose range is unknown",
                "convert it to 8 or 16 bits",
            )
            return _scale_to_8_bits(image).convert("RGB") if deep else image.convert("RGB")
    except (UserError, MemoryError):
        raise
    except Exception as error:  # Pillow's decoders raise whatever a damaged file leads to
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise UserError(
            "data.dir", f"{Path(path).resolve()} can't be decoded: {reason}", "replace or delete the file"
        ) from error


def _scale_to_8_bits(image: "Image.Image") -> "Image.Image":
    """A grey image of 0 to 65,535 as one of 0 to 255: Pillow's own conversion cuts off what is above 255."""
    from PIL import Image

    pixels = np.asarray(image).astype(np.uint32)
    return Image.fromarray(((pixels + 128) // 257).astype(np.uint8))

"""Images in folders named after their classes, the usual layout of ImageNet: decoded and cropped for every batch."""

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
# Ratio of the resized image to its center crop.
_MARGIN = 256 / 224


def load(config: DataConfig) -> Datasets:
    """Open ``train/CLASS/…`` and ``val/CLASS/…`` below ``config.dir`` by torchvision's ImageFolder.

    With crop in ``config.augment`` training images are cropped by RandomResizedCrop, with flip they are mirrored at
    random; all others are resized and center-cropped. Raises
    :class:`UserError` if the folders do not exist.
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
    remedy = "use crop and flip"
    require(not unknown, "data.augment", f"imagefolder does not support {unknown}", remedy)
    center_crop = [Resize(round(size * _MARGIN)), CenterCrop(size)]
    augmented = [RandomResizedCrop(size)] if "crop" in config.augment else list(center_crop)
    if "flip" in config.augment:
        augmented.append(RandomHorizontalFlip())
    parts = []
    for name, steps in (("train", augmented), ("val", augmented if config.validation_augment else center_crop)):
        folder = Path(config.dir) / name
        try:
            parts.append(ImageFolder(str(folder), Compose([*steps, PILToTensor()]), loader=read_image))
        except OSError as error:
            reason = " ".join(str(error).split())[:200]
            remedy = "give --data-dir with train/CLASS/ and val/CLASS/, of JPEG or PNG files"
            raise UserError("data.dir", f"no images in {folder.resolve()}: {reason}", remedy) from error
    train, validation = parts
    unmatched = set(train.classes) ^ set(validation.classes)
    require(
        not unmatched,
        "data.dir",
        f"train and val in {Path(config.dir).resolve()} differ in the classes {', '.join(sorted(unmatched)[:8])}",
        "give both the same folders",
    )
    return Datasets(train, validation, len(train.classes), IMAGENET_MEAN, IMAGENET_STD)


def read_image(path: str) -> "Image.Image":
    """Decode a file to RGB; 16-bit gray is scaled to 8 bits. Raises :class:`UserError` with the path on failure."""
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
    except Exception as error:  # Pillow's decoders raise any exception for a damaged file
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise UserError(
            "data.dir", f"{Path(path).resolve()} can't be decoded: {reason}", "replace or delete the file"
        ) from error


def _scale_to_8_bits(image: "Image.Image") -> "Image.Image":
    """Scale a gray image from 0 … 65,535 to 0 … 255: Pillow's own conversion clips values above 255."""
    from PIL import Image

    pixels = np.asarray(image).astype(np.uint32)
    return Image.fromarray(((pixels + 128) // 257).astype(np.uint8))

"""PASCAL VOC 2012's segmentation: 2,913 photographs with a class number for every pixel, 21 classes and void.

Photographs vary in size. Each is shrunk or enlarged until its longer side has ``image_size`` pixels and put into the
top left corner of a black square, its mask likewise into a square of void; so they can be held and batched.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ddp_trainer.data import DataConfig
from ddp_trainer.data.arrays import VOID, Datasets, FileData
from ddp_trainer.data.files import fetch, readable, require_files
from ddp_trainer.errors import UserError
from ddp_trainer.torchvision_compat import import_torchvision

FOLDER = "VOCdevkit/VOC2012"
LISTS = ("ImageSets/Segmentation/train.txt", "ImageSets/Segmentation/val.txt")
NUM_CLASSES = 21
# Of ImageNet's photographs, the customary choice; in units of pixel values.
MEAN = (123.675, 116.28, 103.53)
STD = (58.395, 57.12, 57.375)


class VocReader:
    """One list of photographs, decoded and fitted into squares; torchvision's dataset says which files they are."""

    def __init__(self, dataset: Any, size: int) -> None:
        # Paths only: the dataset holds the module that declares torchvision's operators, which can't be pickled.
        self.images: list[str] = list(dataset.images)
        self.masks: list[str] = list(dataset.masks)
        self.size = size

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Image, uint8 (3, size, size), and mask, uint8 (size, size); raises :class:`UserError` at a damaged file."""
        from PIL import Image

        with readable("VOC 2012", Path(self.images[index]), "unpack VOCtrainval_11-May-2012.tar"):
            with Image.open(self.images[index]) as opened:
                photograph = opened.convert("RGB")
            with Image.open(self.masks[index]) as mask:
                if mask.mode != "P" or mask.size != photograph.size:
                    raise UserError(
                        "data.dir",
                        f"{self.masks[index]} has mode {mask.mode} and size {mask.size}, its photograph "
                        f"{photograph.size}",
                        "give a palette PNG of the photograph's size",
                    )
                mask.load()
                scale = self.size / max(photograph.size)
                width, height = (max(1, min(self.size, round(side * scale))) for side in photograph.size)
                small = mask.resize((width, height), Image.Resampling.NEAREST)
        image = torch.zeros(3, self.size, self.size, dtype=torch.uint8)
        pixels = np.array(photograph.resize((width, height), Image.Resampling.BILINEAR))
        image[:, :height, :width] = torch.from_numpy(pixels).permute(2, 0, 1)
        classes = torch.full((self.size, self.size), VOID, dtype=torch.uint8)
        classes[:height, :width] = torch.from_numpy(np.array(small))
        return image, classes


def download(config: DataConfig) -> None:
    """Fetch and unpack the archive into ``config.dir``, unless its lists are there already."""
    fetch("VOC 2012", Path(config.dir), [f"{FOLDER}/{name}" for name in LISTS], "VOCSegmentation", year="2012")


def load(config: DataConfig) -> Datasets:
    """Open VOC 2012 below ``config.dir`` by torchvision's dataset, which finds the files of the two lists.

    Raises :class:`UserError` naming the folder and the files expected in it.
    """
    folder = Path(config.dir) / FOLDER
    remedy = f"unpack VOCtrainval_11-May-2012.tar into {Path(config.dir).resolve()} (it holds {FOLDER}/)"
    require_files("VOC 2012", folder, LISTS, remedy)
    import_torchvision()
    from torchvision.datasets import VOCSegmentation

    parts = []
    for split in ("train", "val"):
        with readable("VOC 2012", folder, remedy):
            reader = VocReader(VOCSegmentation(config.dir, year="2012", image_set=split), config.image_size)
        named = [str(Path(path).relative_to(folder)) for path in [*reader.images, *reader.masks]]
        require_files("VOC 2012", folder, named, remedy)
        parts.append(FileData(reader, (3, config.image_size, config.image_size), masks=True))
    return Datasets(parts[0], parts[1], num_classes=NUM_CLASSES, mean=MEAN, std=STD)

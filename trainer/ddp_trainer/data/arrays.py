"""Datasets: images held whole in memory as uint8, or a reader that decodes them one by one."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ddp_trainer.errors import require

# In masks: pixels that count neither in the loss nor in the scores.
VOID = 255


class Reader(Protocol):
    """A dataset on disk. Worker processes get a copy, so it must be picklable."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """One image, uint8 (C, H, W), and its class, int64 (), or its mask, uint8 (H, W); always of the same shape."""
        ...


@dataclass(frozen=True)
class ImageData:
    """Images, uint8 of shape (N, C, H, W), and what they show.

    ``labels`` are class numbers, int64 of shape (N,), or masks with a class number a pixel, uint8 of shape (N, H, W),
    where 255 is void. Decoding has happened, and a batch is a gather.
    """

    images: Tensor
    labels: Tensor

    def __post_init__(self) -> None:
        require(
            self.images.dtype == torch.uint8 and self.images.ndim == 4,
            "data",
            f"images are {self.images.dtype} of shape {tuple(self.images.shape)}",
            "give uint8 of shape (N, C, H, W)",
        )
        masks = self.labels.ndim == 3
        expected = (len(self.images), *self.images.shape[2:]) if masks else self.images.shape[:1]
        kind = torch.uint8 if masks else torch.int64
        require(
            self.labels.dtype == kind and self.labels.shape == expected,
            "data",
            f"labels are {self.labels.dtype} of shape {tuple(self.labels.shape)} for {len(self.images)} images",
            "give int64 of shape (N,), or masks: uint8 of shape (N, H, W)",
        )

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Channels, height, width."""
        channels, height, width = self.images.shape[1:]
        return channels, height, width

    @property
    def masks(self) -> bool:
        """Whether there is a class a pixel instead of one an image."""
        return self.labels.ndim == 3

    @property
    def nbytes(self) -> int:
        """Memory of images and labels."""
        return self.images.nbytes + self.labels.nbytes


@dataclass(frozen=True)
class FileData:
    """Images that are read from disk when they are needed, all of the shape (C, H, W) ``image_shape``."""

    reader: Reader
    image_shape: tuple[int, int, int]
    masks: bool = False

    def __len__(self) -> int:
        return len(self.reader)

    @property
    def nbytes(self) -> int:
        """Memory that images and labels would need."""
        channels, height, width = self.image_shape
        return len(self) * (height * width * (channels + 1) if self.masks else channels * height * width + 8)

    def read_all(self, threads: int) -> ImageData:
        """Everything, read by ``threads`` threads at a time: decoders let go of the interpreter's lock.

        Each thread puts what it has read into its place, so that no more than one sample a thread is held beside it.
        """
        channels, height, width = self.image_shape
        images = torch.empty((len(self), channels, height, width), dtype=torch.uint8)
        labels = torch.empty((len(self), height, width), dtype=torch.uint8)
        if not self.masks:
            labels = torch.empty(len(self), dtype=torch.int64)

        def read(index: int) -> None:
            image, label = self.reader[index]
            require(
                image.shape == self.image_shape and label.shape == labels.shape[1:],
                "data",
                f"sample {index} has an image of shape {tuple(image.shape)} and a label of {tuple(label.shape)}",
                f"give every image the shape {self.image_shape}",
            )
            images[index], labels[index] = image, label

        with ThreadPoolExecutor(threads) as pool:
            for _ in pool.map(read, range(len(self))):
                pass
        return ImageData(images, labels)


@dataclass(frozen=True)
class Datasets:
    """Training and validation data with what the model and the normalisation must know of them.

    ``mean`` and ``std`` are in units of the raw pixel values, one number for all channels or one a channel.
    """

    train: ImageData | FileData
    validation: ImageData | FileData
    num_classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __post_init__(self) -> None:
        require(
            len(self.train) > 0 and len(self.validation) > 0,
            "data",
            f"{len(self.train)} training and {len(self.validation)} validation samples",
            "give at least one of each",
        )
        train, validation = self.train, self.validation
        require(
            train.image_shape == validation.image_shape and train.masks == validation.masks,
            "data",
            f"training images are {train.image_shape}, validation images {validation.image_shape}",
            "give both the same shape, and masks to both or to none",
        )
        for values in (self.mean, self.std):
            require(
                len(values) in (1, self.in_channels),
                "data",
                f"{len(values)} means or deviations for {self.in_channels} channels",
                "give one number, or one a channel",
            )
        check_labels("training", train, self.num_classes)
        check_labels("validation", validation, self.num_classes)

    @property
    def in_channels(self) -> int:
        """Channels of an image."""
        return self.train.image_shape[0]


def check_labels(name: str, data: ImageData | FileData, num_classes: int) -> None:
    """Refuse labels beyond the classes; those on disk are not known yet."""
    if isinstance(data, FileData):
        return
    labels = data.labels
    if data.masks:
        labels = torch.bincount(labels.flatten(), minlength=256)[:VOID].nonzero()
        if not len(labels):
            return
    low, high = int(labels.min()), int(labels.max())
    require(
        low >= 0 and high < num_classes,
        "data",
        f"{name} labels run from {low} to {high} with {num_classes} classes",
        "number the classes from 0 to num_classes - 1",
    )

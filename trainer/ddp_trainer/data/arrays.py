"""Datasets: images held whole in memory as uint8, a reader that decodes them one by one, or torch's of anything."""

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import Dataset, IterableDataset, default_collate

from ddp_trainer.errors import UserError, require

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


def count_samples(tree: Any) -> int:
    """How many samples a batch of tensors has, nested as they may be; raises :class:`UserError` if they differ."""
    counts = {len(leaf) if leaf.ndim else 0 for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)}
    require(
        len(counts) == 1 and 0 not in counts,
        "data",
        f"the tensors of a batch have {', '.join(map(str, sorted(counts))) or 'no'} samples",
        "give inputs and targets as tensors of which the first dimension is the batch",
    )
    return counts.pop()


@dataclass(frozen=True)
class Datasets:
    """Training and validation data with what the model and the normalisation must know of them.

    Both are images (:class:`ImageData`, :class:`FileData`), or torch's datasets, of samples ``(input, target)``: each a
    number, an array, a tensor of any type, or tuples and dictionaries of those. ``collate`` makes a batch of a list of
    samples. Of an :class:`~torch.utils.data.IterableDataset` the length is that of one epoch over all ranks.

    ``num_classes`` may be left out where the task is not classification. ``mean`` and ``std`` are in units of the raw
    pixel values, one number for all channels or one a channel; torch's datasets may go without, and are then given to
    the model as they are.
    """

    train: ImageData | FileData | Dataset[Any]
    validation: ImageData | FileData | Dataset[Any]
    num_classes: int = 0
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    collate: Callable[[list[Any]], Any] = default_collate

    def __post_init__(self) -> None:
        for name, data in (("training", self.train), ("validation", self.validation)):
            kind = type(data).__name__
            require(
                isinstance(data, ImageData | FileData | IterableDataset) or hasattr(data, "__getitem__"),
                "data",
                f"the {name} data are {kind}, which has no __getitem__",
                "give a torch.utils.data.Dataset",
            )
            require(
                hasattr(data, "__len__"),
                "data",
                f"the {name} data, {kind}, have no __len__",
                "give them one: the samples of an epoch over all ranks",
            )
        counts = [len(self.train), len(self.validation)]  # type: ignore[arg-type]
        require(
            min(counts) > 0,
            "data",
            f"{counts[0]} training and {counts[1]} validation samples",
            "give at least one of each",
        )
        train, validation = self.train, self.validation
        if isinstance(train, ImageData | FileData):
            require(
                isinstance(validation, ImageData | FileData)
                and train.image_shape == validation.image_shape
                and train.masks == validation.masks,
                "data",
                f"training images are {train.image_shape}, validation data "
                f"{getattr(validation, 'image_shape', type(validation).__name__)}",
                "give both the same shape, and masks to both or to none",
            )
            check_labels("training", train, self.num_classes)
            check_labels("validation", validation, self.num_classes)
        for values in (self.mean, self.std) if self.holds_images or self.mean or self.std else ():
            require(
                len(values) in (1, self.in_channels),
                "data",
                f"{len(values)} means or deviations for {self.in_channels} channels",
                "give one number, or one a channel",
            )

    @property
    def holds_images(self) -> bool:
        """Whether the trainer itself holds, augments and batches the samples, which are images."""
        return isinstance(self.train, ImageData | FileData)

    @property
    def masks(self) -> bool:
        """Whether there is a class a pixel instead of one an image."""
        return isinstance(self.train, ImageData | FileData) and self.train.masks

    @property
    def in_channels(self) -> int:
        """Channels of an image; else the first dimension of a sample's input, or 0 where it is no tensor of any."""
        if isinstance(self.train, ImageData | FileData):
            return self.train.image_shape[0]
        inputs, _ = self.first_batch
        return inputs.shape[1] if isinstance(inputs, Tensor) and inputs.ndim > 1 else 0

    @functools.cached_property
    def first_batch(self) -> tuple[Any, Any]:
        """The first training sample as a batch of one: black where the trainer holds images, which are on disk yet.

        Raises :class:`UserError` where it is no pair of an input and a target.
        """
        train = self.train
        if isinstance(train, ImageData | FileData):
            channels, height, width = train.image_shape
            label = torch.zeros((1, height, width) if train.masks else (1,), dtype=torch.int64)
            return torch.zeros(1, channels, height, width), label
        sample = next(iter(train), None) if isinstance(train, IterableDataset) else train[0]
        batch = self.collate([sample])
        if not (isinstance(batch, list | tuple) and len(batch) == 2):
            raise UserError("data", f"a sample is {type(sample).__name__} {sample!r:.80}", "give pairs (input, target)")
        count_samples(batch)
        return batch[0], batch[1]


def check_labels(name: str, data: object, num_classes: int) -> None:
    """Refuse labels beyond the classes; those on disk are not known yet."""
    if not isinstance(data, ImageData):
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

"""Datasets: uint8 images in memory, a reader that decodes images one by one, or any torch dataset."""

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import Dataset, IterableDataset, default_collate

from ddp_sdk.errors import UserError, require

# The value of void pixels in masks: neither the loss nor the metrics count them.
VOID = 255


class ImageReader(Protocol):
    """A dataset on disk. Worker processes get a copy, so it must be picklable."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Return an image, uint8 (C, H, W), and its class, int64 (), or mask, uint8 (H, W); always of one shape."""
        ...


@dataclass(frozen=True)
class ImageData:
    """Decoded images, uint8 of shape (N, C, H, W), and their labels.

    ``labels`` are class numbers, int64 of shape (N,), or masks with a class number per pixel, uint8 of shape (N, H, W),
    in which 255 is void.
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

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Return an image and its label."""
        return self.images[index], self.labels[index]

    @property
    def image_shape(self) -> tuple[int, int, int]:
        channels, height, width = self.images.shape[1:]
        return channels, height, width

    @property
    def masks(self) -> bool:
        """Return whether the labels are masks, with a class per pixel."""
        return self.labels.ndim == 3

    @property
    def nbytes(self) -> int:
        return self.images.nbytes + self.labels.nbytes


@dataclass(frozen=True)
class FileData:
    """Images that are read from disk on demand, all of the shape (C, H, W) ``image_shape``."""

    reader: ImageReader
    image_shape: tuple[int, int, int]
    masks: bool = False

    def __len__(self) -> int:
        return len(self.reader)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Read an image and its label."""
        return self.reader[index]

    @property
    def nbytes(self) -> int:
        """Return the bytes that images and labels would need in memory."""
        channels, height, width = self.image_shape
        pixels = height * width
        label_bytes = pixels if self.masks else 8
        return len(self) * (channels * pixels + label_bytes)

    def read_all(self, threads: int) -> ImageData:
        """Read all samples by ``threads`` threads: decoders release the interpreter's lock.

        Each thread writes into the result, so that at most one sample per thread needs additional memory.
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
            images[index] = image
            labels[index] = label

        with ThreadPoolExecutor(threads) as pool:
            for _ in pool.map(read, range(len(self))):
                pass
        return ImageData(images, labels)


def count_samples(tree: Any) -> int:
    """Return the number of samples of a batch, a tree of tensors; raises :class:`UserError` if tensors differ."""
    counts = {len(leaf) if leaf.ndim else 0 for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)}
    require(
        len(counts) == 1 and 0 not in counts,
        "data",
        f"the tensors of a batch have {', '.join(map(str, sorted(counts))) or 'no'} samples",
        "give inputs and targets as tensors whose first dimension is the batch",
    )
    return counts.pop()


@dataclass(frozen=True)
class Datasets:
    """Training and validation data, and the properties that the model and the normalization need.

    Both are images (:class:`ImageData`, :class:`FileData`), or torch datasets of samples ``(input, target)``: each a
    number, an array, a tensor of any type, or tuples and dictionaries of those. ``collate`` builds a batch from a list
    of samples.

    ``num_classes`` is needed for classification only. ``mean`` and ``std`` are in units of raw pixel values, one number
    for all channels or one per channel. Torch datasets without them are passed to the model unchanged.
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
                not isinstance(data, IterableDataset),
                "data",
                f"the {name} data are {kind}, an iterable dataset",
                "give a torch.utils.data.Dataset with __getitem__, or train in a script of your own",
            )
            for method in ("__getitem__", "__len__"):
                require(
                    isinstance(data, ImageData | FileData) or hasattr(data, method),
                    "data",
                    f"the {name} data are {kind}, which has no {method}",
                    "give a torch.utils.data.Dataset",
                )
        counts = [len(self.train), len(self.validation)]  # type: ignore[arg-type]
        require(
            min(counts) > 0,
            "data",
            f"{counts[0]} training and {counts[1]} validation samples",
            "give at least one of each",
        )
        train = self.train
        validation = self.validation
        if isinstance(train, ImageData | FileData):
            require(
                isinstance(validation, ImageData | FileData)
                and train.image_shape == validation.image_shape
                and train.masks == validation.masks,
                "data",
                f"training images are {train.image_shape}, validation data "
                f"{getattr(validation, 'image_shape', type(validation).__name__)}",
                "give both the same shape, and masks for both or neither",
            )
            check_labels("training", train, self.num_classes)
            check_labels("validation", validation, self.num_classes)
        if not (self.holds_images or self.mean or self.std):
            return
        for values in (self.mean, self.std):
            require(
                len(values) in (1, self.in_channels),
                "data",
                f"{len(values)} means or deviations for {self.in_channels} channels",
                "give one number, or one per channel",
            )

    @property
    def holds_images(self) -> bool:
        """Return whether the trainer holds, augments and batches the samples, which are images."""
        return isinstance(self.train, ImageData | FileData)

    @property
    def masks(self) -> bool:
        """Return whether the labels are masks, with a class per pixel."""
        return isinstance(self.train, ImageData | FileData) and self.train.masks

    @property
    def in_channels(self) -> int:
        """Return the channels of an image, or the first dimension of a sample's input; 0 if it has none."""
        if isinstance(self.train, ImageData | FileData):
            return self.train.image_shape[0]
        inputs, _ = self.first_batch
        return inputs.shape[1] if isinstance(inputs, Tensor) and inputs.ndim > 1 else 0

    @functools.cached_property
    def first_batch(self) -> tuple[Any, Any]:
        """Return the first training sample as a batch of one; a black image if the trainer holds the images.

        Raises :class:`UserError` if the sample is not a pair of an input and a target.
        """
        train = self.train
        if isinstance(train, ImageData | FileData):
            channels, height, width = train.image_shape
            label = torch.zeros((1, height, width) if train.masks else (1,), dtype=torch.int64)
            return torch.zeros(1, channels, height, width), label
        sample = train[0]
        batch = self.collate([sample])
        if not (isinstance(batch, list | tuple) and len(batch) == 2):
            raise UserError("data", f"a sample is {type(sample).__name__} {sample!r:.80}", "give pairs (input, target)")
        count_samples(batch)
        return batch[0], batch[1]


def check_labels(name: str, data: object, num_classes: int) -> None:
    """Raise :class:`UserError` for labels beyond the number of classes; labels on disk are checked when read."""
    if not isinstance(data, ImageData):
        return
    labels = data.labels
    if data.masks:
        labels = torch.bincount(labels.flatten(), minlength=256)[:VOID].nonzero()
        if not len(labels):
            return
    low = int(labels.min())
    high = int(labels.max())
    require(
        low >= 0 and high < num_classes,
        "data",
        f"{name} labels run from {low} to {high} with {num_classes} classes",
        "number the classes from 0 to num_classes - 1",
    )

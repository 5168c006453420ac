"""Sources of batches: a cache on the computing device, or a reader that works ahead of the training step."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset, default_collate

from ddp_trainer.data import DataConfig
from ddp_trainer.data.arrays import Datasets, FileData, ImageData, check_labels, count_samples
from ddp_trainer.data.augment import Augmentation
from ddp_trainer.data.reader import MappedSamples, Reader
from ddp_trainer.machine import available_cpus, available_memory

# Share of the free memory for data; the rest is for the model, its activations and other processes.
_SHARE = 0.4
# Memory on a GPU for batches that are built together.
_MAX_GROUP_BYTES = 64 * 2**20


@dataclass(frozen=True)
class Place:
    """The rank that consumes the batches, its device and image layout; ``processes`` share the host's memory."""

    rank: int
    world_size: int
    device: torch.device
    memory_format: torch.memory_format = torch.contiguous_format
    processes: int = 1


@dataclass(frozen=True)
class Batch:
    """The model's inputs and the targets, on the device.

    For images these are float32 (B, C, H, W), normalized, and labels, int64 (B,), or (B, H, W) from masks; otherwise
    the tensors, or trees of tensors, of the dataset.
    """

    inputs: Any
    targets: Any

    def __len__(self) -> int:
        return len(self.targets) if isinstance(self.targets, Tensor) else count_samples(self.targets)


class Normalize:
    """Map raw pixel values to the network's input: (x - mean) / std as one multiplication and one addition."""

    def __init__(self, datasets: Datasets, device: torch.device, memory_format: torch.memory_format) -> None:
        mean = torch.tensor(datasets.mean, device=device).view(1, -1, 1, 1)
        std = torch.tensor(datasets.std, device=device).view(1, -1, 1, 1)
        self.scale = 1.0 / std
        self.shift = -mean / std
        self.memory_format = memory_format

    def __call__(self, images: Tensor) -> Tensor:
        """Normalize uint8 or float32 images, which may be overwritten; the result is float32."""
        images = images.to(torch.float32, memory_format=self.memory_format)
        return images.mul_(self.scale).add_(self.shift)


class Form:
    """Builds batches from the output of torch datasets: normalized if the datasets have a mean, otherwise unchanged."""

    def __init__(self, datasets: Datasets, device: torch.device, memory_format: torch.memory_format) -> None:
        self._normalize = Normalize(datasets, device, memory_format) if datasets.mean else None
        self._memory_format = memory_format

    def __call__(self, inputs: Any, targets: Any, draws: Tensor | None = None) -> Batch:
        """Build the batch; raises :class:`UserError` if its tensors have different numbers of samples."""
        count_samples((inputs, targets))
        if self._normalize is not None:
            inputs = self._normalize(inputs)
        elif isinstance(inputs, Tensor) and inputs.ndim == 4:
            inputs = inputs.contiguous(memory_format=self._memory_format)
        return Batch(inputs, targets)


@dataclass(frozen=True)
class ImageForm:
    """Builds batches of images that the trainer holds: augmented by random numbers, and normalized."""

    augmentation: Augmentation
    normalize: Normalize

    def __call__(self, images: Tensor, labels: Tensor, draws: Tensor | None = None) -> Batch:
        """Build the batch of raw images and labels."""
        images, labels = self.augmentation.batch(images, labels, draws)
        return Batch(self.normalize(images), labels)


class CachedSource:
    """All images are on the device; a batch is a gather there, without transfers during training."""

    prefetched = 0

    def __init__(self, data: ImageData, form: ImageForm, device: torch.device) -> None:
        self.form = form
        self.device = device
        self.cache = data.images.to(device)
        self.labels = data.labels.to(device)
        # Batches that are built together: on a GPU this needs no more launches than one batch.
        self.group_size = 1 if device.type == "cpu" else 16
        self._image_bytes = data.images[0].numel() * 4

    def batches(self, order: Tensor, draws: NDArray[np.float32] | None, size: int, key: int = 0) -> Iterator[Batch]:
        """Yield the samples ``order`` in batches of ``size``, augmented by the rows of ``draws`` if set.

        Order and random numbers are copied to the device before the first batch.
        """
        order = order.to(self.device)
        numbers = None if draws is None else torch.from_numpy(draws).to(self.device)
        group_size = max(1, min(self.group_size, _MAX_GROUP_BYTES // (size * self._image_bytes)))
        for start in range(0, len(order), size * group_size):
            rows = slice(start, start + size * group_size)
            chosen = order[rows]
            group = self.form(self.cache[chosen], self.labels[chosen], None if numbers is None else numbers[rows])
            if len(group) <= size:
                yield group
            else:
                yield from map(Batch, torch.split(group.inputs, size), torch.split(group.targets, size))


class ReadSource:
    """Samples that worker processes read ahead. ``form`` builds the batch on the device.

    The random numbers that a torch dataset draws for a sample depend only on the key of the epoch and the index.
    """

    def __init__(
        self,
        samples: MappedSamples,
        form: Callable[..., Batch],
        device: torch.device,
        workers: int,
    ) -> None:
        self.device = device
        self._form = form
        self._reader = Reader(samples, device, workers)
        self.prefetched = self._reader.prefetched

    def batches(self, order: Tensor, draws: NDArray[np.float32] | None, size: int, key: int = 0) -> Iterator[Batch]:
        """See :meth:`CachedSource.batches`; ``key`` seeds the random numbers of a sample."""
        keyed_indices = [(key, index) for index in order.tolist()]
        parts = [keyed_indices[start : start + size] for start in range(0, len(keyed_indices), size)]
        numbers = None if draws is None else torch.from_numpy(draws).to(self.device)
        for number, raw in enumerate(self._reader.read(parts)):
            rows = None if numbers is None else numbers[number * size : (number + 1) * size]
            yield self._form(*self._reader.send(raw), rows)


Source = CachedSource | ReadSource


def build_source(
    data: ImageData | FileData | Dataset[Any],
    datasets: Datasets,
    config: DataConfig,
    augmentation: Augmentation,
    place: Place,
) -> Source:
    """Build the source of batches from ``data``; images are held in memory where they fit, and if configured."""
    device = place.device
    if not isinstance(data, ImageData | FileData):
        form = Form(datasets, device, place.memory_format)
        return ReadSource(MappedSamples(data, datasets.collate), form, device, config.workers)
    images = ImageForm(augmentation, Normalize(datasets, device, place.memory_format))
    cache = choose_cache(data, device, place.processes) if config.cache == "auto" else "none"
    if cache != "none" and isinstance(data, FileData):
        data = data.read_all(threads=max(1, available_cpus() // place.processes))
        check_labels("the", data, datasets.num_classes)
    if isinstance(data, ImageData) and (cache == "device" or (cache == "host" and device.type == "cpu")):
        return CachedSource(data, images, device)
    return ReadSource(MappedSamples(data, default_collate), images, device, config.workers)


def choose_cache(data: ImageData | FileData, device: torch.device, processes: int) -> str:
    """Return ``device``, ``host`` or ``none``: the first of these memories in which ``data`` fit."""
    if not isinstance(data, ImageData) and data.nbytes > available_memory() * _SHARE / processes:
        return "none"
    if device.type != "cpu" and data.nbytes > torch.cuda.mem_get_info(device)[0] * _SHARE:
        return "host"
    return "device"

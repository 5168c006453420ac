"""Where batches come from: a cache on the computing device, or a reader that works ahead of the training step."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._pytree import tree_map_only
from torch.utils.data import Dataset

from ddp_trainer.data import DataConfig
from ddp_trainer.data.arrays import Datasets, FileData, ImageData, check_labels, count_samples
from ddp_trainer.data.augment import Augmentation
from ddp_trainer.data.reader import Reader, Unreadable
from ddp_trainer.data.torch_datasets import MappedSamples
from ddp_trainer.errors import UserError
from ddp_trainer.machine import available_cpus, available_memory

# Share of the free memory that data may take; the rest is the model's, the activations' and the other processes'.
_SHARE = 0.4
# Memory on a GPU for batches that are made together.
_AT_ONCE_BYTES = 64 * 2**20


@dataclass(frozen=True)
class Place:
    """For whom batches are made: a rank of so many, its device and layout of images; ``processes`` share the memory."""

    rank: int
    world_size: int
    device: torch.device
    memory_format: torch.memory_format = torch.contiguous_format
    processes: int = 1


@dataclass(frozen=True)
class Batch:
    """What the model is given and what it should answer, on the device.

    Of images that is float32 (B, C, H, W), normalised, and their labels, int64 (B,), or (B, H, W) from masks; else what
    the data give, tensors or trees of them.
    """

    inputs: Any
    targets: Any

    def __len__(self) -> int:
        return len(self.targets) if isinstance(self.targets, Tensor) else count_samples(self.targets)

    def split(self, size: int) -> "list[Batch]":
        """Parts of ``size`` samples; the last may be smaller."""

        def part(start: int) -> Batch:
            both = self.inputs, self.targets
            return Batch(*tree_map_only(Tensor, lambda tensor: tensor[start : start + size], both))

        return [part(start) for start in range(0, len(self), size)]


class Replayed(Batch):
    """Stands for a batch that a recorded step makes for itself: it has a length, and nothing in it."""

    @classmethod
    def of(cls, count: int) -> Self:
        """One of ``count`` samples."""
        nothing = torch.empty(count, 0)
        return cls(nothing, nothing)


class Normalise:
    """From raw pixel values to the network's input: (x - mean) / std as one multiplication and one addition."""

    def __init__(self, datasets: Datasets, device: torch.device, memory_format: torch.memory_format) -> None:
        mean = torch.tensor(datasets.mean, device=device).view(1, -1, 1, 1)
        std = torch.tensor(datasets.std, device=device).view(1, -1, 1, 1)
        self.scale, self.shift, self.memory_format = 1.0 / std, -mean / std, memory_format

    def __call__(self, images: Tensor) -> Tensor:
        """Takes uint8 or float32, which may be overwritten; gives float32."""
        images = images.to(torch.float32, memory_format=self.memory_format)
        return images.mul_(self.scale).add_(self.shift)


class Form:
    """Makes batches of what torch datasets give: normalised where there is a mean, else as it is."""

    def __init__(self, datasets: Datasets, device: torch.device, memory_format: torch.memory_format) -> None:
        self._normalise = Normalise(datasets, device, memory_format) if datasets.mean else None
        self._memory_format = memory_format

    def __call__(self, inputs: Any, targets: Any) -> Batch:
        """The batch; raises :class:`UserError` where its tensors differ in their number of samples."""
        count_samples((inputs, targets))
        if self._normalise is not None:
            inputs = self._normalise(inputs)
        elif isinstance(inputs, Tensor) and inputs.ndim == 4:
            inputs = inputs.contiguous(memory_format=self._memory_format)
        return Batch(inputs, targets)


class CachedSource:
    """Everything is on the device; a batch is a gather there, and nothing is sent while training.

    ``replayed``, where given, says of a batch's length whether a recorded step makes it, from :meth:`at_cursor`: there
    is a :class:`Replayed` in its place.
    """

    def __init__(self, data: ImageData, augmentation: Augmentation, normalise: Normalise, device: torch.device) -> None:
        self.augmentation, self.normalise, self.device = augmentation, normalise, device
        self.cache = augmentation.prepare(data.images).to(device)
        self.labels = data.labels.to(device)
        # Batches that are made together: on a GPU that takes as many launches as one.
        self.at_once = 1 if device.type == "cpu" else 16
        self._image_bytes = data.images[0].numel() * 4
        self.replayed: Callable[[int], bool] | None = None

    def record(self, replayed: Callable[[int], bool]) -> None:
        """Keep what an epoch is made of in one place, where a recorded step finds it; batches are made one by one."""
        self.replayed, self.at_once = replayed, 1
        self.cursor = torch.zeros((), dtype=torch.int64, device=self.device)
        self._order = torch.zeros(len(self.labels), dtype=torch.int64, device=self.device)
        self._numbers = torch.zeros(len(self.labels), self.augmentation.draws, device=self.device)

    def batches(self, order: Tensor, draws: NDArray[np.float32] | None, size: int, key: int = 0) -> Iterator[Batch]:
        """The samples ``order`` in batches of ``size``, augmented by the rows of ``draws``, or not at all.

        What a batch needs is on the device before the first one.
        """
        order = order.to(self.device)
        numbers = None if draws is None else torch.from_numpy(draws).to(self.device)
        if self.replayed is not None:
            self._order[: len(order)] = order
            if numbers is not None:
                self._numbers[: len(order)] = numbers
        start, at_once = 0, max(1, min(self.at_once, _AT_ONCE_BYTES // (size * self._image_bytes)))
        while start < len(order):
            count = min(size, len(order) - start)
            if self.replayed is not None and self.replayed(count):
                self.cursor.fill_(start)
                yield Replayed.of(count)
            else:
                count = min(size * at_once, len(order) - start)
                rows = slice(start, start + count)
                together = self._make(order[rows], None if numbers is None else numbers[rows])
                if count <= size:
                    yield together
                else:
                    parts = torch.split(together.inputs, size), torch.split(together.targets, size)
                    yield from map(Batch, *parts)
            start += count

    def at_cursor(self, size: int) -> Batch:
        """The batch of ``size`` samples that begins at ``cursor``, of which the host need not know."""
        rows = self.cursor + torch.arange(size, device=self.device)
        return self._make(self._order[rows], self._numbers[rows] if self.augmentation.active else None)

    def _make(self, indices: Tensor, draws: Tensor | None) -> Batch:
        images, labels = self.augmentation.batch(self.cache, self.labels, indices, draws)
        return Batch(self.normalise(images), labels)


class _Samples:
    """A dataset for DataLoader that is asked for whole batches of indices."""

    def __init__(self, data: ImageData | FileData) -> None:
        self.data = data

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor] | Unreadable:
        """Raw images and labels, stacked; :class:`Unreadable` where the reader raises a :class:`UserError`."""
        try:
            return self._read(indices)
        except UserError as error:
            return Unreadable.of(error)

    def _read(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        if isinstance(self.data, ImageData):
            chosen = torch.tensor(indices)
            return self.data.images[chosen], self.data.labels[chosen]
        images, labels = zip(*(self.data.reader[index] for index in indices), strict=True)
        return torch.stack(images), torch.stack(labels)


class StreamedSource:
    """Samples are read by worker processes ahead of time and augmented on the device."""

    def __init__(
        self,
        data: ImageData | FileData,
        augmentation: Augmentation,
        normalise: Normalise,
        device: torch.device,
        workers: int,
    ) -> None:
        self.augmentation, self.normalise, self.device = augmentation, normalise, device
        self._reader = Reader(_Samples(data), device, workers)  # type: ignore[arg-type]
        self.prefetched = self._reader.prefetched

    def batches(self, order: Tensor, draws: NDArray[np.float32] | None, size: int, key: int = 0) -> Iterator[Batch]:
        """See :meth:`CachedSource.batches`."""
        parts = [part.tolist() for part in torch.split(order, size)] if len(order) else []
        numbers = None if draws is None else torch.from_numpy(draws).to(self.device)
        start = 0
        for raw in self._reader.read(parts):
            images, labels = self._reader.send(raw)
            stop = start + len(labels)
            part = None if numbers is None else numbers[start:stop]
            start = stop
            whole = torch.arange(len(labels), device=self.device)
            images, labels = self.augmentation.batch(self.augmentation.prepare(images), labels, whole, part)
            yield Batch(self.normalise(images), labels)


class MappedSource:
    """Samples of a torch dataset, by worker processes; what is random in them depends on key and index alone."""

    def __init__(self, datasets: Datasets, data: Dataset[Any], form: Form, device: torch.device, workers: int) -> None:
        self._form, self._reader = form, Reader(MappedSamples(data, datasets.collate), device, workers)
        self.prefetched = self._reader.prefetched

    def batches(self, order: Tensor, draws: NDArray[np.float32] | None, size: int, key: int = 0) -> Iterator[Batch]:
        """The samples ``order`` in batches of ``size``; ``key`` seeds what a sample draws."""
        parts = [[(key, index) for index in part.tolist()] for part in torch.split(order, size)] if len(order) else []
        for raw in self._reader.read(parts):
            yield self._form(*self._reader.send(raw))


Source = CachedSource | StreamedSource | MappedSource


def build_source(
    data: ImageData | FileData | Dataset[Any],
    datasets: Datasets,
    config: DataConfig,
    augmentation: Augmentation,
    place: Place,
) -> Source:
    """A source of batches from ``data``, held where ``config.cache`` says, or as near to the device as it fits.

    Raises :class:`UserError` where the data do not fit where they must.
    """
    device = place.device
    if not isinstance(data, ImageData | FileData):
        return MappedSource(datasets, data, Form(datasets, device, place.memory_format), device, config.workers)
    normalise = Normalise(datasets, device, place.memory_format)
    where = choose(data, config.cache, device, place.processes)
    if where != "none" and isinstance(data, FileData):
        data = data.read_all(threads=max(1, available_cpus() // place.processes))
        check_labels("the", data, datasets.num_classes)
    if isinstance(data, ImageData) and (where == "device" or (where == "host" and device.type == "cpu")):
        return CachedSource(data, augmentation, normalise, device)
    return StreamedSource(data, augmentation, normalise, device, config.workers)


def choose(data: ImageData | FileData, cache: str, device: torch.device, processes: int) -> str:
    """``device``, ``host`` or ``none``: as asked, or, for ``auto``, the first of these where the data fit.

    Raises :class:`UserError` where they do not fit where they must.
    """
    if cache == "none":
        return cache
    host_room = available_memory() * _SHARE / processes
    in_host = isinstance(data, ImageData) or data.nbytes <= host_room
    gpu_room = torch.cuda.mem_get_info(device)[0] * _SHARE if device.type == "cuda" else 0.0
    in_device = in_host if device.type == "cpu" else in_host and data.nbytes <= gpu_room
    fits = {"device": in_device, "host": in_host, "auto": True}[cache]
    if not fits:
        raise UserError(
            "data.cache",
            f"{data.nbytes / 2**20:.0f} MiB of decoded images don't fit into {_SHARE:.0%} of the free memory, "
            f"{host_room / 2**20:.0f} MiB a process here"
            + (f", {gpu_room / 2**20:.0f} MiB on the GPU" if gpu_room else ""),
            "give --data-cache auto or none",
        )
    if cache != "auto":
        return cache
    return "device" if in_device else "host" if in_host else "none"

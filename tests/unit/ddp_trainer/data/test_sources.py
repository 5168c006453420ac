"""The storage of images does not change the batches; free memory decides where images are stored."""

from __future__ import annotations

import multiprocessing
import os
import signal
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from ddp_sdk.errors import UserError
from ddp_trainer.data import DataConfig
from ddp_trainer.data.arrays import Datasets, FileData, ImageData
from ddp_trainer.data.augment import DRAWS, Augmentation
from ddp_trainer.data.datasets import load_datasets
from ddp_trainer.data.loader import TrainLoader, ValidationLoader
from ddp_trainer.data.sampling import uniforms
from ddp_trainer.data.sources import CachedSource, ImageForm, Normalize, Place, ReadSource, choose_cache
from ddp_trainer.machine import available_memory
from tests.support.tiny_datasets import write_voc2012

CPU = torch.device("cpu")


class ArraysAsFiles:
    """A reader of one image at a time from memory; at module level, because worker processes get a copy."""

    def __init__(self, data: ImageData) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.data.images[index], self.data.labels[index]


def from_files(datasets: Datasets) -> Datasets:
    def opened(data: ImageData | FileData) -> FileData:
        assert isinstance(data, ImageData)
        return FileData(ArraysAsFiles(data), data.image_shape, data.masks)

    return Datasets(
        opened(datasets.train), opened(datasets.validation), datasets.num_classes, datasets.mean, datasets.std
    )


def loader(datasets: Datasets, config: DataConfig, *, rank: int = 0, world: int = 1) -> TrainLoader:
    return TrainLoader(datasets, config, Place(rank, world, CPU), seed=3)


def same(one: TrainLoader, other: TrainLoader, epoch: int, consumed: int = 0) -> bool:
    pairs = list(zip(one.epoch(epoch, consumed), other.epoch(epoch, consumed), strict=True))
    return bool(pairs) and all(torch.equal(a.inputs, b.inputs) and torch.equal(a.targets, b.targets) for a, b in pairs)


AUGMENTS = [("crop",), ("crop", "flip", "rotate", "affine", "jitter"), ()]


@pytest.mark.parametrize("augment", AUGMENTS)
def test_images_read_per_batch_give_same_batches_as_cached_ones(augment: tuple[str, ...]) -> None:
    config = DataConfig(batch_size=100, augment=augment, crop_padding=1, workers=0)
    datasets = load_datasets(config)
    held = loader(datasets, config, rank=1, world=2)
    assert isinstance(held.source, CachedSource)
    for peers in (datasets, from_files(datasets)):
        read = loader(peers, DataConfig(**{**vars(config), "cache": "none"}), rank=1, world=2)
        assert isinstance(read.source, ReadSource)
        assert same(held, read, 0)
        assert same(held, read, 1, consumed=400)


def test_worker_processes_read_same_batches_for_many_epochs() -> None:
    config = DataConfig(batch_size=300, augment=("crop",), crop_padding=1, cache="none", workers=2)
    datasets = load_datasets(config)
    held = loader(datasets, DataConfig(**{**vars(config), "cache": "auto"}))
    read = loader(datasets, config)
    for epoch in range(2):
        assert same(held, read, epoch)
    # An epoch that is left in the middle does not affect the next one.
    next(iter(read.epoch(2)))
    assert same(held, read, 3)


def test_readers_survive_keyboard_interrupt() -> None:
    # SIGINT reaches the whole process group; the rank may need more batches before it stops.
    config = DataConfig(batch_size=10, augment=(), cache="none", workers=1)
    datasets = load_datasets(config)
    batches = loader(datasets, config).epoch(0)
    number = len(next(batches))
    for reader in multiprocessing.active_children():
        assert reader.pid is not None
        os.kill(reader.pid, signal.SIGINT)
    assert number + sum(len(batch) for batch in batches) == len(datasets.train)


class CountingArrays(ArraysAsFiles):
    """A dataset that records how many of its images exist at the same time."""

    def __init__(self, data: ImageData) -> None:
        super().__init__(data)
        self.held: list[weakref.ref[Tensor]] = []
        self.most = 0

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image, label = super().__getitem__(index)
        self.held = [reference for reference in self.held if reference() is not None]
        self.held.append(weakref.ref(image))
        self.most = max(self.most, len(self.held))
        return image, label


@pytest.mark.parametrize("threads", [1, 3])
def test_reading_many_files_keeps_no_second_copy(threads: int) -> None:
    data = load_datasets(DataConfig()).train
    assert isinstance(data, ImageData)
    reader = CountingArrays(data)
    read = FileData(reader, data.image_shape, data.masks).read_all(threads)
    assert torch.equal(read.images, data.images)
    assert torch.equal(read.labels, data.labels)
    assert reader.most <= 2 * threads


def test_files_are_decoded_into_memory_if_they_fit(tmp_path: Path) -> None:
    config = DataConfig(
        name="voc2012", dir=str(write_voc2012(tmp_path)), image_size=32, batch_size=3, augment=("scale", "crop", "flip")
    )
    datasets = load_datasets(config)
    held = loader(datasets, config)
    assert isinstance(held.source, CachedSource)
    read = loader(datasets, DataConfig(**{**vars(config), "cache": "none", "workers": 0}))
    assert same(held, read, 0)
    batch = next(iter(held.epoch(0)))
    assert batch.inputs.shape == (3, 3, 32, 32)
    assert (batch.targets.shape, batch.targets.dtype) == ((3, 32, 32), torch.int64)


def test_validation_images_are_augmented_only_on_request(tmp_path: Path) -> None:
    config = DataConfig(augment=("crop",), crop_padding=1, eval_batch_size=500)
    datasets = load_datasets(config)
    place = Place(0, 1, CPU)
    plain = next(iter(ValidationLoader(datasets, config, place))).inputs
    config = DataConfig(**{**vars(config), "validation_augment": True})
    validation_loader = ValidationLoader(datasets, config, place)
    moved = next(iter(validation_loader)).inputs
    assert not torch.equal(plain, moved)
    assert torch.equal(moved, next(iter(validation_loader)).inputs)
    assert 0.05 < float((plain == moved).flatten(1).all(1).float().mean()) < 0.3


def test_published_validation_pads_and_drops() -> None:
    config = DataConfig(validation_as_training=True, eval_batch_size=50)
    datasets = load_datasets(config)
    assert len(datasets.validation) == 359
    seen = []
    for rank in range(2):
        batches = ValidationLoader(datasets, config, Place(rank, 2, CPU))
        assert all(len(batch) == 50 for batch in batches)
        seen.append(len(batches.order))
        assert len(list(batches.rounds())) == 3
    assert seen == [150, 150]
    with pytest.raises(UserError, match="validation samples are less than a batch"):
        ValidationLoader(datasets, DataConfig(validation_as_training=True, eval_batch_size=200), Place(0, 2, CPU))


# Choice of the storage


def test_data_are_held_where_they_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = load_datasets(DataConfig())
    files = from_files(datasets).train
    gpu = torch.device("cuda", 0)
    room = files.nbytes / 0.4
    monkeypatch.setattr("ddp_trainer.data.sources.available_memory", lambda: room * 1.01)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (room * 0.99, room))
    assert choose_cache(files, CPU, 1) == "device"
    assert choose_cache(files, gpu, 1) == "host"
    # Two processes share the memory.
    assert choose_cache(files, CPU, 2) == choose_cache(files, gpu, 2) == "none"
    # Images in memory already fit.
    assert choose_cache(datasets.train, CPU, 2) == "device"


def test_free_memory_respects_container_limit(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 1000 kB\nMemAvailable:     600 kB\n")
    assert available_memory(meminfo, tmp_path / "none") == 600 * 1024
    (tmp_path / "memory.max").write_text("max\n")
    assert available_memory(meminfo, tmp_path) == 600 * 1024
    (tmp_path / "memory.max").write_text("300000\n")
    (tmp_path / "memory.current").write_text("100000\n")
    assert available_memory(meminfo, tmp_path) == 200_000
    (tmp_path / "memory.current").write_text("400000\n")
    assert available_memory(meminfo, tmp_path) == 0
    assert available_memory(tmp_path / "none", tmp_path / "none") == float("inf")


# Mistakes in a user's reader


def test_images_of_different_shapes_are_refused() -> None:
    datasets = load_datasets(DataConfig())
    assert isinstance(datasets.train, ImageData)
    data = FileData(ArraysAsFiles(datasets.train), (1, 9, 9))
    with pytest.raises(UserError, match=r"sample 0 has an image of shape \(1, 8, 8\)"):
        data.read_all(1)


@pytest.mark.parametrize("validation", [(1, 8, 8, False), (3, 8, 8, True)])
def test_validation_images_must_be_like_training_images(validation: tuple[int, int, int, bool]) -> None:
    channels, height, width, masks = validation
    images = torch.zeros(2, channels, height, width, dtype=torch.uint8)
    train = torch.zeros(2, 3, 8, 8, dtype=torch.uint8)
    image_data = ImageData(train, torch.zeros(2, dtype=torch.int64))
    second = ImageData(images, images[:, 0] if masks else torch.zeros(2, dtype=torch.int64))
    with pytest.raises(UserError, match="give both the same shape"):
        Datasets(image_data, second, num_classes=2, mean=(0.0,), std=(1.0,))


def test_masks_with_values_beyond_classes_and_void_are_refused() -> None:
    images = torch.zeros(2, 3, 4, 4, dtype=torch.uint8)
    masks = torch.full((2, 4, 4), 255, dtype=torch.uint8)
    masks[0, 0, 0] = 3
    data = ImageData(images, masks)
    Datasets(data, data, num_classes=4, mean=(0.0,), std=(1.0,))
    with pytest.raises(UserError, match="labels run from 3 to 3 with 3 classes"):
        Datasets(data, data, num_classes=3, mean=(0.0,), std=(1.0,))
    with pytest.raises(UserError, match="2 means or deviations for 3 channels"):
        Datasets(data, data, num_classes=4, mean=(0.0, 0.0), std=(1.0,))
    with pytest.raises(UserError, match=r"or masks: uint8"):
        ImageData(images, masks[:, :3])


def test_batches_built_together_equal_batches_built_singly() -> None:
    """The last batch of an epoch is smaller."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (23, 3, 8, 8), dtype=torch.uint8, generator=generator)
    data = ImageData(images, torch.arange(23))
    datasets = Datasets(data, data, 23, (0.5,), (0.5,))
    augmentation = Augmentation(flip=True, rotation=10.0, jitter=0.2)
    source = CachedSource(data, ImageForm(augmentation, Normalize(datasets, CPU, torch.channels_last)), CPU)
    draws = uniforms(np.arange(23), DRAWS, 1)
    made = []
    for source.group_size in (1, 3):
        made.append(list(source.batches(torch.arange(23).flip(0), draws, 4)))
    assert [len(batch) for batch in made[1]] == [4, 4, 4, 4, 4, 3]
    for alone, together in zip(*made, strict=True):
        assert torch.equal(alone.inputs, together.inputs)
        assert torch.equal(alone.targets, together.targets)
        assert together.inputs.is_contiguous(memory_format=torch.channels_last)

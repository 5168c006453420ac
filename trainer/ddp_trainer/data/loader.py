"""This rank's share of an epoch and of the validation data, in batches."""

from collections.abc import Iterator

import torch

from ddp_trainer.data import DataConfig
from ddp_trainer.data.arrays import Datasets
from ddp_trainer.data.augment import Augmentation
from ddp_trainer.data.sampling import samples_per_rank, train_order, uniforms, validation_order
from ddp_trainer.data.sources import Batch, Replayed, build_source
from ddp_trainer.errors import UserError, require

__all__ = ["Batch", "Replayed", "TrainLoader", "ValidationLoader"]

# The uses of random numbers that the augmentations' are apart from all others by.
_STREAM, _STREAM_VALIDATION = 1, 4


class TrainLoader:
    """Training batches of one rank, ``samples_per_step`` samples each (the last of an epoch may be smaller)."""

    def __init__(
        self,
        datasets: Datasets,
        config: DataConfig,
        *,
        samples_per_step: int,
        rank: int,
        world_size: int,
        seed: int,
        device: torch.device,
        memory_format: torch.memory_format = torch.contiguous_format,
        processes: int = 1,
    ) -> None:
        self.length = len(datasets.train)
        self.config, self.seed, self.rank, self.world_size = config, seed, rank, world_size
        self.samples_per_step = samples_per_step
        share = samples_per_rank(self.length, world_size, config.drop_last)
        if world_size > self.length:
            raise UserError(
                "data.batch_size", f"{world_size} ranks share {self.length} samples", "start fewer processes"
            )
        require(
            share >= samples_per_step or not config.drop_last,
            "data.batch_size",
            f"a step takes {samples_per_step} samples a rank, an epoch has {share}, and drop_last leaves nothing",
            "give a smaller batch or --drop-last false",
        )
        self.augmentation = _augmentation(datasets, config)
        self.source = build_source(
            datasets.train, datasets, config, self.augmentation, device, memory_format, processes
        )

    def epoch(self, epoch: int, consumed: int = 0) -> Iterator[Batch]:
        """The batches of ``epoch`` (from 0) after all ranks together have used ``consumed`` samples of it."""
        order = train_order(
            self.length,
            seed=self.seed,
            epoch=epoch,
            rank=self.rank,
            world_size=self.world_size,
            consumed=consumed,
            drop_last=self.config.drop_last,
        )
        if self.config.drop_last:
            order = order[: len(order) // self.samples_per_step * self.samples_per_step]
        draws = None
        if self.augmentation.active:
            draws = uniforms(order.numpy(), self.augmentation.draws, self.seed, _STREAM, epoch)
        return self.source.batches(order, draws, self.samples_per_step)


class ValidationLoader:
    """Validation batches of one rank; all ranks together give every sample exactly once.

    Two settings of the data's configuration change that, to repeat what documents did: ``validation_as_training`` and
    ``validation_augment``.
    """

    def __init__(
        self,
        datasets: Datasets,
        config: DataConfig,
        *,
        rank: int,
        world_size: int,
        device: torch.device,
        memory_format: torch.memory_format = torch.contiguous_format,
        processes: int = 1,
    ) -> None:
        length = len(datasets.validation)
        self.batch_size = config.eval_batch_size
        if config.validation_as_training:
            order = train_order(length, seed=0, epoch=0, rank=rank, world_size=world_size)
            self.order = order[: len(order) // self.batch_size * self.batch_size]
            require(
                len(self.order) > 0,
                "data.validation_as_training",
                f"a rank's {len(order)} validation samples are less than a batch of {self.batch_size}: none are left",
                "give a smaller --eval-batch-size",
            )
        else:
            self.order = validation_order(length, rank=rank, world_size=world_size)
        # Rank 0 has as many samples as any other.
        self._share = len(self.order) if config.validation_as_training else samples_per_rank(length, world_size, False)
        self.augmentation = _augmentation(datasets, config) if config.validation_augment else Augmentation()
        self.source = build_source(
            datasets.validation, datasets, config, self.augmentation, device, memory_format, processes
        )

    @property
    def rounds(self) -> int:
        """The greatest number of batches that any rank has."""
        return -(-self._share // self.batch_size)

    def __iter__(self) -> Iterator[Batch]:
        draws = None
        if self.augmentation.active:
            draws = uniforms(self.order.numpy(), self.augmentation.draws, 0, _STREAM_VALIDATION)
        return self.source.batches(self.order, draws, self.batch_size)


def _augmentation(datasets: Datasets, config: DataConfig) -> Augmentation:
    return Augmentation.from_config(config, channels=datasets.in_channels, masks=datasets.train.masks)

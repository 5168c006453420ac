"""This rank's batches of an epoch and of the validation data."""

from collections.abc import Iterator

from ddp_sdk.errors import UserError, require
from ddp_trainer.data import DataConfig
from ddp_trainer.data.arrays import Datasets
from ddp_trainer.data.augment import DRAWS, Augmentation
from ddp_trainer.data.sampling import derive_seed, samples_per_rank, train_order, uniforms, validation_order
from ddp_trainer.data.sources import Batch, Place, build_source

__all__ = ["Batch", "TrainLoader", "ValidationLoader"]

# Random streams of training augmentation, of validation augmentation, and of samples of torch datasets.
_STREAM = 1
_STREAM_VALIDATION = 4
_STREAM_SAMPLES = 5


class TrainLoader:
    """Training batches of one rank (the last of an epoch may be smaller)."""

    def __init__(self, datasets: Datasets, config: DataConfig, place: Place, *, seed: int) -> None:
        self.length = len(datasets.train)  # type: ignore[arg-type]
        self.config = config
        self.seed = seed
        self.place = place
        share = samples_per_rank(self.length, place.world_size, config.drop_last)
        if place.world_size > self.length:
            raise UserError(
                "data.batch_size", f"{place.world_size} ranks share {self.length} samples", "start fewer processes"
            )
        require(
            share >= config.batch_size or not config.drop_last,
            "data.batch_size",
            f"a step needs {config.batch_size} samples per rank, an epoch has {share}, and drop_last leaves no step",
            "give a smaller batch or --drop-last false",
        )
        self.augmentation = _augmentation(datasets, config)
        self.source = build_source(datasets.train, datasets, config, self.augmentation, place)

    def epoch(self, epoch: int, consumed: int = 0) -> Iterator[Batch]:
        """Return the batches of ``epoch`` (from 0) that remain after all ranks together used ``consumed`` samples."""
        order = train_order(
            self.length,
            seed=self.seed,
            epoch=epoch,
            rank=self.place.rank,
            world_size=self.place.world_size,
            consumed=consumed,
            drop_last=self.config.drop_last,
        )
        size = self.config.batch_size
        if self.config.drop_last:
            order = order[: len(order) // size * size]
        draws = None
        if self.augmentation.active:
            draws = uniforms(order.numpy(), DRAWS, self.seed, _STREAM, epoch)
        key = derive_seed(self.seed, _STREAM_SAMPLES, epoch)
        return self.source.batches(order, draws, size, key)


class ValidationLoader:
    """Validation batches of one rank; all ranks together yield every sample exactly once.

    Two settings change that to reproduce the documents: ``validation_as_training`` and ``validation_augment``.
    """

    def __init__(self, datasets: Datasets, config: DataConfig, place: Place) -> None:
        length = len(datasets.validation)  # type: ignore[arg-type]
        rank = place.rank
        world_size = place.world_size
        self.batch_size = config.eval_batch_size
        if config.validation_as_training:
            order = train_order(length, seed=0, epoch=0, rank=rank, world_size=world_size)
            self.order = order[: len(order) // self.batch_size * self.batch_size]
            require(
                len(self.order) > 0,
                "data.validation_as_training",
                f"a rank's {len(order)} validation samples are less than a batch of {self.batch_size}",
                "give a smaller --eval-batch-size",
            )
        else:
            self.order = validation_order(length, rank=rank, world_size=world_size)
        # Rank 0 has the greatest number of samples.
        self._share = len(self.order) if config.validation_as_training else samples_per_rank(length, world_size, False)
        self.augmentation = _augmentation(datasets, config) if config.validation_augment else Augmentation()
        self.source = build_source(datasets.validation, datasets, config, self.augmentation, place)

    def rounds(self) -> Iterator[Batch | None]:
        """Yield the batches, then None until all ranks are done."""
        batches = iter(self)
        for _ in range(-(-self._share // self.batch_size)):
            yield next(batches, None)

    def __iter__(self) -> Iterator[Batch]:
        draws = None
        if self.augmentation.active:
            draws = uniforms(self.order.numpy(), DRAWS, 0, _STREAM_VALIDATION)
        return self.source.batches(self.order, draws, self.batch_size)


def _augmentation(datasets: Datasets, config: DataConfig) -> Augmentation:
    if not datasets.holds_images:
        require(
            not config.augment,
            "data.augment",
            "the trainer augments only images that it holds, not samples of a torch dataset",
            "augment the samples in the dataset, and omit --augment",
        )
        return Augmentation()
    return Augmentation.from_config(config, channels=datasets.in_channels, masks=datasets.masks)

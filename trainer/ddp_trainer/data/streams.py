"""Batches of iterable datasets: shards per rank that end at the same step, with a state for exact resume."""

import io
import pickle
from collections.abc import Iterator
from itertools import islice
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.utils.data import IterableDataset

from ddp_trainer.data import DataConfig
from ddp_trainer.data.arrays import Datasets
from ddp_trainer.data.reader import Reader
from ddp_trainer.data.sampling import derive_seed
from ddp_trainer.data.sources import Batch, Form, Place
from ddp_trainer.data.torch_datasets import Stream
from ddp_trainer.errors import UserError, require

# Random streams of training and of validation shards.
_STREAM = 6
_STREAM_VALIDATION = 7
_Item = TypeVar("_Item")


def together(items: Iterator[_Item], world_size: int, *, every: bool) -> Iterator[_Item | None]:
    """Yield ``items`` while every rank has one; without ``every`` while any rank has one, None where this one has none.

    All ranks must read the same number of items. Their all-reduce runs one item ahead, while they compute.
    """
    if world_size == 1:
        yield from items
        return

    def fetch_next() -> tuple[_Item | None, torch.Tensor, Any]:
        item = next(items, None)
        exists = torch.tensor(float(item is not None))
        operation = dist.ReduceOp.MIN if every else dist.ReduceOp.MAX
        return item, exists, dist.all_reduce(exists, op=operation, async_op=True)

    item, exists, work = fetch_next()
    while True:
        work.wait()
        if not exists:
            return
        ahead = fetch_next()
        yield item
        item, exists, work = ahead


class _Shards:
    """The batches of one rank's shards of an iterable dataset."""

    def __init__(
        self,
        data: IterableDataset[Any],
        datasets: Datasets,
        config: DataConfig,
        size: int,
        place: Place,
        *,
        drop_last: bool,
    ) -> None:
        self.workers = max(1, config.workers)
        self.world_size = place.world_size
        self.stream = Stream(data, datasets.collate, size, (place.rank, place.world_size), drop_last=drop_last)
        self.form = Form(datasets, place.device, place.memory_format)
        self.reader = Reader(self.stream, place.device, config.workers)
        self.prefetched = self.reader.prefetched
        self.begin(0, 0)

    def begin(self, epoch: int, key: int) -> None:
        """Reset all shards to their start."""
        self.stream.epoch = epoch
        self.stream.key = key
        self.stream.first = 0
        self.stream.states = [None] * self.workers

    def batches(self, *, every: bool) -> Iterator[Batch | None]:
        """Yield batches, see :func:`together`. The stream's state is always that after the last batch."""
        for item in together(self.reader.read(), self.world_size, every=every):
            if item is None:
                yield None
                continue
            slot, state, raw = item
            self.stream.states[slot] = state
            self.stream.first = (slot + 1) % self.workers
            yield self.form(*self.reader.send(raw))


class StreamLoader:
    """Training batches of one rank from an iterable dataset; see :class:`~ddp_trainer.data.loader.TrainLoader`.

    ``length`` counts the samples of whole steps, of which every worker of every rank has the same number. Further
    samples are skipped. An epoch ends on all ranks before the first step for which any rank has no batch.
    """

    def __init__(
        self, datasets: Datasets, config: DataConfig, place: Place, *, samples_per_step: int, seed: int
    ) -> None:
        assert isinstance(datasets.train, IterableDataset)
        self.samples_per_step = samples_per_step
        self.seed = seed
        self.source = _Shards(datasets.train, datasets, config, samples_per_step, place, drop_last=config.drop_last)
        workers = self.source.workers
        ranks = self.source.world_size
        samples = len(datasets.train)  # type: ignore[arg-type]
        share = samples // (workers * ranks)
        steps_per_worker = share // samples_per_step if config.drop_last else -(-share // samples_per_step)
        steps = workers * steps_per_worker
        require(
            steps > 0,
            "data.batch_size",
            f"{ranks} ranks with {workers} workers each share {samples} samples: {share} per worker make no step",
            "start fewer --workers or processes, or give a smaller batch or --drop-last false",
        )
        self.length = steps * samples_per_step * ranks

    def epoch(self, epoch: int, consumed: int = 0) -> Iterator[Batch]:
        """Yield the batches of ``epoch`` from its start, or from the loaded state if samples are ``consumed``."""
        key = derive_seed(self.seed, _STREAM, epoch)
        if not consumed:
            self.source.begin(epoch, key)
        self.source.stream.epoch = epoch
        self.source.stream.key = key
        remaining_steps = (self.length - consumed) // (self.samples_per_step * self.source.world_size)
        for batch in islice(self.source.batches(every=True), max(0, remaining_steps)):
            assert batch is not None
            yield batch

    def order(self) -> dict[str, int]:
        """Return what the order of the samples depends on, besides seed and epoch."""
        return {"samples": self.length, "ranks": self.source.world_size, "workers": self.source.workers}

    def state(self) -> list[dict[str, Any]]:
        """Return for each rank the state of its shards after the last batch; all ranks call this.

        Raises :class:`UserError` if a checkpoint can't store the dataset's own state.
        """
        own = {"first": self.source.stream.first, "shards": self.source.stream.states}
        file = io.BytesIO()
        torch.save(own, file)
        file.seek(0)
        try:
            torch.load(file, weights_only=True)
        except pickle.UnpicklingError as error:
            reason = str(error).splitlines()[0]
            remedy = "return numbers, text and tensors, in lists and dictionaries"
            raise UserError("data", f"a checkpoint can't store state_dict() ({reason})", remedy) from error
        states = [own] * self.source.world_size
        if self.source.world_size > 1:
            dist.all_gather_object(states, own)
        return states

    def load_state(self, state: list[dict[str, Any]] | None) -> None:
        """Load this rank's state; ignore a state of another number of ranks or workers."""
        if state and len(state) == self.source.world_size and len(state[0]["shards"]) == self.source.workers:
            own = state[self.source.stream.rank]
            self.source.stream.first = own["first"]
            self.source.stream.states = list(own["shards"])


class StreamValidation:
    """Validation batches of one rank from an iterable dataset, until the end of every shard."""

    def __init__(self, datasets: Datasets, config: DataConfig, place: Place) -> None:
        assert isinstance(datasets.validation, IterableDataset)
        require(
            not config.validation_as_training,
            "data.validation_as_training",
            "an iterable dataset can't be padded",
            "omit it",
        )
        self.source = _Shards(datasets.validation, datasets, config, config.eval_batch_size, place, drop_last=False)

    def rounds(self) -> Iterator[Batch | None]:
        """Yield the batches, then None until all ranks are done."""
        self.source.begin(0, derive_seed(_STREAM_VALIDATION))
        return self.source.batches(every=False)

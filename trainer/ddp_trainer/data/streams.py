"""Batches of iterable datasets: every rank's shards, ended together, with a state from which to go on exactly."""

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

_STREAM, _STREAM_VALIDATION = 6, 7
_Item = TypeVar("_Item")


def together(items: Iterator[_Item], world_size: int, *, every: bool) -> Iterator[_Item | None]:
    """``items`` for as long as every rank has one, or any has one: then None where this rank has no more.

    All ranks must ask equally often. They compare notes one item ahead, so that the message travels while they compute.
    """
    if world_size == 1:
        yield from items
        return

    def ask() -> tuple[_Item | None, torch.Tensor, Any]:
        item = next(items, None)
        there = torch.tensor(float(item is not None))
        kind = dist.ReduceOp.MIN if every else dist.ReduceOp.MAX
        return item, there, dist.all_reduce(there, op=kind, async_op=True)

    item, there, work = ask()
    while True:
        work.wait()
        if not there:
            return
        ahead = ask()
        yield item
        item, there, work = ahead


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
        self.workers, self.world_size = max(1, config.workers), place.world_size
        self.stream = Stream(data, datasets.collate, size, (place.rank, place.world_size), drop_last=drop_last)
        self.form = Form(datasets, place.device, place.memory_format)
        self.reader = Reader(self.stream, place.device, config.workers)
        self.prefetched = self.reader.prefetched
        self.begin(0, 0)

    def begin(self, epoch: int, key: int) -> None:
        """Set all shards to their beginning."""
        self.stream.epoch, self.stream.key, self.stream.first = epoch, key, 0
        self.stream.states = [None] * self.workers

    def batches(self, *, every: bool) -> Iterator[Batch | None]:
        """See :func:`together`. When a batch is given, the stream's state is that after it."""
        for item in together(self.reader.read(), self.world_size, every=every):
            if item is None:
                yield None
                continue
            slot, state, raw = item
            self.stream.states[slot], self.stream.first = state, (slot + 1) % self.workers
            yield self.form(*self.reader.send(raw))


class StreamLoader:
    """Training batches of one rank from an iterable dataset; see :class:`~ddp_trainer.data.loader.TrainLoader`.

    ``length`` is that of whole steps: as many as the dataset's length gives every worker of every rank. What is beyond
    is left out, and an epoch ends on all ranks before the first step for which any has nothing left.
    """

    def __init__(
        self, datasets: Datasets, config: DataConfig, place: Place, *, samples_per_step: int, seed: int
    ) -> None:
        assert isinstance(datasets.train, IterableDataset)
        self.samples_per_step, self.seed = samples_per_step, seed
        self.source = _Shards(datasets.train, datasets, config, samples_per_step, place, drop_last=config.drop_last)
        workers, ranks = self.source.workers, self.source.world_size
        samples = len(datasets.train)  # type: ignore[arg-type]
        share = samples // (workers * ranks)
        steps = workers * (share // samples_per_step if config.drop_last else -(-share // samples_per_step))
        require(
            steps > 0,
            "data.batch_size",
            f"of {samples} samples each of {workers} workers of {ranks} ranks gets {share}, which make no step",
            "start fewer --workers or processes, or give a smaller batch or --drop-last false",
        )
        self.length = steps * samples_per_step * ranks

    def epoch(self, epoch: int, consumed: int = 0) -> Iterator[Batch]:
        """The batches of ``epoch`` from its beginning, or from the state that was loaded where any is ``consumed``."""
        key = derive_seed(self.seed, _STREAM, epoch)
        if not consumed:
            self.source.begin(epoch, key)
        self.source.stream.epoch, self.source.stream.key = epoch, key
        left = (self.length - consumed) // (self.samples_per_step * self.source.world_size)
        for batch in islice(self.source.batches(every=True), max(0, left)):
            assert batch is not None
            yield batch

    def order(self) -> dict[str, int]:
        """What the order of the samples hangs on, besides seed and epoch."""
        return {"samples": self.length, "ranks": self.source.world_size, "workers": self.source.workers}

    def state(self) -> list[dict[str, Any]]:
        """For each rank where its shards are after the last batch; all ranks call this.

        Raises :class:`UserError` where the dataset's own state is nothing that a checkpoint can hold.
        """
        mine = {"first": self.source.stream.first, "shards": self.source.stream.states}
        file = io.BytesIO()
        torch.save(mine, file)
        file.seek(0)
        try:
            torch.load(file, weights_only=True)
        except pickle.UnpicklingError as error:
            reason = str(error).splitlines()[0]
            remedy = "return numbers, text and tensors, in lists and dictionaries"
            raise UserError("data", f"state_dict() holds what a checkpoint can't ({reason})", remedy) from error
        everyone = [mine] * self.source.world_size
        if self.source.world_size > 1:
            dist.all_gather_object(everyone, mine)
        return everyone

    def load_state(self, state: list[dict[str, Any]] | None) -> None:
        """Go on from a state of as many ranks and workers; of others it is no use."""
        if state and len(state) == self.source.world_size and len(state[0]["shards"]) == self.source.workers:
            mine = state[self.source.stream.rank]
            self.source.stream.first, self.source.stream.states = mine["first"], list(mine["shards"])


class StreamValidation:
    """Validation batches of one rank from an iterable dataset, to the end of every shard."""

    def __init__(self, datasets: Datasets, config: DataConfig, place: Place) -> None:
        assert isinstance(datasets.validation, IterableDataset)
        require(
            not config.validation_as_training,
            "data.validation_as_training",
            "iterable data have no order to pad",
            "leave it out",
        )
        self.source = _Shards(datasets.validation, datasets, config, config.eval_batch_size, place, drop_last=False)

    def rounds(self) -> Iterator[Batch | None]:
        """The batches; None while only other ranks have more."""
        self.source.begin(0, derive_seed(_STREAM_VALIDATION))
        return self.source.batches(every=False)

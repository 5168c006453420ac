"""torch's datasets as worker processes read them: samples with indices, and shards of a stream."""

import contextlib
import copy
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from ddp_trainer.data.reader import Unreadable
from ddp_trainer.data.sampling import derive_seed
from ddp_trainer.errors import UserError

_END: Any = object()


@contextlib.contextmanager
def _noting(where: str) -> Iterator[None]:
    """Add to an exception of the user's code which sample it is about."""
    try:
        yield
    except Exception as error:
        error.add_note(f"({where})")
        raise


def _seed(*parts: int) -> None:
    """Seed the generators that a dataset may draw from: torch's, Python's and NumPy's."""
    seed = derive_seed(*parts)
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


class MappedSamples(Dataset[Any]):
    """Makes a batch of a list of pairs: a key, and the index of a sample, which together seed what the sample draws."""

    def __init__(self, data: Dataset[Any], collate: Callable[[list[Any]], Any]) -> None:
        self.data, self.collate = data, collate

    def __getitems__(self, wanted: Sequence[tuple[int, int]]) -> Any:
        """The batch of these samples; :class:`Unreadable` where the dataset raises a :class:`UserError`."""
        try:
            return self._read(wanted)
        except UserError as error:
            return Unreadable.of(error)

    def _read(self, wanted: Sequence[tuple[int, int]]) -> Any:
        samples = []
        for key, index in wanted:
            _seed(key, index)
            with _noting(f"sample {index} of the data"):
                samples.append(self.data[index])
        with _noting(f"samples {', '.join(str(index) for _, index in wanted)} of the data, put together"):
            return self.collate(samples)


class Stream(IterableDataset[Any]):
    """This rank's shards of an iterable dataset in whole batches, each worker one of them.

    A dataset with a method ``shard(num_shards, index)`` is asked for a shard; of any other every worker reads all, and
    keeps the samples that are its own by turns. Given are the worker's slot, the state of its shard after the batch,
    and the batch. A shard begins where ``states`` has it: a dataset with ``state_dict`` and ``load_state_dict`` goes on
    there, of any other as many samples are read again and left out.
    """

    def __init__(
        self,
        data: IterableDataset[Any],
        collate: Callable[[list[Any]], Any],
        size: int,
        place: tuple[int, int],
        *,
        drop_last: bool,
    ) -> None:
        self.data, self.collate, self.size, self.drop_last = data, collate, size, drop_last
        self.rank, self.world_size = place
        # Set before each epoch: its number and seed, the slot that comes first, the state of each slot's shard.
        self.epoch, self.key, self.first = 0, 0, 0
        self.states: list[dict[str, Any] | None] = []

    def __iter__(self) -> Iterator[tuple[int, dict[str, Any], Any]]:
        info = get_worker_info()
        workers, worker = (1, 0) if info is None else (info.num_workers, info.id)
        slot = (worker + self.first) % workers
        shards, shard = self.world_size * workers, self.rank * workers + slot
        data: Any = self.data
        own = hasattr(data, "shard")
        if own:
            data = data.shard(shards, shard)
        if hasattr(data, "set_epoch"):
            data.set_epoch(self.epoch)
        stateful = hasattr(data, "state_dict") and hasattr(data, "load_state_dict")
        saved = self.states[slot] or {"batches": 0, "read": 0, "data": None}
        # All that read the whole stream must draw the same, as a shuffled one is to be the same for all of them.
        _seed(self.key, shard if own else 0)
        number = read = 0
        if stateful and saved["data"] is not None:
            data.load_state_dict(saved["data"])
            torch.set_rng_state(saved["generator"])
            number, read = saved["batches"], saved["read"]
        batch: list[Any] = []
        for sample in itertools.chain(_annotated(data, f"shard {shard} of {shards}, after sample"), [_END]):
            if sample is not _END:
                read += 1
                if own or (read - 1) % shards == shard:
                    batch.append(sample)
            if len(batch) == self.size or (sample is _END and batch and not self.drop_last):
                number += 1
                if number > saved["batches"]:
                    # Without workers others draw from the same generator meanwhile.
                    generator = torch.get_rng_state()
                    state: dict[str, Any] = {"batches": number, "read": read, "data": None}
                    if stateful:
                        state |= {"data": copy.deepcopy(data.state_dict()), "generator": generator}
                    with _noting(f"the last {len(batch)} of {read} samples of shard {shard} of {shards}, put together"):
                        whole = self.collate(batch)
                    yield slot, state, whole
                    torch.set_rng_state(generator)
                batch = []


def _annotated(data: Any, where: str) -> Iterator[Any]:
    read = 0
    try:
        for sample in data:
            yield sample
            read += 1
    except Exception as error:
        error.add_note(f"({where} {read})")
        raise

"""Torch datasets in worker processes: samples by index, and shards of an iterable dataset."""

import contextlib
import copy
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
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
    """Add the location ``where`` to an exception of the user's code."""
    try:
        yield
    except Exception as error:
        error.add_note(f"({where})")
        raise


def _seed(*parts: int) -> None:
    """Seed the generators that a dataset may use: torch's, Python's and NumPy's."""
    seed = derive_seed(*parts)
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


class MappedSamples(Dataset[Any]):
    """Builds batches from lists of pairs of a key and a sample's index, which together seed the sample's generators."""

    def __init__(self, data: Dataset[Any], collate: Callable[[list[Any]], Any]) -> None:
        self.data = data
        self.collate = collate

    def __getitems__(self, keyed_indices: Sequence[tuple[int, int]]) -> Any:
        """Return the batch of these samples; :class:`Unreadable` if the dataset raises a :class:`UserError`."""
        try:
            return self._read(keyed_indices)
        except UserError as error:
            return Unreadable.of(error)

    def _read(self, keyed_indices: Sequence[tuple[int, int]]) -> Any:
        samples = []
        for key, index in keyed_indices:
            _seed(key, index)
            with _noting(f"sample {index} of the data"):
                samples.append(self.data[index])
        indices = ", ".join(str(index) for _, index in keyed_indices)
        with _noting(f"collating samples {indices} of the data"):
            return self.collate(samples)


class Stream(IterableDataset[Any]):
    """This rank's shards of an iterable dataset in whole batches; each worker reads one shard.

    The shard comes from the dataset's method ``shard(num_shards, index)``. Without one, every worker reads the whole
    dataset and keeps every num_shards-th sample. The stream yields the worker's slot, the state of its shard after the
    batch, and the batch. A shard starts at its state in ``states``: a dataset with ``state_dict`` and
    ``load_state_dict`` resumes there, any other is read from its start and the samples before are skipped.
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
        self.data = data
        self.collate = collate
        self.size = size
        self.drop_last = drop_last
        self.rank, self.world_size = place
        # Set before each epoch: its number and seed, the slot of the first batch, and the state of each slot's shard.
        self.epoch = 0
        self.key = 0
        self.first = 0
        self.states: list[dict[str, Any] | None] = []

    def __iter__(self) -> Iterator[tuple[int, dict[str, Any], Any]]:
        shard = self._locate_shard()
        data: Any = self.data
        if shard.from_dataset:
            data = data.shard(shard.count, shard.index)
        if hasattr(data, "set_epoch"):
            data.set_epoch(self.epoch)
        stateful = hasattr(data, "state_dict") and hasattr(data, "load_state_dict")
        saved = self.states[shard.slot] or {"batches": 0, "read": 0, "data": None}

        # Workers that read the whole dataset need equal seeds, so that a shuffled dataset has one order for all.
        _seed(self.key, shard.index if shard.from_dataset else 0)
        batches = 0
        read = 0
        if stateful and saved["data"] is not None:
            data.load_state_dict(saved["data"])
            torch.set_rng_state(saved["generator"])
            batches = saved["batches"]
            read = saved["read"]

        name = f"shard {shard.index} of {shard.count}"
        batch: list[Any] = []
        for sample in itertools.chain(_annotated(data, f"{name}, after sample"), [_END]):
            if sample is not _END:
                read += 1
                if shard.from_dataset or (read - 1) % shard.count == shard.index:
                    batch.append(sample)
            if len(batch) == self.size or (sample is _END and batch and not self.drop_last):
                batches += 1
                if batches > saved["batches"]:
                    # Without worker processes, the trainer draws from the same generator between two batches.
                    generator = torch.get_rng_state()
                    state: dict[str, Any] = {"batches": batches, "read": read, "data": None}
                    if stateful:
                        state |= {"data": copy.deepcopy(data.state_dict()), "generator": generator}
                    with _noting(f"collating the last {len(batch)} of {read} samples of {name}"):
                        collated = self.collate(batch)
                    yield shard.slot, state, collated
                    torch.set_rng_state(generator)
                batch = []

    def _locate_shard(self) -> "_Shard":
        """Return the shard of this worker process."""
        info = get_worker_info()
        workers = 1 if info is None else info.num_workers
        worker = 0 if info is None else info.id
        slot = (worker + self.first) % workers
        return _Shard(slot, self.rank * workers + slot, self.world_size * workers, hasattr(self.data, "shard"))


@dataclass(frozen=True)
class _Shard:
    """A part of an iterable dataset: ``slot`` among this rank's shards, ``index`` of ``count`` among all."""

    slot: int
    index: int
    count: int
    # Whether the dataset's own method creates the shard.
    from_dataset: bool


def _annotated(data: Any, where: str) -> Iterator[Any]:
    read = 0
    try:
        for sample in data:
            yield sample
            read += 1
    except Exception as error:
        error.add_note(f"({where} {read})")
        raise

"""Worker processes that read samples ahead of the training step, and the transfer of samples to the device."""

import contextlib
import ctypes
import os
import random
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_all_start_methods, get_context
from multiprocessing.util import Finalize
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader, Dataset

from ddp_sdk.errors import UserError
from ddp_trainer.data.sampling import derive_seed
from ddp_trainer.errors import DataError

# Maximum number of batches that each worker prefetches.
_PREFETCH = 4


class _Indices:
    """The batch sampler of a DataLoader that lives for many epochs; ``batches`` is set before each epoch."""

    def __init__(self) -> None:
        self.batches: Sequence[list[Any]] = ()

    def __iter__(self) -> Iterator[list[Any]]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


def _identity(batch: Any) -> Any:
    return batch


def _init_worker(rank_exiting: Any, _: int) -> None:
    """Set up a worker's signals: it must not exit on SIGTERM before its rank, which may need more batches.

    At its end the rank sets ``rank_exiting``, sends SIGTERM once to its children and waits for them. If the rank is
    killed, the kernel kills its workers.
    """

    def exit_with_rank(*_: object) -> None:
        if rank_exiting.value:
            os._exit(0)

    signal.signal(signal.SIGTERM, exit_with_rank)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform.startswith("linux"):
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, int(signal.SIGKILL))
    torch.set_num_threads(1)


def _mark_rank_exiting(rank_exiting: Any) -> None:
    rank_exiting.value = 1


@dataclass(frozen=True)
class Unreadable:
    """A :class:`UserError` of the dataset in a worker, as data: DataLoader does not preserve the exception."""

    field: str
    problem: str
    remedy: str
    notes: tuple[str, ...]

    @classmethod
    def of(cls, error: UserError) -> Self:
        """Copy the fields and notes of ``error``."""
        return cls(error.field, error.problem, error.remedy, tuple(getattr(error, "__notes__", ())))

    def as_error(self) -> DataError:
        """Build the exception to raise in the rank."""
        error = DataError(self.field, self.problem, self.remedy)
        for note in self.notes:
            error.add_note(note)
        return error


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

    def __init__(self, data: Any, collate: Callable[[list[Any]], Any]) -> None:
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


class Reader:
    """Reads batches of ``dataset`` by worker processes, and copies them to the device on a separate stream.

    The dataset has ``__getitems__``, which builds a batch from a list of indices. The workers live as long as the
    reader.
    """

    def __init__(self, dataset: Dataset[Any], device: torch.device, workers: int) -> None:
        self.device = device
        self._indices = _Indices()
        self.prefetched = _PREFETCH * workers
        cuda = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if cuda else None  # type: ignore[no-untyped-call]
        # A forked process starts at once; a new interpreter would import torch, which may take as long as an epoch.
        context = get_context("fork" if "fork" in get_all_start_methods() else None)
        rank_exiting = context.Value("b", 0, lock=False)
        # Finalizers with a priority run at the end of the process, before it terminates its children.
        Finalize(self, _mark_rank_exiting, args=(rank_exiting,), exitpriority=10)
        self._loader: DataLoader[Any] = DataLoader(
            dataset,
            batch_sampler=self._indices,
            num_workers=workers,
            collate_fn=_identity,
            pin_memory=cuda,
            worker_init_fn=partial(_init_worker, rank_exiting) if workers else None,
            persistent_workers=workers > 0,
            prefetch_factor=_PREFETCH if workers else None,
            multiprocessing_context=context if workers else None,
        )

    def read(self, batches: Sequence[list[Any]]) -> Iterator[Any]:
        """Yield the dataset's output for each of ``batches`` of indices.

        Raises :class:`DataError` for an :class:`Unreadable` batch.
        """
        self._indices.batches = batches
        with warnings.catch_warnings():
            # Python warns about forks in a process with threads. The workers use nothing that a thread may have locked.
            warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
            raw = iter(self._loader)
        for batch in raw:
            if isinstance(batch, Unreadable):
                raise batch.as_error()
            yield batch

    def send(self, tree: Any) -> Any:
        """Copy tensors from pinned memory while the device computes the previous step."""
        return tree if self._stream is None else tree_map_only(Tensor, self._send, tree)

    def _send(self, tensor: Tensor) -> Tensor:
        assert self._stream is not None
        with torch.cuda.stream(self._stream):
            sent = tensor.to(self.device, non_blocking=True)
        current = torch.cuda.current_stream(self.device)
        current.wait_stream(self._stream)
        # The memory was allocated on the copying stream; it must not be reused before the current stream is done.
        sent.record_stream(current)
        return sent

"""Worker processes that read samples ahead of the training step, and the way of those to the device."""

import ctypes
import os
import signal
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_all_start_methods, get_context
from multiprocessing.util import Finalize
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader, Dataset, IterableDataset

from ddp_trainer.errors import DataError, UserError

# Batches that each worker has ready at most.
_PREFETCH = 4


class _Indices:
    """The batch sampler of a DataLoader that lives for many epochs: the batches of the next one are put into it."""

    def __init__(self) -> None:
        self.batches: Sequence[Sequence[Any]] = ()

    def __iter__(self) -> Iterator[Sequence[Any]]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


def _identity(batch: Any) -> Any:
    return batch


def _init_worker(rank_exiting: Any, _: int) -> None:
    """Set up a reader: it goes on when its rank is asked to stop, which may want more batches before it does.

    It exits once ``rank_exiting`` is set: at the end of a process its children are asked once, and waited for. A
    rank that is killed takes its readers along.
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
    """A :class:`UserError` of the dataset on its way from a worker, which would lose the form of an exception."""

    field: str
    problem: str
    remedy: str
    notes: tuple[str, ...]

    @classmethod
    def of(cls, error: UserError) -> Self:
        """What of ``error`` reaches the user."""
        return cls(error.field, error.problem, error.remedy, tuple(getattr(error, "__notes__", ())))

    def as_error(self) -> DataError:
        """The exception again, in the rank."""
        error = DataError(self.field, self.problem, self.remedy)
        for note in self.notes:
            error.add_note(note)
        return error


class Reader:
    """Reads batches of ``dataset`` by worker processes, and sends them on a stream of their own.

    A dataset with indices has ``__getitems__``, which makes a batch of a list of them, and workers that live as long as
    this; an iterable one gives whole batches, and is copied to new workers each time.
    """

    def __init__(self, dataset: Dataset[Any], device: torch.device, workers: int) -> None:
        self.device, self._indices = device, _Indices()
        self.prefetched = _PREFETCH * workers
        cuda, iterable = device.type == "cuda", isinstance(dataset, IterableDataset)
        self._stream = torch.cuda.Stream(device) if cuda else None  # type: ignore[no-untyped-call]
        # A fork is there at once; another interpreter would first import torch for as long as an epoch may take.
        context = get_context("fork" if "fork" in get_all_start_methods() else None)
        rank_exiting = context.Value("b", 0, lock=False)
        # Finalizers with a priority run at the end of the process, before its children are asked to end.
        Finalize(self, _mark_rank_exiting, args=(rank_exiting,), exitpriority=10)
        kind: dict[str, Any] = {"batch_size": None} if iterable else {"batch_sampler": self._indices}
        self._loader: DataLoader[Any] = DataLoader(
            dataset,
            num_workers=workers,
            collate_fn=_identity,
            pin_memory=cuda,
            worker_init_fn=partial(_init_worker, rank_exiting) if workers else None,
            persistent_workers=workers > 0 and not iterable,
            prefetch_factor=_PREFETCH if workers else None,
            multiprocessing_context=context if workers else None,
            **kind,
        )

    def read(self, batches: Sequence[Sequence[Any]] = ()) -> Iterator[Any]:
        """What the dataset gives for each of ``batches`` of indices, or, an iterable one, of its own accord.

        Raises :class:`DataError` in place of an :class:`Unreadable` batch.
        """
        self._indices.batches = batches
        with warnings.catch_warnings():
            # Python warns of forks beside threads. The readers touch nothing that a thread could hold a lock of.
            warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
            raw = iter(self._loader)
        for batch in raw:
            if isinstance(batch, Unreadable):
                raise batch.as_error()
            yield batch

    def send(self, tree: Any) -> Any:
        """Copy tensors from pinned memory while the device still works on the step before."""
        return tree if self._stream is None else tree_map_only(Tensor, self._send, tree)

    def _send(self, tensor: Tensor) -> Tensor:
        assert self._stream is not None
        with torch.cuda.stream(self._stream):
            sent = tensor.to(self.device, non_blocking=True)
        current = torch.cuda.current_stream(self.device)
        current.wait_stream(self._stream)
        # The memory was allocated on the other stream; it may be used again only when this one is done with it.
        sent.record_stream(current)
        return sent

"""Torch datasets in worker processes: samples by index."""

import contextlib
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from ddp_trainer.data.reader import Unreadable
from ddp_trainer.data.sampling import derive_seed
from ddp_trainer.errors import UserError


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

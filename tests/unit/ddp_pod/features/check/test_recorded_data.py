"""What a check records of DataLoaders, without a call of the script's methods."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, RandomSampler, SequentialSampler

from ddp_pod.features.check.recorded_data import _find_size, _SizeHook, _write_indices
from ddp_pod.rank.script_objects import IdentityMap
from tests.unit.ddp_pod.test_script_objects import Touchy


@pytest.mark.parametrize(
    ("indices", "expected"),
    [
        ([Touchy(), 1], ""),
        ([None, None], ""),
        ([numpy.int64(3), (4, "x"), torch.tensor(5)], _write_indices([3, (4, "x"), 5])),
    ],
)
def test_indices_are_read_without_a_call(indices: list[Any], expected: str) -> None:
    assert _write_indices(indices) == expected


class Numbers(Dataset[int]):
    """A dataset that counts how often it is asked for its length."""

    asked = 0

    def __len__(self) -> int:
        Numbers.asked += 1
        return 10

    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.parametrize(
    ("build", "expected"),
    [
        (lambda data: DataLoader(data, batch_size=4), 3),
        (lambda data: DataLoader(data, batch_size=4, drop_last=True, shuffle=True), 2),
        (lambda data: DataLoader(data, batch_size=2, sampler=DistributedSampler(data, num_replicas=2, rank=0)), 3),
        (lambda data: DataLoader(data, batch_sampler=BatchSampler(RandomSampler(data, num_samples=7), 2, False)), 4),
        (lambda data: DataLoader(data, batch_sampler=BatchSampler(SequentialSampler(data), 3, False)), 4),
    ],
)
def test_length_is_what_pytorch_has_read(
    build: Callable[[Any], Any], expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = IdentityMap()
    for name in ("sampler", "distributed", "dataloader"):
        module = sys.modules[f"torch.utils.data.{name}"]
        monkeypatch.setattr(module, "len", len, raising=False)
        _SizeHook(module.__name__, sizes).watch(module)
    data = Numbers()
    loader = build(data)
    iterator = iter(loader)
    next(iterator)

    asked = Numbers.asked
    length = _find_size(sizes, loader.batch_sampler)
    assert (length, Numbers.asked) == (expected, asked)
    assert len(loader) == expected

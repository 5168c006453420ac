"""What a check records of DataLoaders, without a call of the script's methods."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
)

from ddp_pod.features.check.contract import LoaderRecord
from ddp_pod.features.check.recorded_data import (
    Batches,
    DataHook,
    _calls_next,
    _find_size,
    _is_countable,
    _Iteration,
    _Loader,
    _SizeHook,
    _write_indices,
)
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


def test_batch_that_a_cycle_has_kept_is_recognized() -> None:
    hook = DataHook(None, "")  # type: ignore[arg-type]
    batches = [{"x": torch.zeros(2)} for _ in range(2)]
    hook._delivered = frozenset([batches[1]["x"].data_ptr()])
    cycle = itertools.cycle(batches)
    next(cycle)
    assert not hook.is_cycled(Batches([], []))

    next(cycle)
    hook._is_cycled = None

    assert hook.is_cycled(Batches([], []))
    assert not hook.is_cycled(Batches([], [0]))


def test_cut_of_an_epoch_keeps_the_difference_to_a_shorter_one_of_a_peer(tmp_path: Path) -> None:
    hooks = [DataHook(SimpleNamespace(rank=rank), str(tmp_path)) for rank in range(2)]  # type: ignore[arg-type]
    loaders = []
    for hook, length in zip(hooks, (10, 12), strict=True):
        loader = _Loader(0, "train.py:12")
        loader.key = "a"
        record = LoaderRecord(batches=length)
        hook._recorder.write = lambda record: None
        hook._sizes[loader] = length
        loader.find = lambda loader=loader: loader
        hook._write_record(_Iteration(loader, record), None)
        loaders.append(loader)
    assert [hook._compare_lengths(loader) for hook, loader in zip(hooks, loaders, strict=True)] == [0, 2]


class Endless(Sampler[int]):
    """Indices without an end."""

    def __iter__(self) -> Iterator[int]:
        return itertools.cycle(range(10))


@pytest.mark.parametrize(
    ("sampler", "expected"), [(Endless(), False), (RandomSampler(range(4)), True), (range(4), True)]
)
@pytest.mark.parametrize("is_batched", [False, True])
def test_sampler_without_a_length_may_be_endless(sampler: Any, expected: bool, is_batched: bool) -> None:
    options = {"batch_sampler": BatchSampler(sampler, 2, True)} if is_batched else {"sampler": sampler}
    assert _is_countable(vars(DataLoader(Numbers(), **options))) is expected


def test_call_of_next_is_told_from_a_loop() -> None:
    class Batches:
        def __iter__(self) -> Any:
            return self

        def __next__(self) -> bool:
            return _calls_next(sys._getframe(1))

    batches = Batches()
    assert next(batches)
    for calls_next in batches:
        assert not calls_next
        break
    assert [number for number, _ in zip(batches, range(2), strict=False)] == [False, False]

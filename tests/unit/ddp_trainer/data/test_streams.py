"""Iterable datasets: every sample in one shard, random numbers per shard, and exact resumption."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset, default_collate

from ddp_trainer import CheckpointConfig, DataConfig, Datasets, OptimConfig, RunConfig, Task, Trainer, UserError
from ddp_trainer.config.run import MetricsConfig
from ddp_trainer.data.loader import train_loader
from ddp_trainer.data.sources import Place
from ddp_trainer.data.torch_datasets import Stream
from ddp_trainer.distributed import DistributedConfig
from tests.support.saved_states import load, same


class Shuffled(IterableDataset[Any]):
    """Numbers in a random order, each with a random value."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.epoch = 0

    def __len__(self) -> int:
        return self.length

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def order(self) -> list[int]:
        return torch.randperm(self.length).tolist()

    def __iter__(self) -> Iterator[Any]:
        for number in self.order():
            drawn = torch.rand(()) + random.random() + np.random.random()
            yield torch.tensor([float(number), drawn, float(self.epoch)]), float(number)


class StatefulNumbers(Shuffled):
    """The same dataset with a position; it counts how many samples were read."""

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.at = 0
        self.asked = 0

    def __iter__(self) -> Iterator[Any]:
        order = torch.randperm(self.length, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        for number in order[self.at :]:
            self.at = self.at + 1
            self.asked = self.asked + 1
            yield torch.tensor([float(number), float(torch.rand(())), float(self.epoch)]), float(number)
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


class Files(Shuffled):
    """Shards of very different lengths, as files have."""

    index = 0
    shards = 1

    def shard(self, num_shards: int, index: int) -> Files:
        first = type(self)(self.length)
        first.shards = num_shards
        first.index = index
        return first

    def order(self) -> list[int]:
        cut = self.length * 2 // 3
        return {1: [*range(self.length)], 2: [[*range(cut)], [*range(cut, self.length)]][self.index]}[self.shards]


KINDS = {"skipping": Shuffled, "stateful": StatefulNumbers, "sharding": Files}


def stream(
    data: IterableDataset[Any], rank: int = 0, world: int = 1, *, size: int = 4, drop_last: bool = False
) -> Stream:
    batches = Stream(data, default_collate, size, (rank, world), drop_last=drop_last)
    batches.states = [None]
    batches.key = 7
    return batches


@pytest.mark.parametrize("kind", KINDS)
def test_every_sample_is_in_one_shard(kind: str) -> None:
    seen = [
        number for rank in range(2) for _, _, batch in stream(KINDS[kind](23), rank, 2) for number in batch[1].tolist()
    ]
    assert sorted(seen) == [float(number) for number in range(23)]
    assert {len(batch[1]) for _, _, batch in stream(KINDS[kind](23), 1, 2, drop_last=True)} == {4}


def test_order_of_stream_depends_on_its_key() -> None:
    def order(key: int) -> list[float]:
        batches = stream(Shuffled(40))
        batches.key = key
        return [number for _, _, batch in batches for number in batch[1].tolist()]

    assert order(7) == order(7) != order(8)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("done", [1, 3, 5])
def test_shard_resumes_from_any_of_its_states(kind: str, done: int) -> None:
    whole = [*stream(KINDS[kind](23))]
    data = KINDS[kind](23)
    rest = stream(data)
    rest.states = [whole[done - 1][1]]
    torch.rand(3), random.random()  # for any state of the generators
    again = [*rest]
    assert len(again) == len(whole) - done
    for (_, state, batch), (_, expected, second) in zip(again, whole[done:], strict=True):
        assert torch.equal(batch[1], second[1])
        # A stateful dataset must restore generators other than torch's itself.
        assert torch.equal(batch[0], second[0])
        assert state["batches"] == expected["batches"]
    if isinstance(data, StatefulNumbers):
        assert data.asked == 23 - 4 * done


class Learn(Task):
    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.mse_loss(output.flatten(), target.float() / 50)


def fit(folder: Path, kind: str, workers: int, *, drop_last: bool = False, **more: Any) -> None:
    checkpoint = CheckpointConfig(dir=str(folder), keep=99, every_steps=1)
    config = RunConfig(
        epochs=2, optim=OptimConfig(lr=1e-4),
        data=DataConfig(batch_size=4, workers=workers, eval_batch_size=8, drop_last=drop_last),
        distributed=DistributedConfig(device="cpu"), metrics=MetricsConfig(port=0), checkpoint=checkpoint, **more,
    )  # fmt: skip
    Trainer(config, model=lambda: nn.Linear(3, 1), data=Datasets(KINDS[kind](45), Shuffled(21)), task=Learn()).fit()


@pytest.mark.parametrize(("kind", "workers"), [("skipping", 2), ("stateful", 2), ("sharding", 2), ("stateful", 0)])
def test_run_on_stream_resumes_bitwise(kind: str, workers: int, tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    cut = tmp_path / "cut"
    fit(whole, kind, workers)
    fit(cut, kind, workers, max_steps=3)
    fit(cut, kind, workers)
    last = max(whole.glob("step-*.pt"))
    assert load(last)["position"]["step"] >= 22
    assert same(load(cut / last.name)["engine"], load(last)["engine"])
    assert load(cut / last.name)["position"]["scores"] == load(last)["position"]["scores"]


def test_changed_workers_warn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit(tmp_path, "skipping", 0, max_steps=11)  # 44 samples: more than the whole batches of two workers
    fit(tmp_path, "skipping", 2, drop_last=True)
    message = capsys.readouterr()
    assert "workers was 1, is 2" in message.err
    assert "epoch 2/2 validation" in message.out


def test_stream_that_is_shorter_than_its_length_ends_its_epochs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Short(Shuffled):
        def order(self) -> list[int]:
            return [*range(9)]

    KINDS["short"] = Short
    fit(tmp_path, "short", 0)
    del KINDS["short"]
    assert "done: 6 steps" in capsys.readouterr().out  # of 4, 4 and 1 samples, twice


def test_too_few_samples_for_every_worker_are_refused() -> None:
    config = DataConfig(batch_size=64, workers=2, drop_last=True)
    data = Datasets(Shuffled(45), Shuffled(21))
    with pytest.raises(
        UserError, match=r"data.batch_size: 1 ranks with 2 workers each share 45 samples: 22 per worker make"
    ):
        train_loader(data, config, Place(0, 1, torch.device("cpu")), samples_per_step=64, seed=0)


def test_unstorable_state_is_refused(tmp_path: Path) -> None:
    class PathStream(StatefulNumbers):
        def state_dict(self) -> dict[str, Any]:
            return {"path": Path()}

        def load_state_dict(self, state: dict[str, Any]) -> None: ...

    KINDS["odd"] = PathStream
    with pytest.raises(UserError, match=r"data: a checkpoint can't store state_dict\(\) .*; return numbers"):
        fit(tmp_path, "odd", 0)
    del KINDS["odd"]


def test_failing_stream_reports_location() -> None:
    class FailingStream(Shuffled):
        def order(self) -> list[int]:
            return [3, 4, "five"]  # type: ignore[list-item]

    with pytest.raises(ValueError, match="five") as raised:
        list(stream(FailingStream(3), 0, 2))
    assert raised.value.__notes__ == ["(shard 0 of 2, after sample 2)"]

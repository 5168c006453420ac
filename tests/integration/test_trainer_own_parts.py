"""A program's own task and data on two ranks: it learns, resumes to the bit, and all ranks end together."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.saved_states import load, same
from tests.support.trainer_ranks import run_script

pytestmark = pytest.mark.process

PROGRAM = """
import os
from dataclasses import replace
from ddp_trainer import CheckpointConfig, DataConfig, Datasets, RunConfig, Trainer
from ddp_trainer.config.run import MetricsConfig
from torch.utils.data import IterableDataset
from tests.support.own_task import example

own = example()

class Uneven(IterableDataset):
    # Rank 0 has more than twice as many samples as rank 1.
    def __init__(self, count, seed, index=None):
        self.count, self.seed, self.index = count, seed, index
    def __len__(self):
        return self.count
    def shard(self, shards, index):
        return Uneven(self.count, self.seed, index)
    def __iter__(self):
        samples = own.samples(self.count, self.seed)
        cut = self.count * 7 // 10
        yield from (samples[i] for i in ([*range(cut)] if self.index == 0 else [*range(cut, self.count)]))

def fit(name, data, **more):
    checkpoint = CheckpointConfig(dir=f"{arguments[0]}/{name}", keep=99, every_steps=1)
    config = RunConfig(data=DataConfig(batch_size=16, workers=1, eval_batch_size=16), metrics=MetricsConfig(port=0),
                       checkpoint=checkpoint, **{"epochs": 2, **more})
    return Trainer(config, model=own.build, data=data, task=own.Regression()).fit()

mapped = Datasets(own.samples(200, 0), own.samples(50, 1))
streamed = Datasets(Uneven(200, 0), Uneven(50, 1))
for name, data in (("mapped", mapped), ("streamed", streamed)):
    whole = fit(name, data)
    fit(name + "-cut", data, max_steps=5)
    cut = fit(name + "-cut", data)
    assert whole.metrics == cut.metrics, (whole, cut)
    print(name, whole.steps, whole.metrics["rmse"])
    torch.save({"model": whole.model.state_dict(), "steps": whole.steps, "metrics": whole.metrics},
               f"{arguments[0]}/{name}-{world.rank}.pt")
"""


def test_user_task_and_data_end_together_on_two_ranks_and_resume_bitwise(tmp_path: Path) -> None:
    run_script(tmp_path, PROGRAM, 2)
    # 200 samples in batches of 16 on two ranks: 7 steps. Rank 1 has 60 samples of the stream, which are 4 batches.
    for name, steps in (("mapped", 14), ("streamed", 8)):
        first, second = (load(tmp_path / f"{name}-{rank}.pt") for rank in range(2))
        assert first["steps"] == steps
        assert same(first, second)
        last = f"step-{steps:09d}.pt"
        assert same(load(tmp_path / f"{name}-cut" / last)["engine"], load(tmp_path / name / last)["engine"])
    # Each sample once, although the shards differ: the root of the mean over all of them, by hand.
    from tests.support.own_task import example

    own = example()
    model = own.build()
    (inputs, targets) = own.samples(50, 1).tensors
    model.load_state_dict(load(tmp_path / "streamed-0.pt")["model"])
    with torch.no_grad():
        rmse = float((model(inputs) - targets).square().mean().sqrt())
    assert load(tmp_path / "streamed-0.pt")["metrics"]["rmse"] == pytest.approx(rmse, rel=1e-5)

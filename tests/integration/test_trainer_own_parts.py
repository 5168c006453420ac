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
from tests.support.own_task import example

own = example()

def fit(name, data, **more):
    checkpoint = CheckpointConfig(dir=f"{arguments[0]}/{name}", keep=99, every_steps=1)
    config = RunConfig(data=DataConfig(batch_size=16, workers=1, eval_batch_size=16), metrics=MetricsConfig(port=0),
                       checkpoint=checkpoint, **{"epochs": 2, **more})
    return Trainer(config, model=own.build, data=data, task=own.Regression()).fit()

data = Datasets(own.samples(200, 0), own.samples(50, 1))
whole = fit("whole", data)
fit("cut", data, max_steps=5)
cut = fit("cut", data)
assert whole.metrics == cut.metrics, (whole, cut)
torch.save({"model": whole.model.state_dict(), "steps": whole.steps, "metrics": whole.metrics},
           f"{arguments[0]}/{world.rank}.pt")
"""


def test_user_task_and_data_end_together_on_two_ranks_and_resume_bitwise(tmp_path: Path) -> None:
    run_script(tmp_path, PROGRAM, 2)
    # 200 samples in batches of 16 on two ranks: 7 steps.
    first, second = (load(tmp_path / f"{rank}.pt") for rank in range(2))
    assert first["steps"] == 14
    assert same(first, second)
    last = "step-000000014.pt"
    assert same(load(tmp_path / "cut" / last)["engine"], load(tmp_path / "whole" / last)["engine"])
    # Each sample once: the root of the mean over all of them, by hand.
    from tests.support.own_task import example

    own = example()
    model = own.build()
    (inputs, targets) = own.samples(50, 1).tensors
    model.load_state_dict(first["model"])
    with torch.no_grad():
        rmse = float((model(inputs) - targets).square().mean().sqrt())
    assert first["metrics"]["rmse"] == pytest.approx(rmse, rel=1e-5)

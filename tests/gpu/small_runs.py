"""Small training runs of the tests in this folder: on a GPU, or with DDP_TEST_DEVICE=cpu on a CPU, as a rehearsal."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from ddp_sdk.rank_env import RankEnv
from ddp_trainer.api import Trainer
from ddp_trainer.cli import parse
from tests.support import PATIENCE
from tests.support.trainer_plugins import COLOURED

DEVICE = os.environ.get("DDP_TEST_DEVICE", "cuda")
BACKEND = "nccl" if DEVICE == "cuda" else "gloo"
on_device = [
    pytest.mark.gpu,
    pytest.mark.skipif(DEVICE == "cuda" and not torch.cuda.is_available(), reason="torch sees no GPU"),
]
gpu_only = pytest.mark.skipif(DEVICE != "cuda", reason="needs a GPU")
RUN = [
    "--data", COLOURED, "--batch-size", "20", "--lr", "0.05", "--epochs", "6", "--device", DEVICE,
    "--metrics-port", "0", "--checkpoint-keep", "99",
]  # fmt: skip
SMALL = [*RUN, "--model", "small-resnet", "--model-width", "8"]


def train(folder: Path, *options: str, base: Sequence[str] = SMALL) -> dict[str, torch.Tensor]:
    """Train in this process; return the weights."""
    Trainer(parse([*base, *options, "--checkpoint-dir", str(folder)]), env=RankEnv()).fit()
    return load_weights(folder)


def assert_cut_run_ends_in_same_weights(folder: Path, *options: str) -> None:
    """Train without and with an interruption after 7 steps, and compare the weights bit by bit."""
    whole = train(folder / "whole", *options)
    train(folder / "cut", *options, "--max-steps", "7")
    resumed = train(folder / "cut", *options)
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def train_in_process(folder: Path, *options: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Train in a separate process, which may be killed."""
    command = [sys.executable, "-m", "ddp_trainer", *SMALL, *options, "--checkpoint-dir", str(folder)]
    return subprocess.run(
        command,
        env={**os.environ, **environ},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=PATIENCE,
    )


def load_weights(folder: Path) -> dict[str, torch.Tensor]:
    """Return the weights at the end of a run."""
    weights: dict[str, torch.Tensor] = torch.load(folder / "model.pt", weights_only=True)
    return weights


def accuracy(folder: Path) -> float:
    """Return the accuracy of the newest checkpoint."""
    return float(json.loads(max(folder.glob("step-*.json")).read_text())["accuracy"])

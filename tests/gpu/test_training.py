"""Training on a GPU: number formats, exact resumption, torch.compile."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.gpu.small_runs import (
    RUN,
    SMALL,
    accuracy,
    assert_cut_run_ends_in_same_weights,
    gpu_only,
    on_device,
    train,
)

pytestmark = on_device


@pytest.mark.parametrize(
    "precision",
    ["fp32", "bf16", "auto", pytest.param("fp16", marks=gpu_only)],
)
def test_run_learns_in_every_precision(precision: str, tmp_path: Path) -> None:
    train(tmp_path, "--precision", precision)
    assert accuracy(tmp_path) == 1.0


@gpu_only
def test_resnet50_preset_learns_with_gradient_scaler(tmp_path: Path) -> None:
    options = ("--preset", "cifar10-resnet50", "--lr", "0.01", "--epochs", "25", "--precision", "fp16")
    train(tmp_path, *options, base=RUN)
    assert accuracy(tmp_path) >= 0.9


@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "novograd"])
def test_run_that_is_cut_ends_in_same_weights(optimizer: str, tmp_path: Path) -> None:
    options = ("--optimizer", optimizer, "--deterministic", "true", "--dropout", "0.2", "--augment", "crop,flip")
    assert_cut_run_ends_in_same_weights(tmp_path, *options)


@gpu_only
def test_scaled_loss_resumes_with_its_scale(tmp_path: Path) -> None:
    options = ("--precision", "fp16", "--deterministic", "true")
    assert_cut_run_ends_in_same_weights(tmp_path, *options)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_gradients_of_two_gpus_are_averaged_over_nccl(tmp_path: Path) -> None:
    from tests.support.trainer_ranks import train as train_ranks

    train_ranks(tmp_path, [*SMALL, "--checkpoint-dir", str(tmp_path)], 2)
    assert accuracy(tmp_path) == 1.0

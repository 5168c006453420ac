"""torch.compile on a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu.small_runs import accuracy, assert_cut_run_ends_in_same_weights, gpu_only, on_device, train

pytestmark = on_device


def test_compiled_step_learns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(tmp_path, "--compile", "true")
    assert accuracy(tmp_path) == 1.0
    assert "torch.compile: " in capsys.readouterr().out


@gpu_only
@pytest.mark.parametrize("options", [("--precision", "fp16"), ("--compile-mode", "reduce-overhead")])
def test_compiled_step_learns_with_gradient_scaler_or_cuda_graphs(tmp_path: Path, options: tuple[str, ...]) -> None:
    train(tmp_path, "--compile", "true", *options)
    assert accuracy(tmp_path) == 1.0


@gpu_only
def test_compiled_run_that_is_cut_ends_in_same_weights(tmp_path: Path) -> None:
    options = ("--compile", "true", "--deterministic", "true")
    assert_cut_run_ends_in_same_weights(tmp_path, *options)

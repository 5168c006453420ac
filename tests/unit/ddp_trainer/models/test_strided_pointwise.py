"""Strided 1x1 convolutions of few channels on CPUs: equal results without oneDNN's defect."""

from __future__ import annotations

import subprocess
import sys
from ctypes.util import find_library
from pathlib import Path

import pytest
import torch
from torch import nn

from ddp_trainer.models.layers import SlicedConv2d, slice_before_narrow_convolutions
from tests.support import ROOT
from tests.support.trainer_plugins import COLOURED

# Checks the heap at every allocation and release; part of glibc 2.34 and later.
HEAP_CHECKER = find_library("c_malloc_debug")


@pytest.mark.parametrize("size", [7, 8])
@pytest.mark.parametrize("stride", [2, 3, (2, 1)])
@pytest.mark.parametrize("bias", [False, True])
def test_numbers_and_gradients_are_those_of_convolution(size: int, stride: int | tuple[int, int], bias: bool) -> None:
    torch.manual_seed(0)
    plain = nn.Conv2d(4, 8, 1, stride, bias=bias)
    sliced = nn.Conv2d(4, 8, 1, stride, bias=bias)
    sliced.load_state_dict(plain.state_dict())
    weights = list(sliced.parameters())
    sliced.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    slice_before_narrow_convolutions(sliced)
    assert type(sliced) is SlicedConv2d
    assert all(item is second for item, second in zip(weights, sliced.parameters(), strict=True))
    images = torch.randn(5, 4, size, size)
    inputs = [images.clone().requires_grad_(), images.to(memory_format=torch.channels_last).requires_grad_()]
    outputs = [module(image) for module, image in zip((plain, sliced), inputs, strict=True)]
    for output in outputs:
        output.square().sum().backward()
    torch.testing.assert_close(outputs[1], outputs[0])
    torch.testing.assert_close(inputs[1].grad, inputs[0].grad)
    torch.testing.assert_close([p.grad for p in sliced.parameters()], [p.grad for p in plain.parameters()])


@pytest.mark.parametrize(
    "other",
    [
        nn.Conv2d(16, 8, 1, 2), nn.Conv2d(4, 8, 3, 2), nn.Conv2d(4, 8, 1), nn.Conv2d(4, 8, 1, 2, padding=1),
        nn.Conv2d(4, 8, 1, 2, groups=2),
    ],
    ids=["wide", "3x3", "no-stride", "padded", "grouped"],
)  # fmt: skip
def test_other_convolutions_are_not_replaced(other: nn.Module) -> None:
    model = nn.Sequential(other)
    slice_before_narrow_convolutions(model)
    assert type(model[0]) is nn.Conv2d


@pytest.mark.nightly
@pytest.mark.skipif(HEAP_CHECKER is None, reason="glibc's libc_malloc_debug is not installed")
def test_channels_last_run_keeps_heap_intact(tmp_path: Path) -> None:
    arguments = (
        "--data", COLOURED, "--model", "small-resnet", "--model-width", "4", "--batch-size", "25", "--epochs", "4",
        "--lr", "0.05", "--device", "cpu", "--channels-last", "true", "--output-dir", str(tmp_path),
    )  # fmt: skip
    command = [sys.executable, "-m", "ddp_trainer", *arguments]
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "2", "MALLOC_CHECK_": "3"}
    ran = subprocess.run(
        command,
        env={**environment, "LD_PRELOAD": str(HEAP_CHECKER)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-2000:]

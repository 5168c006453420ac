"""The available number formats on each device, and the order of operations in a scaled step."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from ddp_trainer.errors import UserError
from ddp_trainer.precision import (
    Precision,
    PrecisionConfig,
    cpu_has_bf16,
)

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _switches(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Restore torch's global switches."""
    cudnn = torch.backends.cudnn
    matmul = torch.backends.cuda.matmul
    utils = cast("Any", torch.utils.deterministic)
    kept = (matmul.allow_tf32, cudnn.allow_tf32, cudnn.deterministic, cudnn.benchmark, utils.fill_uninitialized_memory)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")  # to restore it afterwards
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    yield
    torch.use_deterministic_algorithms(False)
    (
        matmul.allow_tf32,
        cudnn.allow_tf32,
        cudnn.deterministic,
        cudnn.benchmark,
        utils.fill_uninitialized_memory,
    ) = kept


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("processor: 0\nflags\t\t: fpu avx512f avx512_bf16 sse\n", True),
        ("processor: 0\nflags\t\t: fpu amx_bf16 amx_tile\n", True),
        ("processor: 0\nflags\t\t: fpu avx2 avx512f\n", False),
        ("Features\t: fp asimd bf16 i8mm\n", True),
        ("Features\t: fp asimd\n", False),
        ("", False),
    ],
)
def test_processor_support_decides_bf16(tmp_path: Path, text: str, expected: bool) -> None:
    path = tmp_path / "cpuinfo"
    path.write_text(text)
    assert cpu_has_bf16(path) == expected
    assert not cpu_has_bf16(tmp_path / "missing")


@pytest.mark.parametrize("fast", [True, False])
def test_auto_uses_bf16_only_where_fast_and_explicit_choice_is_kept(
    fast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ddp_trainer.precision.cpu_has_bf16", lambda: fast)
    auto = Precision(PrecisionConfig(name="auto"), CPU)
    assert (auto.name, auto.dtype) == (("bf16", torch.bfloat16) if fast else ("fp32", None))
    assert auto.warning == ""
    asked = Precision(PrecisionConfig(name="bf16"), CPU)
    assert asked.dtype == torch.bfloat16
    assert bool(asked.warning) != fast
    with asked.autocast():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16


class CallLog:
    """Records the order of its calls; a stand-in for a GPU's scaler and for the optimizer."""

    def __init__(self, calls: list[str]) -> None:
        self.calls = calls

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> Any:
            self.calls.append(name)
            return arguments[0] * 8 if name == "scale" else None

        return call


def test_scaled_step_scales_unscales_clips_steps_and_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    precision = Precision(PrecisionConfig(), CPU)
    precision.scaler = CallLog(calls)
    monkeypatch.setattr("torch.nn.utils.clip_grad_norm_", lambda *_: calls.append("clip"))
    weight = torch.ones(1, requires_grad=True)
    precision.backward((weight * 3).sum())
    assert weight.grad is not None
    assert float(weight.grad) == 24.0
    precision.step(CallLog(calls), [weight], 1.0)  # type: ignore[arg-type]
    assert calls == ["scale", "unscale_", "clip", "step", "update"]


def test_nonfinite_scaled_step_is_skipped_and_scale_is_saved() -> None:
    # torch's own scaler, which also works on a CPU.
    precision = Precision(PrecisionConfig(), CPU)
    second = Precision(PrecisionConfig(), CPU)
    for item in (precision, second):
        item.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    weight = torch.ones(1, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)

    def step(value: float) -> float | None:
        optimizer.zero_grad()
        precision.backward((weight * value).sum())
        norm = precision.step(optimizer, [weight], 1.0)
        return None if norm is None else float(norm)

    assert step(5.0) == 5.0  # unscaled, and then clipped to 1
    assert weight.item() == pytest.approx(0.9)
    step(float("inf"))
    assert weight.item() == pytest.approx(0.9)
    assert precision.state_dict()["scale"] == 512.0
    second.load_state_dict(precision.state_dict())
    assert second.state_dict() == precision.state_dict()
    assert Precision(PrecisionConfig(), CPU).state_dict() == {}


@pytest.mark.parametrize(
    ("name", "products", "convolutions", "dtype"),
    [
        ("fp32", False, False, None),
        ("torch", False, True, None),
        ("bf16", True, True, torch.bfloat16),
        ("auto", True, True, torch.bfloat16),
    ],
)
def test_on_gpu_format_sets_backends_switches(
    name: str, products: bool, convolutions: bool, dtype: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: True)
    cudnn = torch.backends.cudnn
    matmul = torch.backends.cuda.matmul
    precision = Precision(PrecisionConfig(name=name, deterministic=name == "fp32"), torch.device("cuda", 0))
    assert (matmul.allow_tf32, cudnn.allow_tf32) == (products, convolutions)
    assert (cudnn.deterministic, cudnn.benchmark) == (name == "fp32", name != "fp32")
    assert precision.dtype == dtype
    assert precision.scaler is None


def test_default_is_torchs_on_gpu_and_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: True)
    monkeypatch.setattr("ddp_trainer.precision.cpu_has_bf16", lambda: True)
    for device in (torch.device("cuda", 0), CPU):
        precision = Precision(PrecisionConfig(), device)
        assert (precision.name, precision.dtype, precision.memory_format) == ("torch", None, torch.contiguous_format)
    assert (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32) == (False, True)
    assert torch.get_float32_matmul_precision() == "highest"  # raises where old and new switches are mixed


def test_layout_is_that_of_setting() -> None:
    assert Precision(PrecisionConfig(channels_last=True), CPU).memory_format == torch.channels_last


def test_bf16_is_refused_where_gpu_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: False)
    with pytest.raises(UserError, match="this GPU has no bf16; use fp16 or fp32"):
        Precision(PrecisionConfig(name="bf16"), torch.device("cuda", 0))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_deterministic_configures_torch_and_names_exceptions(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: True)
    Precision(PrecisionConfig(), torch.device(device, 0))
    assert not torch.are_deterministic_algorithms_enabled()
    Precision(PrecisionConfig(deterministic=True), torch.device(device, 0))
    assert torch.are_deterministic_algorithms_enabled()
    assert torch.is_deterministic_algorithms_warn_only_enabled()
    assert ("CUBLAS_WORKSPACE_CONFIG" in os.environ) == (device == "cuda")
    with pytest.warns(UserWarning, match="does not have a deterministic implementation"):
        torch.ones(4).put_(torch.tensor([0, 0]), torch.ones(2))

"""The available number formats on each device, and the order of operations in a scaled step."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from ddp_sdk.errors import UserError
from ddp_trainer.precision import Precision, PrecisionConfig, cpu_has_bf16

CPU = torch.device("cpu")
GPU = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def _switches(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Restore torch's global switches."""
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: True)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")  # to restore it afterwards
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    cudnn = torch.backends.cudnn
    utils = cast("Any", torch.utils.deterministic)
    kept = (cudnn.deterministic, cudnn.benchmark, utils.fill_uninitialized_memory)
    yield
    torch.use_deterministic_algorithms(False)
    cudnn.deterministic, cudnn.benchmark, utils.fill_uninitialized_memory = kept


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("processor: 0\nflags\t\t: fpu avx512f avx512_bf16 sse\n", True),
        ("processor: 0\nflags\t\t: fpu amx_bf16 amx_tile\n", True),
        ("processor: 0\nflags\t\t: fpu avx2 avx512f\n", False),
        ("Features\t: fp asimd bf16 i8mm\n", True),
        ("Features\t: fp asimd\n", False),
        ("", False),
        (None, False),
    ],
)
def test_processor_support_decides_bf16(tmp_path: Path, text: str | None, expected: bool) -> None:
    path = tmp_path / "cpuinfo"
    if text is not None:
        path.write_text(text)
    assert cpu_has_bf16(path) == expected


@pytest.mark.parametrize(
    ("name", "device", "fast", "dtype"),
    [
        ("fp32", CPU, True, None),
        ("fp32", GPU, True, None),
        ("auto", CPU, True, torch.bfloat16),
        ("auto", CPU, False, None),
        ("auto", GPU, False, torch.bfloat16),
        ("bf16", CPU, False, torch.bfloat16),
        ("bf16", CPU, True, torch.bfloat16),
        ("bf16", GPU, True, torch.bfloat16),
    ],
)
def test_device_decides_automatic_format_and_a_named_slow_one_warns(
    name: str, device: torch.device, fast: bool, dtype: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ddp_trainer.precision.cpu_has_bf16", lambda: fast)
    precision = Precision(PrecisionConfig(name=name), device)
    assert (precision.dtype, precision.scaler) == (dtype, None)
    assert bool(precision.warning) == (name == "bf16" and not fast)
    if device == CPU:
        with precision.autocast():
            assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == (dtype or torch.float32)


def test_format_that_device_lacks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="fp16 needs a GPU"):
        Precision(PrecisionConfig(name="fp16"), CPU)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: False)
    with pytest.raises(UserError, match="this GPU has no bf16; use fp16 or fp32"):
        Precision(PrecisionConfig(name="bf16"), GPU)


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
    precision, second = (Precision(PrecisionConfig(), CPU) for _ in range(2))
    for item in (precision, second):
        item.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    weight = torch.ones(1, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for value, norm in ((5.0, 5.0), (float("inf"), float("inf"))):  # unscaled, and then clipped to 1
        optimizer.zero_grad()
        precision.backward((weight * value).sum())
        assert float(precision.step(optimizer, [weight], 1.0)) == norm  # type: ignore[arg-type]
        assert weight.item() == pytest.approx(0.9)
    assert precision.state_dict()["scale"] == 512.0
    second.load_state_dict(precision.state_dict())
    assert second.state_dict() == precision.state_dict()
    assert Precision(PrecisionConfig(), CPU).state_dict() == {}


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("device", [CPU, GPU], ids=("cpu", "cuda"))
def test_deterministic_configures_torch_and_names_exceptions(device: torch.device, deterministic: bool) -> None:
    torch.backends.cudnn.benchmark = False
    precision = Precision(PrecisionConfig(deterministic=deterministic, channels_last=deterministic), device)
    assert precision.memory_format == (torch.channels_last if deterministic else torch.contiguous_format)
    assert torch.are_deterministic_algorithms_enabled() == deterministic
    assert ("CUBLAS_WORKSPACE_CONFIG" in os.environ) == (device == GPU and deterministic)
    assert torch.backends.cudnn.benchmark == (device == GPU and not deterministic)
    if deterministic:
        with pytest.warns(UserWarning, match="does not have a deterministic implementation"):
            torch.ones(4).put_(torch.tensor([0, 0]), torch.ones(2))

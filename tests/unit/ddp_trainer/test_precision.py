"""Which number formats are had where, and in which order a scaled step happens."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn

from ddp_trainer.distributed import DistributedConfig, RankEnv
from ddp_trainer.distributed.ddp import check, uses_gloo
from ddp_trainer.distributed.world import World
from ddp_trainer.errors import UserError
from ddp_trainer.precision import Precision, PrecisionConfig, check_graphs, cpu_has_bf16, graph_warning

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _switches(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Put torch's global switches back."""
    cudnn, matmul, utils = torch.backends.cudnn, torch.backends.cuda.matmul, cast("Any", torch.utils.deterministic)
    kept = (matmul.allow_tf32, cudnn.allow_tf32, cudnn.deterministic, cudnn.benchmark, utils.fill_uninitialized_memory)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")  # so that it is what it was afterwards
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
def test_the_processor_is_asked_for_bf16(tmp_path: Path, text: str, expected: bool) -> None:
    path = tmp_path / "cpuinfo"
    path.write_text(text)
    assert cpu_has_bf16(path) == expected
    assert not cpu_has_bf16(tmp_path / "missing")


@pytest.mark.parametrize("fast", [True, False])
def test_auto_takes_bf16_only_where_it_is_fast_and_an_explicit_wish_is_honoured(
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


class Recorded:
    """Writes down in which order it is asked; stands for a GPU's scaler, and for the optimiser."""

    def __init__(self, calls: list[str]) -> None:
        self.calls = calls

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> Any:
            self.calls.append(name)
            return arguments[0] * 8 if name == "scale" else None

        return call


def test_a_scaled_step_scales_unscales_clips_steps_and_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    precision = Precision(PrecisionConfig(), CPU)
    precision.scaler = Recorded(calls)
    monkeypatch.setattr("torch.nn.utils.clip_grad_norm_", lambda *_: calls.append("clip"))
    weight = torch.ones(1, requires_grad=True)
    precision.backward((weight * 3).sum())
    assert weight.grad is not None
    assert float(weight.grad) == 24.0
    precision.step(Recorded(calls), [weight], 1.0)  # type: ignore[arg-type]
    assert calls == ["scale", "unscale_", "clip", "step", "update"]


def test_a_scaled_step_that_is_not_finite_is_left_out_and_the_scale_survives_a_save() -> None:
    # torch's own scaler, which also works on a CPU.
    precision, other = Precision(PrecisionConfig(), CPU), Precision(PrecisionConfig(), CPU)
    for one in (precision, other):
        one.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
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
    other.load_state_dict(precision.state_dict())
    assert other.state_dict() == precision.state_dict()
    assert Precision(PrecisionConfig(), CPU).state_dict() == {}


@pytest.mark.parametrize(
    ("name", "products", "convolutions", "dtype"),
    [
        ("fp32", False, False, None),
        ("torch", False, True, None),
        ("tf32", True, True, None),
        ("bf16", True, True, torch.bfloat16),
        ("auto", True, True, torch.bfloat16),
    ],
)
def test_on_a_gpu_the_format_sets_the_backends_switches(
    name: str, products: bool, convolutions: bool, dtype: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: True)
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    one = Precision(PrecisionConfig(name=name, deterministic=name == "fp32"), torch.device("cuda", 0))
    assert (matmul.allow_tf32, cudnn.allow_tf32) == (products, convolutions)
    assert (cudnn.deterministic, cudnn.benchmark) == (name == "fp32", name != "fp32")
    assert one.dtype == dtype
    assert one.scaler is None


def test_bf16_is_refused_where_the_gpu_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: False)
    with pytest.raises(UserError, match="this GPU has no bf16; use fp16 or fp32"):
        Precision(PrecisionConfig(name="bf16"), torch.device("cuda", 0))


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
def test_gradients_are_not_accumulated_from_cuda_graphs(mode: str) -> None:
    config, gpu = PrecisionConfig(compile=True, compile_mode=mode), torch.device("cuda", 0)
    with pytest.raises(UserError, match=f"precision.compile_mode: {mode} replays CUDA graphs"):
        check_graphs(config, 2, gpu)
    check_graphs(config, 1, gpu)
    check_graphs(config, 2, CPU)
    check_graphs(PrecisionConfig(compile_mode=mode), 2, gpu)
    check_graphs(PrecisionConfig(compile=True), 2, gpu)


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
def test_cuda_graphs_that_ddp_and_batch_norm_prevent_are_warned_of(mode: str) -> None:
    config, gpu = PrecisionConfig(compile=True, compile_mode=mode), torch.device("cuda", 0)
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    assert f"--compile-mode {mode} replays no CUDA graphs for batch norm" in graph_warning(config, model, 2, gpu)
    assert graph_warning(config, nn.Sequential(nn.Linear(2, 2), nn.GroupNorm(1, 2)), 2, gpu) == ""
    assert graph_warning(config, model, 1, gpu) == ""
    assert graph_warning(config, model, 2, CPU) == ""
    assert graph_warning(PrecisionConfig(compile=True), model, 2, gpu) == ""
    assert graph_warning(PrecisionConfig(compile_mode=mode), model, 2, gpu) == ""


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_deterministic_asks_torch_for_it_and_names_what_is_left(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: True)
    Precision(PrecisionConfig(), torch.device(device, 0))
    assert not torch.are_deterministic_algorithms_enabled()
    Precision(PrecisionConfig(deterministic=True), torch.device(device, 0))
    assert torch.are_deterministic_algorithms_enabled()
    assert torch.is_deterministic_algorithms_warn_only_enabled()
    assert ("CUBLAS_WORKSPACE_CONFIG" in os.environ) == (device == "cuda")
    with pytest.warns(UserWarning, match="does not have a deterministic implementation"):
        torch.ones(4).put_(torch.tensor([0, 0]), torch.ones(2))


def test_powersgd_on_gloo_is_refused() -> None:
    config = DistributedConfig(compression="powersgd")
    assert uses_gloo(config, CPU)
    assert not uses_gloo(config, torch.device("cuda", 0))
    check(config, World(RankEnv(), torch.device("cuda", 0)))
    with pytest.raises(UserError, match="PowerSGD needs nccl"):
        check(config, World(RankEnv(), CPU))

"""The optimizers against torch's and timm's, their groups and their states."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from ddp_trainer.optim import OptimConfig, build_optimizer, load_optimizer
from ddp_trainer.optim.novograd import NovoGrad
from tests.support.lazy import Lazy

timm = Lazy("timm.optim")


def tensors() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in ((5, 3), (7,), (2, 3, 4), ())]


def give_gradients(weights: list[Tensor], step: int) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for weight in weights:
        weight.grad = torch.randn(weight.shape, generator=generator) * (1 + step)


@pytest.mark.parametrize("zeros", [False, True], ids=("gradients", "zeros-first"))
@pytest.mark.parametrize("averaging", [False, True])
@pytest.mark.parametrize("decay", [0.0, 0.01])
@pytest.mark.parametrize("betas", [(0.95, 0.98), (0.9, 0.5)])
def test_novograd_is_timms(zeros: bool, averaging: bool, decay: float, betas: tuple[float, float]) -> None:
    ours = tensors()
    theirs = tensors()
    settings = {"lr": 0.05, "betas": betas, "weight_decay": decay, "grad_averaging": averaging}
    optimizers = NovoGrad(ours, **settings), timm.NvNovoGrad(theirs, **settings)
    for step in range(20):
        for weights, optimizer in zip((ours, theirs), optimizers, strict=True):
            give_gradients(weights, step)
            for weight in weights if zeros and step == 0 else ():
                weight.grad = torch.zeros_like(weight)
            optimizer.step()
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_novograd_skips_weights_without_gradient() -> None:
    weights = tensors()
    give_gradients(weights, 0)
    weights[1].grad = None
    before = weights[1].detach().clone()
    NovoGrad(weights, lr=0.1).step()
    assert torch.equal(weights[1], before)
    assert not torch.equal(weights[0], tensors()[0])


def test_novograd_resumes_bitwise_from_state() -> None:
    whole = tensors()
    first = tensors()
    optimizers = NovoGrad(whole, lr=0.1), NovoGrad(first, lr=0.1)
    for step in range(4):
        if step == 3:
            resumed = NovoGrad(first, lr=9.0)
            resumed.load_state_dict(optimizers[1].state_dict())
            optimizers = optimizers[0], resumed
        for weights, optimizer in zip((whole, first), optimizers, strict=True):
            give_gradients(weights, step)
            optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(whole, first, strict=True))


@pytest.mark.parametrize("fused", [True, False])
def test_step_count_is_moved_to_its_device(fused: bool) -> None:
    # A fused optimizer counts its steps on the parameters' device, as float32; others leave the counts unchanged.
    weights = tensors()
    saved = torch.optim.AdamW(weights, fused=False)
    give_gradients(weights, 0)
    saved.step()
    for entry in saved.state.values():
        entry["step"] = entry["step"].double()
    resumed = torch.optim.AdamW(tensors(), fused=fused)
    load_optimizer(resumed, saved.state_dict())
    assert {entry["step"].dtype for entry in resumed.state.values()} == {torch.float32 if fused else torch.float64}
    assert resumed.param_groups[0]["fused"] is fused


@pytest.mark.parametrize(
    ("config", "betas"),
    [
        (OptimConfig(name="adamw"), (0.9, 0.999)),
        (OptimConfig(name="novograd"), (0.95, 0.98)),
        (OptimConfig(name="novograd", beta1=0.5, beta2=0.0), (0.5, 0.0)),
    ],
)
def test_each_optimizer_has_its_own_default_betas(config: OptimConfig, betas: tuple[float, float]) -> None:
    built = build_optimizer(config, tensors())  # type: ignore[arg-type]
    assert built.defaults["betas"] == betas
    assert built.defaults.get("grad_averaging", True)


@pytest.mark.parametrize(
    ("config", "reference"),
    [
        (OptimConfig(momentum=0.8), lambda weights: torch.optim.SGD(weights, momentum=0.8)),
        (OptimConfig(nesterov=True), lambda weights: torch.optim.SGD(weights, momentum=0.9, nesterov=True)),
        (OptimConfig(weight_decay=0.1), lambda weights: torch.optim.SGD(weights, momentum=0.9, weight_decay=0.1)),
        (OptimConfig(name="adamw"), lambda weights: torch.optim.AdamW(weights, weight_decay=0.0)),
        (
            OptimConfig(name="adamw", beta1=0.5, beta2=0.7, weight_decay=0.1),
            lambda weights: torch.optim.AdamW(weights, betas=(0.5, 0.7), weight_decay=0.1),
        ),
    ],
    ids=("momentum", "nesterov", "weight-decay", "adamw", "betas"),
)
def test_every_setting_reaches_torchs_optimizer(
    config: OptimConfig, reference: Callable[[list[Tensor]], torch.optim.Optimizer]
) -> None:
    ours = tensors()
    theirs = tensors()
    optimizers = build_optimizer(config, ours), reference(theirs)  # type: ignore[arg-type]
    for step in range(3):
        for weights, optimizer in zip((ours, theirs), optimizers, strict=True):
            give_gradients(weights, step)
            optimizer.param_groups[0]["lr"] = 0.05
            optimizer.step()
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("name", ["sgd", "adamw", "novograd"])
def test_norms_and_biases_are_not_decayed_if_configured(name: str) -> None:
    whole, split = (nn.Sequential(nn.Conv2d(2, 3, 1), nn.BatchNorm2d(3), nn.Linear(3, 2)) for _ in range(2))
    split.load_state_dict(whole.state_dict())
    for model, apart in ((whole, False), (split, True)):
        config = OptimConfig(name=name, lr=0.1, weight_decay=0.5, norm_bias_decay=not apart)
        optimizer = build_optimizer(config, model.parameters())
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
    fresh = dict(whole.named_parameters())
    for key, parameter in split.named_parameters():
        if key in ("0.weight", "2.weight"):
            assert torch.equal(parameter, fresh[key])
        elif key == "1.weight":  # the average of the norm starts at one, and zero gradients do not change it
            assert torch.equal(parameter, torch.ones(3))
            assert not torch.equal(fresh[key], parameter)
    assert [len(group["params"]) for group in optimizer.param_groups] == [2, 4]
    only = build_optimizer(OptimConfig(norm_bias_decay=False), [nn.Parameter(torch.zeros(2))])
    assert [group["weight_decay"] for group in only.param_groups] == [0.0]

"""NovoGrad against timm's, the average of the weights, and clipping and scaling around them."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from ddp_trainer.optim import OptimConfig, Schedule, ScheduleConfig, build_optimizer, load_optimizer, novograd
from ddp_trainer.optim.novograd import NovoGrad
from tests.support.launches import counted
from tests.support.lazy import Lazy

timm = Lazy("timm.optim")


def tensors() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in ((5, 3), (7,), (2, 3, 4), ())]


def give_gradients(weights: list[Tensor], step: int) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for weight in weights:
        weight.grad = torch.randn(weight.shape, generator=generator) * (1 + step)


@pytest.mark.parametrize("averaging", [False, True])
@pytest.mark.parametrize("decay", [0.0, 0.01])
@pytest.mark.parametrize("betas", [(0.95, 0.98), (0.9, 0.5)])
def test_novograd_is_timms(averaging: bool, decay: float, betas: tuple[float, float]) -> None:
    ours = tensors()
    theirs = tensors()
    settings = {"lr": 0.05, "betas": betas, "weight_decay": decay, "grad_averaging": averaging}
    mine = NovoGrad(ours, **settings)
    reference = timm.NvNovoGrad(theirs, **settings)
    for step in range(20):
        give_gradients(ours, step)
        give_gradients(theirs, step)
        mine.step()
        reference.step()
    for item, second in zip(ours, theirs, strict=True):
        torch.testing.assert_close(item, second, rtol=1e-5, atol=1e-6)


def test_novograd_starts_correctly_after_zero_gradients() -> None:
    ours = tensors()
    theirs = tensors()
    mine = NovoGrad(ours, lr=0.1)
    reference = timm.NvNovoGrad(theirs, lr=0.1)
    for weights, optimizer in ((ours, mine), (theirs, reference)):
        for weight in weights:
            weight.grad = torch.zeros_like(weight)
        optimizer.step()
        give_gradients(weights, 1)
        optimizer.step()
    for item, second in zip(ours, theirs, strict=True):
        torch.testing.assert_close(item, second)


def test_novograd_skips_weights_without_gradient() -> None:
    weights = tensors()
    give_gradients(weights, 0)
    weights[1].grad = None
    before = weights[1].detach().clone()
    NovoGrad(weights, lr=0.1).step()
    assert torch.equal(weights[1], before)
    assert not torch.equal(weights[0], tensors()[0])


def test_optimizer_state_is_moved_to_its_device() -> None:
    # A fused optimizer counts its steps on the parameters' device, as float32; others leave the counts unchanged.
    def state() -> dict[str, object]:
        saved = torch.optim.AdamW(first, fused=False)
        give_gradients(first, 0)
        saved.step()
        for entry in saved.state.values():
            entry["step"] = entry["step"].double()
        return saved.state_dict()

    first = tensors()
    for fused, dtype in ((True, torch.float32), (False, torch.float64)):
        resumed = torch.optim.AdamW(tensors(), fused=fused)
        load_optimizer(resumed, state())
        assert {entry["step"].dtype for entry in resumed.state.values()} == {dtype}
        assert resumed.param_groups[0]["fused"] is fused


def test_novograd_resumes_bitwise_from_state() -> None:
    whole = tensors()
    first = tensors()
    novo_grad = NovoGrad(whole, lr=0.1)
    second = NovoGrad(first, lr=0.1)
    for step in range(3):
        for weights, optimizer in ((whole, novo_grad), (first, second)):
            give_gradients(weights, step)
            optimizer.step()
    resumed = NovoGrad(first, lr=9.0)
    resumed.load_state_dict(second.state_dict())
    for weights, optimizer in ((whole, novo_grad), (first, resumed)):
        give_gradients(weights, 3)
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(whole, first, strict=True))


def layouts() -> list[Tensor]:
    """Tensors in the layouts of gradients, and one with gaps."""
    images = torch.randn(4, 3, 2, 2, generator=torch.Generator().manual_seed(1))
    gaps = torch.randn(4, 6, generator=torch.Generator().manual_seed(2))[:, ::2]
    return [*tensors(), images.to(memory_format=torch.channels_last).requires_grad_(), gaps.requires_grad_()]


@pytest.mark.parametrize("found", [None, 0.0, 1.0])
def test_novograd_on_gpu_equals_cpu(found: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = layouts()
    theirs = layouts()
    optimizers = [NovoGrad(weights, lr=0.1, weight_decay=0.01) for weights in (ours, theirs)]
    for step in range(3):
        for weights, optimizer, launches in zip((ours, theirs), optimizers, (True, False), strict=True):
            monkeypatch.setattr(novograd, "_launches", lambda device, launches=launches: launches)
            give_gradients(weights, step)
            for weight in weights:
                assert weight.grad is not None
                weight.grad = torch.empty_like(weight).copy_(weight.grad)  # in the weight's own layout
            if found is not None:
                optimizer.grad_scale = torch.tensor(2.0)
                optimizer.found_inf = torch.tensor(found)  # type: ignore[attr-defined]
            optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert found != 1.0 or all(torch.equal(a, b) for a, b in zip(ours, layouts(), strict=True))


@pytest.mark.parametrize("scaled", [False, True])
def test_novograd_launches_are_independent_of_number_of_tensors(scaled: bool) -> None:
    counts = []
    for number in (3, 30):
        weights = [torch.zeros(number, item + 1, device="meta", requires_grad=True) for item in range(number)]
        optimizer = NovoGrad(weights, weight_decay=0.1)
        if scaled:
            optimizer.grad_scale = optimizer.found_inf = torch.zeros((), device="meta")  # type: ignore[attr-defined]
        for weight in weights:
            weight.grad = torch.zeros_like(weight)
        optimizer.step()
        counts.append(counted(optimizer.step))
    assert counts[0] == counts[1] < 40, counts


@pytest.mark.parametrize("found", [0.0, 1.0])
def test_novograd_follows_gradient_scaler_without_host_sync(found: float) -> None:
    # A scaler passes its scale and a flag for values that are not finite, both on the device.
    weights = tensors()
    plain = tensors()
    scaled = NovoGrad(weights, lr=0.1)
    optimizer = NovoGrad(plain, lr=0.1)
    give_gradients(weights, 0)
    give_gradients(plain, 0)
    scaled.step()
    optimizer.step()
    before = [weight.detach().clone() for weight in weights]
    kept = [state["exp_avg"].clone() for state in scaled.state.values()]
    give_gradients(weights, 1)
    give_gradients(plain, 1)
    for weight in weights:
        assert weight.grad is not None
        weight.grad.mul_(1024.0)
    if found:
        assert weights[0].grad is not None
        weights[0].grad[0, 0] = math.inf
    scaled.grad_scale = torch.tensor(1024.0)
    scaled.found_inf = torch.tensor(found)  # type: ignore[attr-defined]
    scaled.step()
    optimizer.step()
    expected = before if found else plain
    for weight, second in zip(weights, expected, strict=True):
        torch.testing.assert_close(weight.detach(), second.detach())
    if found:
        assert all(torch.equal(state["exp_avg"], old) for state, old in zip(scaled.state.values(), kept, strict=True))


def test_each_optimiser_has_its_own_default_betas() -> None:
    assert OptimConfig(name="adamw").betas == (0.9, 0.999)
    assert OptimConfig(name="novograd").betas == (0.95, 0.98)
    assert OptimConfig(name="novograd", beta2=0.0).betas == (0.95, 0.0)
    built = build_optimizer(OptimConfig(name="novograd", beta1=0.5), tensors())  # type: ignore[arg-type]
    assert isinstance(built, NovoGrad)
    assert built.defaults["betas"] == (0.5, 0.98)
    assert built.defaults["grad_averaging"]


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
def test_every_setting_reaches_torchs_optimiser(
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
    for item, second in zip(ours, theirs, strict=True):
        torch.testing.assert_close(item, second)


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


# The schedule


@pytest.mark.parametrize("warmup", [0, 3])
@pytest.mark.parametrize("epochs", [7, 40])
def test_cosine_is_torchs(epochs: int, warmup: int) -> None:
    schedule = Schedule(ScheduleConfig(name="cosine", warmup_epochs=warmup), 0.07, 1.0, epochs)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.07)
    theirs = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=epochs - warmup)
    for epoch in range(warmup, epochs + 1):
        assert schedule.lr(epoch) == pytest.approx(theirs.get_last_lr()[0], rel=1e-12, abs=1e-15)
        optimizer.step()
        theirs.step()


def test_last_share_is_kept_and_rate_falls_between_epochs_as_well() -> None:
    schedule = Schedule(ScheduleConfig(name="cosine", final=0.1), 1.0, 1.0, 4.0)
    assert [schedule.lr(position) for position in (0.0, 2.0, 4.0, 5.0)] == pytest.approx([1.0, 0.55, 0.1, 0.1])
    assert schedule.lr(1.0) > schedule.lr(1.5) > schedule.lr(2.0)


# Warm-up as in the document


def test_published_warm_up_starts_at_rate_of_one_node_in_steps() -> None:
    config = ScheduleConfig(warmup_epochs=5.0, warmup_by_node=True, warmup_stairs=True)
    schedule = Schedule(config, 0.01, 1.0, 40.0, processes_per_node=4)
    # torch's LinearLR(start_factor=1/4, total_iters=5), stepped once an epoch.
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.01)
    linear = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=1 / 4, total_iters=5)
    for epoch in range(8):
        expected = optimizer.param_groups[0]["lr"]
        assert schedule.lr(epoch) == pytest.approx(expected)
        assert schedule.lr(epoch + 0.9) == pytest.approx(expected)
        optimizer.step()
        linear.step()


def test_warm_up_climbs_from_step_to_step_to_rate_of_whole_world() -> None:
    schedule = Schedule(ScheduleConfig(warmup_epochs=5.0), 0.01, 8.0, 40.0, processes_per_node=4)
    assert schedule.lr(0.0) == pytest.approx(0.01)
    assert schedule.lr(0.5) == pytest.approx(0.01 + 0.07 * 0.1)
    assert schedule.lr(5.0) == pytest.approx(0.08)

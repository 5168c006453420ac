"""Gradient checkpointing: the same gradients and statistics, with fewer values kept for the backward pass."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ddp_trainer.config.run import resolve
from ddp_trainer.errors import UserError
from ddp_trainer.models import MODELS, ModelConfig, build_model
from ddp_trainer.models.recomputed_blocks import RecomputedBlock, recompute_blocks
from ddp_trainer.optim.ema import Ema

# Model -> its settings, the shape of a batch, and the number of its blocks.
CASES: Mapping[str, tuple[Mapping[str, Any], tuple[int, ...], int]] = {
    "gpt": ({"width": 64}, (4, 32), 4),
    "small-resnet": ({"dropout": 0.2}, (16, 3, 16, 16), 3),
    "wide-resnet": ({"widen": 1, "dropout": 0.3}, (8, 3, 16, 16), 6),
    "resnet18": ({}, (8, 3, 32, 32), 8),
    "resnet50": ({}, (4, 3, 32, 32), 16),
    "deeplabv3_resnet50": ({}, (2, 3, 32, 32), 16),
    "deeplabv3_resnet101": ({}, (2, 3, 32, 32), 33),
}


def build(name: str, **more: Any) -> nn.Module:
    torch.manual_seed(0)
    settings, shape, _ = CASES[name]
    return build_model(ModelConfig(name=name, **settings, **more), 32 if name == "gpt" else shape[1], 10).train()


def draw_inputs(name: str) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    shape = CASES[name][1]
    return torch.randint(10, shape, generator=generator) if name == "gpt" else torch.rand(shape, generator=generator)


def take_step(model: nn.Module, inputs: Tensor) -> int:
    """Run forward and backward; return the bytes that the graph keeps between them."""
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    torch.manual_seed(2)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(inputs).float().square().mean()
    parameters = sum(parameter.untyped_storage().nbytes() for parameter in model.parameters())
    loss.backward()
    return sum(kept.values()) - parameters


def test_every_model_has_case() -> None:
    assert CASES.keys() == MODELS.keys()


@pytest.mark.parametrize("name", [name for name in CASES if name != "deeplabv3_resnet101"])
def test_gradients_and_statistics_equal_to_the_bit_with_fewer_kept_bytes(name: str) -> None:
    plain = build(name)
    recomputed = build(name, gradient_checkpointing=True)
    inputs = draw_inputs(name)
    plain_bytes = take_step(plain, inputs)
    recomputed_bytes = take_step(recomputed, inputs)
    gradients = dict(recomputed.named_parameters())
    for parameter_name, parameter in plain.named_parameters():
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, gradients[parameter_name].grad), parameter_name  # type: ignore[arg-type]
    buffers = dict(recomputed.named_buffers())
    for buffer_name, buffer in plain.named_buffers():
        assert torch.equal(buffer, buffers[buffer_name]), buffer_name
    assert recomputed_bytes < 0.6 * plain_bytes


@pytest.mark.parametrize("name", CASES)
def test_all_blocks_are_recomputed_and_state_keeps_its_names(name: str) -> None:
    with torch.device("meta"):
        plain = build(name)
        recomputed = build(name, gradient_checkpointing=True)
    assert sum(isinstance(module, RecomputedBlock) for module in recomputed.modules()) == CASES[name][2]
    assert recomputed.state_dict().keys() == plain.state_dict().keys()


class CountedBlock(nn.Module):
    """Counts its forward passes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.passes = 0

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        linear: Tensor = self.linear(x)
        return linear.relu()


def test_only_training_computes_block_twice() -> None:
    model = nn.Sequential(CountedBlock())
    recompute_blocks(model, CountedBlock)
    recompute_blocks(model, CountedBlock)
    block = model[0]
    assert isinstance(block, CountedBlock)
    model(torch.zeros(1, 2)).sum().backward()
    assert block.passes == 2
    model.eval()
    model(torch.zeros(1, 2)).sum().backward()
    assert block.passes == 3
    model.train()
    with torch.no_grad():
        model(torch.zeros(1, 2))
    assert block.passes == 4


def test_average_of_weights_has_its_own_blocks() -> None:
    model = build("small-resnet", gradient_checkpointing=True)
    average = Ema(model, 0.5).model
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert average.eval()(draw_inputs("small-resnet")).abs().sum() > 0


def test_gradient_checkpointing_beside_compile_is_refused() -> None:
    with pytest.raises(UserError, match=r"model\.gradient_checkpointing: torch\.compile decides itself"):
        resolve(None, None, {"model": {"gradient_checkpointing": True}, "precision": {"compile": True}})

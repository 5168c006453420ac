"""Matrix products that replace convolutions: they are used, and the results are equal."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from ddp_trainer.models import ModelConfig, build_model
from ddp_trainer.models.cpu_convolutions import SmallMapConv2d, use_matrix_products

# side, kernel, stride, padding, and whether a matrix product replaces it
SHAPES = [
    (1, 3, 1, 1, True),
    (2, 3, 2, 1, True),
    (1, 1, 1, 0, True),
    (2, 1, 2, 0, True),
    (3, 7, 2, 3, False),
    (2, 7, 2, 3, True),
    (1, 5, 1, 3, True),
    (2, 5, 1, 3, False),
    (2, 3, 1, 1, True),
    (4, 1, 1, 0, True),
    (8, 1, 1, 0, True),
    (9, 1, 1, 0, False),
    (3, 3, 1, 1, False),
    (4, 3, 2, 1, False),
    (8, 3, 1, 1, False),
    (4, 1, 2, 0, False),
]


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Count ordinary convolutions."""
    calls: list[int] = []
    ordinary = nn.Conv2d.forward

    def forward(self: nn.Conv2d, input: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return ordinary(self, input)

    monkeypatch.setattr(nn.Conv2d, "forward", forward)
    return calls


@pytest.mark.parametrize(("side", "kernel", "stride", "padding", "short"), SHAPES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_values_and_gradients_are_convolutions(
    side: int, kernel: int, stride: int, padding: int, short: bool, bias: bool, layout: torch.memory_format,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    torch.manual_seed(0)
    plain = nn.Conv2d(5, 7, kernel, stride, padding, bias=bias).double()
    ours = nn.Conv2d(5, 7, kernel, stride, padding, bias=bias).double()
    ours.load_state_dict(plain.state_dict())
    use_matrix_products(ours)
    images = torch.randn(3, 5, side, side, dtype=torch.float64).contiguous(memory_format=layout)
    results = []
    calls = counted(monkeypatch)
    for module in (plain, ours):
        calls.clear()
        batch = images.clone().requires_grad_()
        output = module(batch)
        weights = torch.linspace(-1, 1, output.numel(), dtype=torch.float64).view(output.shape)
        (output * weights).sum().backward()
        results.append([output, batch.grad, *(parameter.grad for parameter in module.parameters())])
    assert (not calls) == short
    for item, second in zip(*results, strict=True):
        torch.testing.assert_close(item, second)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize(("side", "kernel"), [(1, 1), (4, 1), (2, 3)])
def test_gradients_have_memory_layout_of_weights(layout: torch.memory_format, side: int, kernel: int) -> None:
    """Otherwise DDP copies every gradient into its buckets, and warns."""
    layer = nn.Conv2d(5, 7, kernel, padding=kernel // 2)
    use_matrix_products(layer)
    layer.to(memory_format=layout)  # type: ignore[call-overload]
    layer(torch.randn(2, 5, side, side).contiguous(memory_format=layout)).sum().backward()
    assert layer.weight.grad is not None
    assert layer.weight.grad.stride() == layer.weight.stride()


def test_transposed_kernel_gets_its_gradient_too() -> None:
    layer = nn.Conv2d(5, 7, 1)
    layer.weight = nn.Parameter(torch.randn(5, 7, 1, 1).transpose(0, 1))
    use_matrix_products(layer)
    image = torch.randn(1, 5, 2, 2)
    layer(image).sum().backward()
    assert layer.weight.grad is not None
    torch.testing.assert_close(layer.weight.grad.flatten(1), image.sum((0, 2, 3)).expand(7, 5))


@pytest.mark.parametrize(
    "settings", [{"groups": 5}, {"dilation": 2}, {"padding_mode": "circular"}, {"padding": "same"}], ids=str
)
def test_other_convolutions_are_unchanged(settings: dict[str, Any]) -> None:
    layer = nn.Conv2d(5, 5, 3, **{"padding": 1, **settings})
    use_matrix_products(layer)
    assert type(layer) is nn.Conv2d


def test_resnet_gives_same_output_and_state_with_both_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    plain = build_model(ModelConfig(name="resnet18", small_maps=False), 3, 10)
    ours = build_model(ModelConfig(name="resnet18"), 3, 10)
    assert not any(isinstance(module, SmallMapConv2d) for module in plain.modules())
    ours.load_state_dict(plain.state_dict())
    images = torch.randn(4, 3, 32, 32)
    calls = counted(monkeypatch)
    expected = plain(images)
    ordinary = len(calls)
    calls.clear()
    torch.testing.assert_close(ours(images), expected, rtol=1e-4, atol=1e-4)
    # Layer 3 from its second convolution on, with 2x2 pixels, and all of layer 4.
    assert ordinary - len(calls) == 3 + 5

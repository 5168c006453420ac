"""Dropout by the gaps between the values that fall: torch's distribution, layouts and gradients."""

import math

import pytest
import torch
from torch import nn

from ddp_trainer.models.wide_resnet import SparseDropout, draw_positions


@pytest.mark.parametrize("probability", [0.001, 0.01, 0.1])
def test_every_place_falls_as_often_as_asked(probability: float) -> None:
    torch.manual_seed(0)
    count, turns = 1000, 400
    fallen = torch.zeros(count)
    for _ in range(turns):
        positions = draw_positions(count, probability)
        assert bool((positions.diff() > 0).all()), "in order, none twice"
        fallen[positions] += 1
    spread = math.sqrt(turns * probability * (1 - probability))
    assert abs(fallen.sum() / turns / count - probability) < 5 * spread / turns / math.sqrt(count)
    # Both ends as often as the middle.
    edge = torch.cat([fallen[:100], fallen[-100:]]).mean()
    assert abs(edge - turns * probability) < 5 * spread / math.sqrt(200)
    assert abs(fallen.var() / spread**2 - 1) < 0.5


def test_draws_until_the_end_is_reached() -> None:
    torch.manual_seed(1)
    assert draw_positions(0, 0.1).tolist() == []
    assert all(draw_positions(1, 0.1).tolist() in ([], [0]) for _ in range(50))
    assert max(int(draw_positions(100_000, 0.01)[-1]) for _ in range(5)) > 99_000


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_zeros_and_scales_values_and_the_same_gradients(dtype: torch.dtype, layout: torch.memory_format) -> None:
    torch.manual_seed(2)
    x = (torch.rand(4, 8, 16, 16) + 1).to(dtype).to(memory_format=layout).requires_grad_()
    y = SparseDropout(0.05)(x)
    assert y.is_contiguous(memory_format=layout)
    kept = y != 0
    assert 0.03 < 1 - kept.float().mean() < 0.07
    torch.testing.assert_close(y[kept], (x / 0.95)[kept])
    gradient = torch.rand(4, 8, 16, 16).to(dtype)  # in the other layout, for one of the two
    y.backward(gradient)
    torch.testing.assert_close(x.grad, torch.where(kept, gradient / 0.95, 0.0).to(dtype))


def test_is_torchs_dropout_where_that_is_no_longer_way() -> None:
    values = torch.rand(8, 64)
    for module in (SparseDropout(0.5), SparseDropout(0.05).eval(), SparseDropout(0.0)):
        torch.manual_seed(3)
        ours = module(values)
        torch.manual_seed(3)
        assert torch.equal(ours, nn.functional.dropout(values, module.p, module.training))
    pieces = torch.rand(8, 64)[:, ::2]
    torch.manual_seed(4)
    ours = SparseDropout(0.05)(pieces)
    torch.manual_seed(4)
    assert torch.equal(ours, nn.functional.dropout(pieces, 0.05))

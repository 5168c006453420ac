"""Parts of a step on a GPU: fused optimizers, and the measurement of the device's time."""

from __future__ import annotations

import pytest
import torch

from ddp_sdk.meters import Timeline
from ddp_trainer.optim import OptimConfig, build_optimizer
from tests.gpu.small_runs import DEVICE, gpu_only, on_device

pytestmark = on_device


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_fused_optimiser_steps_as_on_cpu(name: str) -> None:
    config = OptimConfig(name=name, lr=0.1, weight_decay=0.01)
    after = []
    for device in ("cpu", DEVICE):
        weight = torch.nn.Parameter(torch.linspace(-1, 1, 64, device=device))
        optimizer = build_optimizer(config, [weight])
        assert optimizer.defaults["fused"]
        for _ in range(3):
            weight.grad = weight.detach() * 0.5
            optimizer.step()
        after.append(weight.detach().cpu())
    torch.testing.assert_close(after[0], after[1])


@gpu_only
def test_devices_time_is_counted_not_hosts() -> None:
    timeline = Timeline(torch.device("cuda", 0))
    begin = timeline.now()
    torch.cuda._sleep(500_000_000)  # cycles: a fifth of a second or more, for which the host does not wait
    end = timeline.now()
    assert not timeline.reached(end)
    assert timeline.seconds(begin, end) > 0.1

"""What draws random numbers between two steps."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy
import pytest
import torch

from ddp_pod.features.check.recorded_draws import DrawMeter


@pytest.mark.parametrize(
    ("draw", "generator"),
    [(lambda: torch.rand(1), "torch"), (lambda: numpy.random.rand(), "numpy"), (random.random, "random")],
    ids=["torch", "numpy", "random"],
)
def test_draw_has_its_source_and_the_state_before(draw: Callable[[], object], generator: str) -> None:
    meter = DrawMeter(torch)
    meter.mark("script")
    taken = []
    for _ in range(2):
        torch.manual_seed(0)
        random.seed(0)
        numpy.random.seed(0)
        meter.mark("script")
        meter.take()
        draw()
        meter.mark("model")
        taken.append(meter.take())
    assert taken[0] == taken[1]
    assert [entry.partition("=")[0] for entry in taken[0]] == [f"model {generator}"]
    meter.mark("model")
    assert meter.take() == ()


def test_draws_of_modules_that_load_data_are_those_of_the_data() -> None:
    meter = DrawMeter(torch)
    meter.enter_data("script")
    torch.rand(1)
    meter.mark("model")  # the call of a transform
    torch.rand(1)
    meter.leave_data()
    torch.rand(1)
    meter.mark("script")
    assert [entry.partition("=")[0] for entry in meter.take()] == ["data torch", "script torch"]


def test_reading_draws_nothing() -> None:
    before = (torch.get_rng_state().tolist(), random.getstate(), numpy.random.get_state()[1].tolist())
    DrawMeter(torch).mark("script")
    assert (torch.get_rng_state().tolist(), random.getstate(), numpy.random.get_state()[1].tolist()) == before

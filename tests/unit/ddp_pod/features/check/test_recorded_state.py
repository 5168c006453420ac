"""What a rank records of the values beside its models."""

from __future__ import annotations

import random
import sys
import weakref
from collections import deque
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy
import pytest
import torch
from torch import nn

from ddp_pod.features.check import recorded_state
from ddp_pod.features.check.contract import EMPTY, GENERATOR, NUMBERS, TENSORS, WEIGHTS
from ddp_pod.features.check.recorded_state import StateReader


@pytest.fixture(autouse=True)
def unlimited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a scan take any time: the machine may be busy."""
    monkeypatch.setattr(recorded_state, "_SCAN_SECONDS", 600.0)


class Slots:
    """An object without a dictionary."""

    __slots__ = ("mean", "unset")

    def __init__(self) -> None:
        self.mean = 1.0


class Pair(NamedTuple):
    """A record."""

    count: int
    mean: torch.Tensor


class Average:
    """An average of weights; ``steps``: of all objects."""

    steps = 0

    def __init__(self, model: nn.Module) -> None:
        self.shadow = {name: value.detach().clone() for name, value in model.named_parameters()}


class Net(nn.Module):
    """A model with a value that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 3)
        self.seen = 0


def read(reader: StateReader, model: nn.Module, **variables: Any) -> dict[str, str]:
    """Return kind and digest of the changed values, read in a frame that has these variables."""

    def step(values: dict[str, Any]) -> tuple[str, ...]:
        return reader.read(sys._getframe(), [model])

    entries = step(variables)
    return {name: entry for name, _, entry in (entry.rpartition("=") for entry in entries)}


@pytest.mark.parametrize(
    ("value", "change", "kind"),
    [
        (Slots(), lambda value: setattr(value, "mean", 2.0), NUMBERS),
        (SimpleNamespace(count=1), lambda value: setattr(value, "count", 2), NUMBERS),
        (deque([torch.zeros(2)], maxlen=1), lambda value: value.append(torch.ones(2)), TENSORS),
        ([Pair(1, torch.zeros(2))], lambda value: value[0].mean.data.add_(1), TENSORS),
        ({"reward": numpy.zeros(3)}, lambda value: value["reward"].__iadd__(1), TENSORS),
        (torch.zeros(()), lambda value: value.add_(1), NUMBERS),
        ([1, 2], lambda value: value.append(3), NUMBERS),
        (torch.Generator(), lambda value: value.manual_seed(5), GENERATOR),
        ([numpy.random.default_rng(0)], lambda value: value[0].random(), GENERATOR),
        (random.Random(0), lambda value: value.random(), GENERATOR),
    ],
    ids=["slots", "namespace", "deque", "record", "array", "number", "list", "torch", "numpy", "random"],
)
def test_changed_value_is_read_wherever_the_script_keeps_it(value: Any, change: Any, kind: str) -> None:
    reader = StateReader(torch)
    model = Net()
    first = read(reader, model, values=value)
    read(reader, model, values=value)
    unchanged = read(reader, model, values=value)
    change(value)
    changed = read(reader, model, values=value)
    names = first.keys() & changed.keys() - unchanged.keys()  # of the value, and of what contains it
    assert names
    assert all(changed[name].startswith(f"{kind}:") and changed[name] != first[name] for name in names)


def test_tensors_with_the_shapes_of_all_parameters_are_weights() -> None:
    model = Net()
    entries = read(StateReader(torch), model, average=Average(model))
    assert next(entry for name, entry in entries.items() if name.endswith(".shadow")).startswith(f"{WEIGHTS}:")


def test_values_of_classes_and_of_modules_are_read() -> None:
    reader = StateReader(torch)
    model = Net()
    first = read(reader, model, kind=Average)
    assert "Net.seen" in first
    read(reader, model, kind=Average)
    model.seen += 1
    Average.steps += 1
    changed = read(reader, model, kind=Average)
    assert {"Net.seen", "Average.steps"} <= set(changed)


def test_empty_container_is_read_before_it_is_filled() -> None:
    reader = StateReader(torch)
    replay: deque[torch.Tensor] = deque(maxlen=4)
    first = read(reader, Net(), replay=replay)
    replay.append(torch.ones(2))
    changed = read(reader, Net(), replay=replay)
    kinds = {name: (first[name].partition(":")[0], changed[name].partition(":")[0]) for name in first.keys() & changed}
    assert (EMPTY, TENSORS) in kinds.values()


def test_value_without_a_change_is_not_read_any_more() -> None:
    reader = StateReader(torch)
    data = torch.zeros(2)
    for _ in range(8):
        read(reader, Net(), data=data)
    data.add_(1)
    assert not [name for name in read(reader, Net(), data=data) if "data" in name]


def test_container_is_read_again_once_it_has_other_members() -> None:
    reader = StateReader(torch)
    model = Net()
    best = {"loss": 1.0}
    for _ in range(8):
        read(reader, model, best=best)
    best["weights"] = [value.data for value in model.parameters()]  # type: ignore[assignment]

    read(reader, model, best=best)

    assert [reader.views.get(tensor)[0] for tensor in best["weights"]] == [8, 8]  # type: ignore[attr-defined]


def test_reading_keeps_no_variable_of_a_function_alive() -> None:
    reader = StateReader(torch)
    model = Net()

    def step() -> Any:
        value = torch.ones(2)
        reader.read(sys._getframe(), [model])
        reference = weakref.ref(value)
        del value
        return reference()  # while the frame exists

    assert step() is None


def test_group_of_an_optimizer_is_no_value_of_the_script() -> None:
    group = {"lr": 0.1}
    other = {"lr": 0.1}
    changed = StateReader(torch).read(sys._getframe(), [Net()], [group])
    assert not [entry for entry in changed if "group" in entry]
    assert [entry for entry in changed if "other" in entry]
    assert other


def test_state_of_a_model_that_a_variable_keeps_is_no_value_of_the_script() -> None:
    model = Net()
    content = {"model": model.state_dict(), "epoch": 1}
    copy = {"model": {name: value.clone() for name, value in content["model"].items()}}
    changed = StateReader(torch).read(sys._getframe(), [model])
    assert not [entry for entry in changed if "content" in entry]
    assert [entry for entry in changed if "copy" in entry]
    assert copy

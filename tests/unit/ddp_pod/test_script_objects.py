"""Objects of the script are read without a call of their methods."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ddp_pod.rank.script_objects import (
    IdentityMap,
    bypass_modes,
    find_function,
    find_member,
    is_instance,
    is_training,
    list_buffers,
    list_modules,
    list_parameters,
    list_rates,
    list_values,
    read_attributes,
    read_number,
    read_property,
    read_tensor,
    strip_wrappers,
)

NAMES = ("hash", "eq", "bool", "len", "iter", "repr", "str", "getattribute", "contains", "float", "int", "index", "lt")


def fail(*arguments: object) -> Any:
    raise AssertionError("a method of the script's object was called")


def build_touchy(base: type, **members: object) -> Any:
    """Return a class all of whose special methods fail; of an optimizer or a module once it is complete."""
    methods: dict[str, Any] = {f"__{name}__": fail for name in NAMES}
    return type("Touchy", (base,), {**methods, "__class__": property(fail), "__getattr__": fail, **members})


class Meta(type):
    """A metaclass that fails, too."""

    def __getattribute__(cls, name: str) -> Any:
        fail()

    def __instancecheck__(cls, value: object) -> bool:
        return bool(fail())


Touchy = build_touchy(object)
TouchyModule = build_touchy(nn.Module)
TouchyOptimizer = build_touchy(torch.optim.SGD)
TouchyTensor = build_touchy(torch.Tensor, __torch_function__=classmethod(fail))


def complete(kind: type, like: object) -> Any:
    """Return an object of a class with the attributes of another one, without a call of a method."""
    value = kind.__new__(kind)
    object.__getattribute__(value, "__dict__").update(vars(like))
    return value


@pytest.fixture
def module() -> Any:
    like = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    like.add_module("shared", like[0])
    return complete(TouchyModule, like)


@pytest.mark.parametrize(
    ("read", "expected"),
    [
        (lambda: is_instance(Touchy(), int, str), False),
        (lambda: read_attributes(complete(Touchy, torch.nn.Linear(1, 1)))["in_features"], 1),
        (lambda: read_attributes(build_touchy(object, __dict__=property(fail))()), {}),
        (lambda: read_attributes(Meta("Odd", (), {})()), {}),
        (lambda: find_member(Meta("Odd", (), {"name": 3}), "name"), 3),
        (lambda: find_function(build_touchy(object, step=Touchy()), "step"), None),
        (lambda: read_number(build_touchy(float)(0.5)), 0.5),
        (lambda: read_number(build_touchy(int)(3)), 3.0),
        (lambda: read_number(10**400), None),
        (lambda: read_number(Touchy()), None),
        (lambda: read_number(torch.tensor([0.25]).as_subclass(TouchyTensor)), 0.25),
        (lambda: read_number(torch.ones(2)), None),
        (lambda: list_values(build_touchy(list)([1, 2])), [1, 2]),
        (lambda: list_values(build_touchy(tuple)((1, 2))), [1, 2]),
        (lambda: list_values(build_touchy(dict, values=fail)(b=2, a=1)), [1, 2]),
        (lambda: list_values({2: "b", 1: "a"}), ["b", "a"]),
        (lambda: list(list_rates(complete(TouchyOptimizer, torch.optim.SGD([torch.ones(1)], lr=0.5)))), [0.5]),
        (lambda: strip_wrappers("module._orig_mod.my_module.weight"), "my_module.weight"),
    ],
)
def test_object_is_read_without_a_call(read: Callable[[], object], expected: object) -> None:
    assert read() == expected


def test_module_is_read_without_a_call(module: Any) -> None:
    assert is_training(module)
    assert [name for name, _ in list_modules(module)] == ["", "0", "1"]
    assert [name for name, _, _ in list_parameters(module)] == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert next(name for name, _, _ in list_buffers(module)) == "1.running_mean"


@pytest.mark.parametrize(
    "build",
    [
        lambda: nn.TransformerEncoderLayer(8, 2),
        lambda: nn.Sequential(nn.BatchNorm1d(2), nn.ModuleDict({"a": nn.Linear(2, 2)})),
        lambda: torch.compile(nn.Linear(2, 2), backend="eager"),
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)),
    ],
)
def test_names_are_those_of_pytorch(build: Callable[[], Any]) -> None:
    model = build()
    for trains in (True, False):
        model.train(trains)
        assert is_training(model) is trains
    assert list_modules(model) == list(model.named_modules())
    assert [name for name, _, _ in list_parameters(model)] == [name for name, _ in model.named_parameters()]
    assert [name for name, _, _ in list_buffers(model)] == [name for name, _ in model.named_buffers()]


@pytest.mark.parametrize(
    "wrap", [nn.DataParallel, lambda inner: nn.DataParallel(torch.compile(inner, backend="eager"))]
)
def test_module_in_a_wrapper_decides_about_training(wrap: Callable[[nn.Module], nn.Module]) -> None:
    """Lightning puts the wrapper into evaluation, and only the module inside back."""
    inner = nn.Linear(2, 2)
    model = wrap(inner)
    model.eval()
    assert not is_training(model)
    inner.train()
    assert is_training(model)


class Computing(torch.Tensor):
    """A tensor whose class computes."""

    @classmethod
    def __torch_dispatch__(cls, *arguments: Any, **options: Any) -> Any:
        fail()

    __torch_function__ = torch._C._disabled_torch_function_impl


@pytest.mark.parametrize(
    ("build", "expected"),
    [
        (lambda: torch.ones(2), [1.0, 1.0]),
        (lambda: nn.Parameter(torch.ones(2)), [1.0, 1.0]),
        (lambda: torch.ones(2).as_subclass(TouchyTensor), [1.0, 1.0]),
        (lambda: torch.Tensor._make_subclass(Computing, torch.ones(2)), None),
        (Touchy, None),
    ],
)
def test_tensor_is_read_without_a_call(build: Callable[[], Any], expected: list[float] | None) -> None:
    plain = read_tensor(torch, build())
    assert (None if plain is None else plain.tolist()) == expected
    assert plain is None or (type(plain) is torch.Tensor and not plain.requires_grad)


def test_property_of_a_tensor_is_read_without_a_call() -> None:
    assert read_property(torch, torch.ones(2).as_subclass(TouchyTensor), "requires_grad") is False


def test_modes_of_the_script_do_not_see_operations_of_the_hooks() -> None:
    class Counting(TorchDispatchMode):
        calls = 0

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            Counting.calls += 1
            return function(*args, **(kwargs or {}))

    tensor = torch.ones(2)
    with Counting():
        with bypass_modes(torch):
            tensor.sum()
        assert Counting.calls == 0
        tensor.sum()
    assert Counting.calls == 1


def test_identity_map_keeps_no_object_alive_and_confuses_none() -> None:
    values = IdentityMap()
    first = Touchy()
    second = Touchy()
    values[first] = 1
    values[second] = 2
    assert (values.get(first), values.get(second), values.get(Touchy(), 0)) == (1, 2, 0)
    del first
    gc.collect()
    assert len(values) == 1
    assert values.get(second) == 2

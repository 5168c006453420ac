"""States as JSON and tensors."""

from __future__ import annotations

import collections
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ddp_sdk.memory.state import (
    CopyManifest,
    FlatState,
    build_rows,
    build_state,
    decode_manifest,
    encode_manifest,
    encode_rows,
    find_misfit,
    find_settled,
    flatten,
    read_tensor,
    unflatten,
)


def copy_state(value: Any) -> Any:
    """Write a state to a payload and a manifest, and read it back."""
    state = flatten(value)
    rows = build_rows(state.leaves)
    size = rows[-1].offset + rows[-1].bytes if rows else 0
    payload = torch.zeros(size, dtype=torch.uint8)
    for leaf, row in zip(state.leaves, rows, strict=True):
        payload[row.offset : row.offset + row.bytes] = leaf.memory.view(torch.uint8)
    manifest = decode_manifest(encode_manifest(state.tree, encode_rows(rows)), size)
    return unflatten(manifest.tree, [read_tensor(payload, row) for row in manifest.rows])


def test_state_with_all_supported_types_is_unchanged() -> None:
    value = {
        "none": None, "flag": True, "number": 3, "ratio": 0.1, "infinite": math.inf, "text": "a\n\u00e9",
        "bytes": b"\0\xff",
        "list": [1, (2, "x"), {}], 7: {-1: "negative key"}, None: "none key",
    }  # fmt: skip
    assert copy_state(value) == value


def test_counter_remains_a_counter() -> None:
    milestones = collections.Counter([10, 20, 20])
    copied = copy_state({"milestones": milestones})["milestones"]
    assert type(copied) is collections.Counter
    assert copied == milestones


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(1.5),
        torch.arange(6, dtype=torch.int64).reshape(2, 3),
        torch.randn(3, 5).bfloat16(),
        torch.tensor([True, False, True]),
        torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        torch.randn(4, 6)[:, ::2],
        torch.randn(4, 6).t(),
        torch.empty(0, 3),
        torch.randn(3, dtype=torch.complex64).conj(),
    ],
    ids=["scalar", "int64", "bfloat16", "bool", "channels-last", "strided", "transposed", "empty", "conjugate"],
)
def test_tensor_is_equal_to_the_bit(tensor: torch.Tensor) -> None:
    copied = copy_state({"x": tensor})["x"]
    assert copied.dtype == tensor.dtype
    assert torch.equal(copied, tensor)


def test_channels_last_keeps_its_strides() -> None:
    tensor = torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    assert copy_state([tensor])[0].stride() == tensor.stride()


@pytest.mark.parametrize(
    ("value", "named"),
    [
        ({"a": {"b": object()}}, "a.b is of type object"),
        ({"a": [1, {2, 3}]}, "a.1 is of type set"),
        ({"a": {(1, 2): 3}}, "a has a key of type tuple"),
        ({"a": torch.randn(3, 3).to_sparse()}, "a is a tensor with the layout torch.sparse_coo"),
    ],
    ids=["object", "set", "key", "sparse"],
)
def test_unsupported_value_is_named(value: Any, named: str) -> None:
    with pytest.raises(TypeError, match=named):
        flatten(value)


@pytest.mark.parametrize(
    "rows",
    [
        b'[["w","float32",[4],[1],8,false,16]]',
        b'[["w","float32",[4],[1],-8,false,16]]',
        b'[["w","float32",[4],[100],0,false,16]]',
        b'[["w","float32",[4],[1],0,false,8]]',
        b'[["w","Tensor",[4],[1],0,false,16]]',
        b'[["w","float32",[4]]]',
        b'{"w": 1}',
        b"[" * 100_000,
    ],
    ids=["beyond", "before", "stride", "size", "dtype", "short", "object", "deep"],
)
def test_manifest_of_tensors_outside_of_the_payload_is_refused(rows: bytes) -> None:
    with pytest.raises(ValueError, match=r"manifest cannot be read|not within the payload|is not a data type"):
        decode_manifest(encode_manifest({}, rows), 16)


def test_settled_tensors_are_parameters_and_states_of_optimizers() -> None:
    class Wrapper:
        def __init__(self, model: torch.nn.Module) -> None:
            self.model = model

    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.randn(4, 2)).sum().backward()
    optimizer.step()
    settled = find_settled([Wrapper(model), optimizer])
    momentum = [values["momentum_buffer"] for values in optimizer.state.values()]
    assert settled == {tensor.data_ptr() for tensor in [*model.parameters(), *momentum]}


def describe(objects: dict[str, Any]) -> tuple[FlatState, CopyManifest]:
    state = flatten({name: item.state_dict() for name, item in objects.items()})
    return state, decode_manifest(encode_manifest(state.tree, encode_rows(build_rows(state.leaves))), 1 << 20)


def build_sgd(*sizes: int) -> torch.optim.Optimizer:
    return torch.optim.SGD([{"params": [torch.zeros(1) for _ in range(size)]} for size in sizes], lr=0.1)


@pytest.mark.parametrize(
    ("saved", "live", "problem"),
    [
        ({"x": build_sgd(2, 1)}, {"x": build_sgd(2, 1)}, ""),
        ({"x": build_sgd(2, 1)}, {"x": build_sgd(3)}, "x has parameter groups of [3] tensors, in the copy of [2, 1]"),
        ({"x": torch.nn.Linear(1, 1)}, {"x": build_sgd(1)}, "x is not an optimizer in the copy"),
        ({"x": torch.nn.Linear(1, 1)}, {"x": torch.nn.Linear(1, 1, bias=False)}, "x.bias is only in the copy or only"),
        (
            {"x": torch.nn.Linear(1, 1)},
            {"x": torch.nn.Linear(2, 1)},
            "x.weight has the shape (1, 2), in the copy (1, 1",
        ),
        ({}, {"y": build_sgd(1)}, "it contains the state of nothing, not of y"),
    ],
)
def test_copy_that_does_not_fit_is_named(saved: dict[str, Any], live: dict[str, Any], problem: str) -> None:
    found = find_misfit(describe(saved)[1], live, describe(live)[0])
    assert found.startswith(problem)
    assert bool(found) is bool(problem)


@pytest.mark.parametrize("tree", [{"x": 3}, {"l": 3}, {"d": [1]}, {"d": [], "l": []}, {"b": "a"}])
def test_tree_of_another_program_is_refused(tree: Any) -> None:
    with pytest.raises(ValueError, match=r"manifest|base64|unpack"):
        unflatten(tree, [])


def test_shards_are_distributed_as_in_the_running_program() -> None:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = DeviceMesh("cpu", [0])

        def build() -> dict[str, Any]:
            model = torch.nn.Linear(4, 6, bias=False)
            model.weight = torch.nn.Parameter(distribute_tensor(torch.randn(6, 4), mesh, [Shard(0)]))
            return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)}

        saved = build()
        saved["model"].weight.grad = torch.ones_like(saved["model"].weight)
        saved["optimizer"].step()
        state, manifest = describe(saved)
        assert state.is_sharded
        assert find_settled(saved.values()) == {leaf.tensor.data_ptr() for leaf in state.leaves}
        payload = torch.zeros(1 << 10, dtype=torch.uint8)
        for leaf, row in zip(state.leaves, manifest.rows, strict=True):
            payload[row.offset : row.offset + row.bytes] = leaf.memory.view(torch.uint8)
        live = build()
        template = describe(live)[0]
        for name, item in live.items():
            item.load_state_dict(build_state(name, item, manifest, payload, template))
        assert torch.equal(live["model"].weight.full_tensor(), saved["model"].weight.full_tensor())
        (buffer,) = [values["momentum_buffer"] for values in live["optimizer"].state.values()]
        assert isinstance(buffer, DTensor)
        assert bool((buffer.full_tensor() == 1).all())
        with pytest.raises(ValueError, match=r"model.weight is a shard, but the program has no DTensor there"):
            build_state(
                "model", torch.nn.Linear(4, 6), manifest, payload, describe({"model": torch.nn.Linear(4, 6)})[0]
            )
    finally:
        dist.destroy_process_group()

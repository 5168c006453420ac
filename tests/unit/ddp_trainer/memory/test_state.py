"""States as JSON and tensors."""

from __future__ import annotations

import collections
import math
from typing import Any

import pytest
import torch

from ddp_trainer.memory.state import (
    build_rows,
    decode_manifest,
    encode_manifest,
    encode_rows,
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

"""Digests of tensors."""

import random

import pytest
import torch

from ddp_pod.rank.fingerprint import combine, digest, find_tensors, hash_text

KINDS = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_equal_bits_have_equal_digests_in_any_layout(kind: torch.dtype) -> None:
    tensor = (torch.arange(60) % 2).reshape(6, 10).to(kind)

    assert digest(torch, tensor) == digest(torch, tensor.clone())
    assert digest(torch, tensor.t().contiguous().t()) == digest(torch, tensor)
    assert digest(torch, tensor.reshape(10, 6)) != digest(torch, tensor)


@pytest.mark.parametrize("size", [1, 100, (1 << 20) + 3])
def test_every_single_bit_changes_the_digest(size: int) -> None:
    tensor = torch.randn(size)
    before = digest(torch, tensor)
    bits = tensor.view(torch.int32)
    places = random.Random(size)

    for _ in range(40):
        index = places.randrange(size)
        bit = places.randrange(32)
        mask = 1 << bit if bit < 31 else -(1 << 31)
        bits[index] = bits[index] ^ mask
        assert digest(torch, tensor) != before, (index, bit)
        bits[index] = bits[index] ^ mask
    assert digest(torch, tensor) == before


def test_order_of_elements_and_of_tensors_matters() -> None:
    tensor = torch.arange(1000.0)

    assert digest(torch, tensor) != digest(torch, tensor.flip(0))
    assert combine([1, 2]) != combine([2, 1])
    assert hash_text("a") != hash_text("b")


def test_tensors_in_containers_and_objects_are_found() -> None:
    class Batch:
        def __init__(self) -> None:
            self.x = torch.ones(1)
            self.itself = self

    batch = Batch()
    found = list(find_tensors(torch, ({"b": torch.ones(2), "a": [torch.ones(3)]}, "text", batch, None, 3)))

    assert [len(tensor) for tensor in found] == [3, 2, 1]

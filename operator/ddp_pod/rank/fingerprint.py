"""Digests of tensors: equal for equal bits, on every device, without copying the tensor from it.

A digest is the sum of the elements, as integers, times odd weights that depend on the position, modulo 2**64. A change
of one bit changes an element by a power of two below 2**64, and so changes the sum: an odd weight has an inverse.
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from .script_objects import is_instance, is_tensor, list_values, read_tensor

_CHUNK = 1 << 20  # elements whose weights are kept
_MULTIPLIER = 0x9E3779B97F4A7C15 - (1 << 64)  # 2**64 divided by the golden ratio, as a signed number
_OFFSET = 0x632BE59BD9B4E019  # odd
MASK = (1 << 64) - 1
_MOST_VALUES = 1024  # of a batch

_weights: dict[Any, Any] = {}  # by device


def digest(torch: Any, tensor: Any) -> int:
    """Return the digest of a plain tensor's bits, shape and type, 64 bits. On a GPU it waits for the device.

    Raises: RuntimeError and others for a tensor without a plain storage, such as a sparse one.
    """
    start = hash_text(f"{tensor.dtype}{tuple(tensor.shape)}")
    return (start + int(digest_on_device(torch, tensor))) & MASK


def digest_on_device(torch: Any, tensor: Any) -> Any:
    """Return the digest of a plain tensor's bits as one int64 on its device, without waiting for it."""
    with torch.no_grad():
        numbers = _view_integers(torch, tensor.reshape(-1))
        total = torch.zeros((), dtype=torch.int64, device=numbers.device)
        for number, chunk in enumerate(numbers.split(_CHUNK)):
            weights = _list_weights(torch, chunk.device)[: chunk.numel()]
            # Each chunk has weights of its own: an odd factor keeps them odd.
            total += (chunk.to(torch.int64) * weights).sum() * (2 * number + 1)
        return total


def _view_integers(torch: Any, flat: Any) -> Any:
    """Return the elements of a flat tensor as integers of the same size."""
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return flat.contiguous().view(kinds[flat.element_size()])


def _list_weights(torch: Any, device: Any) -> Any:
    weights = _weights.get(device)
    if weights is None:
        positions = torch.arange(_CHUNK, dtype=torch.int64, device=device)
        weights = (positions * _MULTIPLIER + _OFFSET).bitwise_or(1)
        _weights[device] = weights
    return weights


def combine(numbers: Iterable[int]) -> int:
    """Return one digest of several, in order."""
    total = 0
    for number in numbers:
        total = (total * 0x100000001B3 + number + 1) & MASK
    return total


def hash_text(text: str) -> int:
    """Return a digest of a text that is the same in every process: a signed number of 64 bits."""
    return hash_bytes(text.encode())


def hash_bytes(data: bytes) -> int:
    """Return a digest of bytes that is the same in every process: a signed number of 64 bits."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big", signed=True)


def digest_samples(torch: Any, tensors: Sequence[Any], most: int) -> list[int]:
    """Return digests of the first samples of a batch: of the rows of its tensors that are as long as the first one."""
    whole = [tensor for tensor in tensors if tensor.dim() and tensor.numel()]
    rows = [_digest_rows(torch, tensor[:most]) for tensor in whole if len(tensor) == len(whole[0])]
    return [combine(parts) for parts in zip(*rows, strict=True)]


def _digest_rows(torch: Any, tensor: Any) -> list[int]:
    with torch.no_grad():
        numbers = _view_integers(torch, tensor.reshape(-1)).reshape(len(tensor), -1)[:, :_CHUNK]
        weights = _list_weights(torch, numbers.device)[: numbers.shape[1]]
        return [number & MASK for number in (numbers.to(torch.int64) * weights).sum(1).tolist()]


def find_tensors(torch: Any, value: Any) -> Iterator[Any]:
    """Yield the tensors in a module's arguments, plain and detached: in containers, and in objects' attributes."""
    waiting = [value]
    seen: set[int] = set()
    while waiting and len(seen) < _MOST_VALUES:
        value = waiting.pop()
        is_leaf = value is None or is_instance(value, str, bytes, int, float, torch.nn.Module)
        if is_leaf or id(value) in seen:
            continue
        seen.add(id(value))
        if is_tensor(torch, value):
            tensor = read_tensor(torch, value)
            if tensor is not None:
                yield tensor
        else:
            waiting += reversed(list_values(value)[:_MOST_VALUES])

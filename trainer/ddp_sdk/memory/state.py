"""The state of objects as a JSON document and a list of tensors, and back.

There is no pickle: a copy that comes from a peer is data, and can execute nothing.
"""

from __future__ import annotations

import base64
import collections
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

_SCALARS = (type(None), bool, int, float, str)


class Leaf(NamedTuple):
    """A tensor of the state. ``path``: the keys that lead to it, as text.

    ``tensor``: its elements on this rank, which fill one range of memory. ``source``: the tensor in the state dict.
    """

    path: str
    tensor: Tensor
    source: Tensor

    @property
    def memory(self) -> Tensor:
        """One-dimensional view of all elements, in the order of the memory."""
        return self.tensor.as_strided((self.tensor.numel(),), (1,))

    @property
    def is_shard(self) -> bool:
        """Whether ``tensor`` is this rank's part of a DTensor."""
        return hasattr(self.source, "to_local")

    @property
    def layout(self) -> tuple[Any, ...]:
        return self.path, self.tensor.dtype, self.tensor.shape, self.tensor.stride()


class FlatState(NamedTuple):
    """The state of all objects: ``tree`` is JSON, in which ``{"x": 3}`` represents the fourth of ``leaves``."""

    tree: Any
    leaves: list[Leaf]

    @property
    def is_sharded(self) -> bool:
        """Whether this rank holds only a part of a tensor."""
        return any(leaf.is_shard for leaf in self.leaves)


class TensorRow(NamedTuple):
    """A tensor in a copy. ``offset``: in bytes from the beginning of the payload."""

    path: str
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    is_shard: bool
    bytes: int

    @property
    def elements(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count


def flatten(value: Any, name: str = "") -> FlatState:
    """Split a state into tree and tensors. Raises TypeError that names an object which is neither data nor a tensor."""
    leaves: list[Leaf] = []
    return FlatState(_encode(value, name, leaves), leaves)


def _encode(value: Any, path: str, leaves: list[Leaf]) -> Any:
    if type(value) in _SCALARS:
        return value
    if isinstance(value, Tensor):
        leaves.append(_build_leaf(value, path))
        return {"x": len(leaves) - 1}
    if isinstance(value, Mapping):
        tag = "c" if isinstance(value, collections.Counter) else "d"
        return {tag: [[_encode_key(key, path), _encode(item, _join(path, key), leaves)] for key, item in value.items()]}
    if isinstance(value, (list, tuple)):
        tag = "l" if isinstance(value, list) else "t"
        return {tag: [_encode(item, _join(path, index), leaves) for index, item in enumerate(value)]}
    if isinstance(value, (bytes, bytearray)):
        return {"b": base64.b64encode(value).decode()}
    for scalar in (bool, int, float, str):  # a subclass, such as numpy.float64
        if isinstance(value, scalar):
            return scalar(value)
    raise TypeError(
        f"{path} is of type {type(value).__name__}, which cannot be copied; state dicts may contain tensors, numbers, "
        "strings, bytes, lists, tuples and dicts"
    )


def _join(path: str, key: Any) -> str:
    return f"{path}.{key}" if path else str(key)


def _encode_key(key: Any, path: str) -> Any:
    if type(key) not in _SCALARS:
        raise TypeError(f"{path} has a key of type {type(key).__name__}; use strings or numbers")
    return key


def _build_leaf(source: Tensor, path: str) -> Leaf:
    tensor = source.detach()
    if hasattr(tensor, "to_local"):
        tensor = tensor.to_local()
    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise TypeError(f"{path} is a tensor with the layout {tensor.layout}, which cannot be copied")
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    if not tensor.is_contiguous() and not _is_dense(tensor):
        tensor = tensor.contiguous()
    return Leaf(path, tensor, source)


def _is_dense(tensor: Tensor) -> bool:
    """Return whether the elements fill one range of memory without gaps and without overlap."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape)):  # noqa: B905
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def build_rows(leaves: Iterable[Leaf], alignment: int = 64) -> list[TensorRow]:
    """Assign each tensor its place in the payload."""
    rows = []
    offset = 0
    for leaf in leaves:
        dtype = str(leaf.tensor.dtype).rpartition(".")[2]
        tensor = leaf.tensor
        size = tensor.numel() * tensor.element_size()
        shape = tuple(tensor.shape)
        rows.append(TensorRow(leaf.path, dtype, shape, tuple(tensor.stride()), offset, leaf.is_shard, size))
        offset += -(-size // alignment) * alignment
    return rows


def encode_rows(rows: list[TensorRow]) -> bytes:
    """Return the first part of a manifest, which is the same for all states with the same tensors."""
    return json.dumps(rows, separators=(",", ":")).encode()


def encode_manifest(tree: Any, rows: bytes) -> bytes:
    """Return the document that describes a payload. ``rows``: of :func:`encode_rows`."""
    return b'{"tensors":%s,"tree":%s}' % (rows, json.dumps(tree, separators=(",", ":")).encode())


class CopyManifest(NamedTuple):
    """The description of a payload."""

    tree: Any
    rows: list[TensorRow]


def decode_manifest(data: bytes, payload_size: int) -> CopyManifest:
    """Read the document. Raises ValueError if it does not describe a payload of that many bytes."""
    try:
        document = json.loads(data)
        rows = [_read_row(row) for row in document["tensors"]]
        manifest = CopyManifest(document["tree"], rows)
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"the manifest cannot be read: {type(error).__name__}: {error}") from None
    for row in rows:
        size = find_dtype(row.dtype).itemsize
        span = 1 + sum((length - 1) * stride for length, stride in zip(row.shape, row.stride))  # noqa: B905
        is_valid = row.offset >= 0 and min(row.shape, default=0) >= 0 and min(row.stride, default=0) >= 0
        is_valid = is_valid and row.offset + row.bytes <= payload_size
        if not is_valid or span > max(1, row.elements) or row.bytes != row.elements * size:
            raise ValueError(f"the tensor {row.path} is not within the payload")
    return manifest


def _read_row(raw: Any) -> TensorRow:
    path, dtype, shape, stride, offset, is_shard, size = raw
    return TensorRow(
        str(path), str(dtype), tuple(map(int, shape)), tuple(map(int, stride)), int(offset), bool(is_shard), int(size)
    )


def find_dtype(name: str) -> torch.dtype:
    """Return the data type of a name such as ``bfloat16``. Raises ValueError."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name} is not a data type of this version of torch")
    return dtype


def read_tensor(payload: Tensor, row: TensorRow) -> Tensor:
    """Return a tensor of the payload, a view of its memory. ``payload``: uint8, one dimension."""
    flat = payload[row.offset : row.offset + row.bytes].view(find_dtype(row.dtype))
    return flat.as_strided(row.shape, row.stride)


def unflatten(tree: Any, tensors: list[Any]) -> Any:
    """Return the state of a tree. Raises ValueError if the tree is not one of :func:`flatten`."""
    if not isinstance(tree, dict):
        return tree
    try:
        [(tag, content)] = tree.items()
        if tag == "x":
            return tensors[content]
        if tag == "b":
            return base64.b64decode(content)
        if tag in ("l", "t"):
            items = [unflatten(item, tensors) for item in content]
            return items if tag == "l" else tuple(items)
        entries = {key: unflatten(item, tensors) for key, item in content}
    except (IndexError, TypeError, RecursionError) as error:
        raise ValueError(f"the manifest cannot be read: {error}") from None
    return collections.Counter(entries) if tag == "c" else entries


def find_settled(objects: Iterable[Any]) -> set[int]:
    """Return the addresses of tensors that only an optimizer's step changes: parameters and states of optimizers.

    Finds modules and optimizers among the objects and among their attributes.
    """
    settled: set[int] = set()
    for item in objects:
        for owner in _list_owners(item):
            settled.update(_find_address(tensor) for tensor in _list_settled(owner))
    settled.discard(0)
    return settled


def _list_owners(item: Any) -> Iterator[Any]:
    yield item
    if not isinstance(item, (torch.nn.Module, torch.optim.Optimizer)):
        yield from vars(item).values() if hasattr(item, "__dict__") else ()


def _list_settled(owner: Any) -> Iterator[Tensor]:
    if isinstance(owner, torch.nn.Module):
        yield from owner.parameters()
    elif isinstance(owner, torch.optim.Optimizer):
        for group in owner.param_groups:
            yield from group["params"]
        for values in owner.state.values():
            yield from (value for value in values.values() if isinstance(value, Tensor))


def _find_address(tensor: Tensor) -> int:
    local: Any = tensor
    if hasattr(local, "to_local"):
        local = local.detach().to_local()
    return int(local.data_ptr())


def find_misfit(manifest: CopyManifest, objects: Mapping[str, Any], template: FlatState) -> str:
    """Return why a copy does not fit the objects; empty if it does. ``template``: the state of the objects.

    Raises ValueError if the copy is not one of a state.
    """
    states = unflatten(manifest.tree, list(manifest.rows))
    if not isinstance(states, dict) or set(states) != set(objects):
        return f"it contains the state of {_list_names(states)}, not of {_list_names(objects)}"
    saved = {row.path: row for row in manifest.rows}
    live = {leaf.path: leaf for leaf in template.leaves}
    for name, item in objects.items():
        problem = ""
        if isinstance(item, torch.nn.Module):
            problem = _find_other_tensors(name, saved, live)
        elif isinstance(item, torch.optim.Optimizer):
            problem = _find_other_groups(name, item, states[name])
        if problem:
            return problem
    return ""


def _list_names(states: Any) -> str:
    return ", ".join(sorted(map(str, states))) or "nothing" if isinstance(states, Mapping) else "something else"


def _find_other_tensors(name: str, saved: Mapping[str, TensorRow], live: Mapping[str, Leaf]) -> str:
    prefix = f"{name}."
    in_copy = {path for path in saved if path.startswith(prefix)}
    in_model = {path for path in live if path.startswith(prefix)}
    if in_copy != in_model:
        return f"{min(in_copy ^ in_model)} is only in the copy or only in the model"
    for path in sorted(in_model):
        shape = tuple(live[path].tensor.shape)
        if shape != saved[path].shape:
            return f"{path} has the shape {shape}, in the copy {saved[path].shape}"
    return ""


def _find_other_groups(name: str, optimizer: torch.optim.Optimizer, state: Any) -> str:
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    try:
        saved = [len(group["params"]) for group in state["param_groups"]]
    except (KeyError, TypeError):
        return f"{name} is not an optimizer in the copy"
    return "" if saved == sizes else f"{name} has parameter groups of {sizes} tensors, in the copy of {saved}"


def build_state(name: str, item: Any, manifest: CopyManifest, memory: Tensor, template: FlatState) -> Any:
    """Return the state of one object, whose tensors are copies. Raises ValueError for a shard that has no place."""
    likes = {leaf.path: leaf.source for leaf in template.leaves if leaf.is_shard}
    prefix = f"{name}."
    tensors: list[Tensor | None] = []
    for row in manifest.rows:
        if not row.path.startswith(prefix):
            tensors.append(None)
            continue
        tensor = read_tensor(memory, row).clone()
        tensors.append(_distribute(tensor, row, item, likes) if row.is_shard else tensor)
    return unflatten(manifest.tree, tensors)[name]


def _distribute(local: Tensor, row: TensorRow, item: Any, likes: Mapping[str, Any]) -> Tensor:
    """Return the DTensor of which ``local`` is this rank's part, distributed as in the running program."""
    like = likes.get(row.path)
    if like is None and isinstance(item, torch.optim.Optimizer):
        like = _find_parameter(item, row.path)
    if like is None or not hasattr(like, "to_local"):
        raise ValueError(f"{row.path} is a shard, but the program has no DTensor there")
    distributed: Tensor = type(like).from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
    return distributed


def _find_parameter(optimizer: torch.optim.Optimizer, path: str) -> Tensor | None:
    """Return the parameter to which ``<name>.state.<index>.<key>`` belongs."""
    parts = path.split(".")
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    index = parts[-2] if len(parts) > 2 else ""
    return parameters[int(index)] if index.isdigit() and int(index) < len(parameters) else None

"""Turn a copy into the states that the objects load."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .state import CopyManifest, FlatState, Leaf, TensorRow, read_tensor, unflatten


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

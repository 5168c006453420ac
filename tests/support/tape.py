"""A CPU's stand-in for a recorded CUDA graph: it repeats every operation on the same memory with the same values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ddp_trainer.engine import StepResult


class Tape(TorchDispatchMode):
    """Records operations; :meth:`replay` repeats them with the current content of the tensors.

    As on a GPU, host values are constants, no Python code runs, recording does not change the tensors, and results keep
    their memory. Reads by the host are refused.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []
        self._before: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name()
        if name in ("aten::_local_scalar_dense", "aten::nonzero", "aten::is_nonzero"):
            raise RuntimeError(f"{name} lets the host wait for the device")
        for tensor in _written(func, args, kwargs or {}):
            self._before.setdefault(tensor.data_ptr(), (tensor, tensor.detach().clone()))
        out = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, out))
        return out

    @torch.no_grad()
    def undo(self) -> None:
        """Restore tensors to their values before recording started."""
        for tensor, value in self._before.values():
            tensor.copy_(value)

    @torch.no_grad()
    def replay(self) -> None:
        """Repeat all operations."""
        for func, args, kwargs, out in self.calls:
            if func.is_view:
                continue  # in the same memory as before
            again = func(*args, **kwargs)
            for old, new in zip(_pytree.tree_leaves(out), _pytree.tree_leaves(again), strict=True):
                if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                    old.detach().copy_(new)


def _written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The tensors that a call changes."""
    if func.name() == "aten::native_batch_norm":
        return [arg for arg in args[3:5] if arg is not None]  # its schema does not mark the statistics as changed
    results: list[Tensor] = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = kwargs.get(argument.name) if argument.kwarg_only else (args[position : position + 1] or (None,))[0]
            results += [leaf for leaf in _pytree.tree_leaves(value) if isinstance(leaf, Tensor)]
    return results


def record(function: Callable[[], StepResult]) -> tuple[Callable[[], None], StepResult]:
    """Replaces :func:`ddp_trainer.step_graph.record_on_gpu`."""
    state = torch.get_rng_state()
    tape = Tape()
    try:
        with tape:
            result = function()
    finally:
        tape.undo()
        torch.set_rng_state(state)
    return tape.replay, result

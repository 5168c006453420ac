"""Measure the batch size of a rank: the first dimension of the arguments of its outermost module.

PyTorch's hook for all modules takes a microsecond for each module's call. So it is registered for one iteration in five
seconds. A hook of the model itself would be copied and saved with it.
"""

import re
import sys
from collections.abc import Iterable
from typing import Any

from .script_objects import (
    bypass_modes,
    is_distributed,
    is_training,
    list_modules,
    list_parameters,
    read_property,
    read_tensor,
)

# Words in the name of a mesh's dimension that divides a model or a sample.
_PARTS_OF_MODEL = ("tp", "cp", "sp", "ep", "pp", "tensor", "context", "sequence", "expert", "pipe", "pipeline")


class BatchMeter:
    """Measures the samples of one iteration, from its creation to ``finish``.

    With gradient accumulation an iteration calls the module several times. If an iteration calls several outermost
    modules with parameters, as a GAN does, its samples are unknown. So are those of a script that compiles: a compiled
    model warns of the hook.
    """

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._outermost: int | None = None  # id of the module
        self._members: frozenset[int] = frozenset()  # ids of the modules in it
        self._sum = 0
        self._is_pending = False  # whether a call of the outermost module has shown no tensor yet
        self._is_ambiguous = False
        self._hook: Any = None
        if not has_compiled():
            register = sys.modules["torch.nn.modules.module"].register_module_forward_pre_hook
            self._hook = register(self._build_hook())

    def finish(self) -> int:
        """End the measurement. Returns the samples of the iteration; 0 if they are unknown."""
        self.stop()
        return 0 if self._is_ambiguous else self._sum

    def stop(self) -> None:
        """Stop observing modules."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def _build_hook(self) -> Any:
        def observe_call(module: Any, inputs: Any) -> None:
            try:
                with bypass_modes(self._torch):
                    self._observe(module, inputs)
            except Exception:  # a bug here must never reach the script
                self.stop()

        vars(observe_call)["_torchdynamo_disable"] = True  # torch.compile calls it instead of tracing it
        return observe_call

    def _observe(self, module: Any, inputs: Any) -> None:
        if self._is_ambiguous or not is_training(module) or not self._torch.is_grad_enabled():
            return
        key = id(module)
        if key == self._outermost:
            self._is_pending = True
        elif key not in self._members:
            if not has_trainable_parameter(self._torch, module):
                return  # a loss function
            if self._outermost is not None:
                self._is_ambiguous = True
                return
            self._outermost = key
            self._members = frozenset(id(member) for _, member in list_modules(module))
            self._is_pending = True

        # A module that is called with keyword arguments shows its batch in the first call inside.
        size = self._find_size(inputs) if self._is_pending else 0
        if size:
            self._is_pending = False
            self._sum += size

    def _find_size(self, inputs: Any) -> int:
        for value in inputs:
            tensor = read_tensor(self._torch, value)
            if tensor is not None and tensor.dim() > 0:
                return int(tensor.shape[0])
        return 0


def has_trainable_parameter(torch: Any, module: Any) -> bool:
    """Return whether a module has a parameter that requires gradients."""
    return any(read_property(torch, parameter, "requires_grad") for _, parameter, _ in list_parameters(module))


def find_shared_dimension(parameters: Iterable[Any]) -> str:
    """Return the dimension of the parameters' meshes whose ranks may read the same data; empty if there is none."""
    for parameter in parameters:
        for name in (is_distributed(parameter) and parameter.device_mesh.mesh_dim_names) or ():
            if any(part in _PARTS_OF_MODEL for part in re.split(r"[^a-z]+", name)):
                return str(name)
    return ""


def has_compiled() -> bool:
    """Return whether torch.compile has compiled a frame in this process."""
    utilities = sys.modules.get("torch._dynamo.utils")
    return bool(getattr(utilities, "counters", {}).get("frames"))

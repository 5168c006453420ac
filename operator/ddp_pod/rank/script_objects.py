"""Read objects of the script without running its code: by type, by identity, and through the interpreter's accessors.

A class of the script may define ``__hash__``, ``__len__``, ``__getattr__`` and even ``__class__``. Such a method can
raise, for example in an object whose constructor still runs, have side effects, or wait for other ranks.
"""

import sys
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from types import FunctionType, GetSetDescriptorType
from typing import Any

# Of a class itself: its metaclass may define ``__getattribute__``.
_read_members: Any = type.__dict__["__dict__"].__get__
_read_bases: Any = type.__dict__["__mro__"].__get__
_read_name: Any = type.__dict__["__name__"].__get__
_read_module: Any = type.__dict__["__module__"].__get__
_MISSING = object()
# PyTorch's modules around another one.
_WRAPPERS = (
    "DistributedDataParallel", "DataParallel", "FullyShardedDataParallel", "OptimizedModule", "CheckpointWrapper",
)  # fmt: skip
WRAPPING = ("module", "_fsdp_wrapped_module", "_orig_mod", "_checkpoint_wrapped_module")
"""The names that a module has in those around it."""


class IdentityMap:
    """Values of objects that it does not keep alive. Unlike a WeakKeyDictionary it calls neither hash nor equality."""

    def __init__(self) -> None:
        self._entries: dict[int, tuple[weakref.ref[Any], Any]] = {}

    def __setitem__(self, key: Any, value: Any) -> None:
        number = id(key)
        entries = self._entries

        def forget(reference: Any) -> None:
            entry = entries.get(number)
            if entry is not None and entry[0] is reference:
                del entries[number]

        entries[number] = (weakref.ref(key, forget), value)

    def get(self, key: Any, default: Any = None) -> Any:
        """Return the value of an object; the default if it has none."""
        entry = self._entries.get(id(key))
        return entry[1] if entry is not None and entry[0]() is key else default

    def __len__(self) -> int:
        return len(self._entries)


def is_instance(value: Any, *kinds: type) -> bool:
    """Return whether a value's type is one of these or below. ``isinstance`` would read its ``__class__`` too."""
    return issubclass(type(value), kinds)


def list_bases(kind: type) -> tuple[type, ...]:
    """Return a class and its base classes."""
    bases: tuple[type, ...] = _read_bases(kind)
    return bases


def list_names(kind: type) -> list[str]:
    """Return the names of a class and of its base classes."""
    return [_read_name(base) for base in list_bases(kind)]


def find_member(kind: type, name: str) -> Any:
    """Return what a class or a base class defines under a name; None if none does."""
    for base in list_bases(kind):
        member = _read_members(base).get(name, _MISSING)
        if member is not _MISSING:
            return member
    return None


def find_function(kind: type, name: str) -> Any:
    """Return the function that a class or a base class defines under a name; None if it is anything else."""
    member = find_member(kind, name)
    return member if type(member) is FunctionType else None


def find_own_function(kind: type, name: str) -> Any:
    """Return the function that a class itself defines under a name; None without one."""
    member = _read_members(kind).get(name)
    return member if type(member) is FunctionType else None


def list_own_members(kind: type) -> dict[str, Any]:
    """Return what a class itself defines, by name."""
    return dict(_read_members(kind))


def find_module_name(kind: type) -> str:
    """Return the name of the module that defines a class; empty if it is not known."""
    module = _read_module(kind)
    return module if type(module) is str else ""


def is_of_package(value: Any, package: str) -> bool:
    """Return whether a value's class is defined in a package."""
    module = _read_module(type(value))
    return type(module) is str and f"{module}.".startswith(f"{package}.")


def read_attributes(value: Any) -> dict[str, Any]:
    """Return the attributes that an object itself has; empty without any. Do not change them."""
    for base in list_bases(type(value)):
        accessor = _read_members(base).get("__dict__")
        if type(accessor) is GetSetDescriptorType:
            attributes = accessor.__get__(value)
            return attributes if type(attributes) is dict else {}
    return {}


def read_number(value: Any) -> float | None:
    """Return an integer, a float or the number in a tensor on the CPU; None for anything else."""
    if is_instance(value, float):
        return float.__float__(value)
    if is_instance(value, int):
        try:
            return int.__float__(value)
        except OverflowError:
            return None
    torch = sys.modules.get("torch")
    tensor = None if torch is None else read_tensor(torch, value)
    is_readable = tensor is not None and tensor.device.type == "cpu" and tensor.numel() == 1
    return float(tensor) if is_readable else None  # type: ignore[arg-type]


def list_values(value: Any) -> list[Any]:
    """Return the values of a container or of an object's attributes; those of a dict in the order of its names."""
    if is_instance(value, dict):
        items = list(dict.items(value))
        if all(type(name) is str for name, _ in items):
            items.sort(key=lambda item: item[0])
        return [item for _, item in items]
    if is_instance(value, list):
        return list(list.__iter__(value))
    if is_instance(value, tuple):
        return list(tuple.__iter__(value))
    return list(read_attributes(value).values())


def list_rates(optimizer: Any) -> Iterator[float]:
    """Yield the learning rates of an optimizer's groups that can be read without waiting for a device."""
    for group in list_groups(optimizer):
        rate = read_number(group.get("lr")) if type(group) is dict else None
        if rate is not None:
            yield rate


def list_groups(optimizer: Any) -> list[Any]:
    """Return the groups of an optimizer's parameters."""
    groups = read_attributes(optimizer).get("param_groups")
    return groups if type(groups) is list else []


def list_optimized(optimizer: Any) -> Iterator[Any]:
    """Yield the parameters of an optimizer's groups."""
    for group in list_groups(optimizer):
        yield from list_values(group.get("params")) if type(group) is dict else ()


# -- modules


def is_training(module: Any) -> bool:
    """Return whether a module is in training. Of one that PyTorch wraps around another, the other one counts.

    Lightning puts DistributedDataParallel into evaluation before a validation, and only the model inside back.
    """
    inner = _find_wrapped(module)
    while inner is not None:
        module = inner
        inner = _find_wrapped(module)
    state = read_attributes(module).get("training")
    if state is None and is_of_package(module, "torch.jit"):
        state = module.training
    return state is True


def _find_wrapped(module: Any) -> Any:
    """Return the module around which a class of PyTorch is wrapped; None for any other module."""
    if not any(name in _WRAPPERS for name in list_names(type(module))):
        return None
    return next((child for name, child in list_children(module) if name in WRAPPING), None)


def is_module(value: Any) -> bool:
    """Return whether a value is a torch.nn.Module."""
    torch = sys.modules.get("torch")
    kind = None if torch is None else getattr(torch.nn, "Module", None)
    return kind is not None and is_instance(value, kind)


def list_children(module: Any) -> list[tuple[str, Any]]:
    """Return name and module of those directly in a module."""
    return _list_entries(module, "_modules")


def list_modules(module: Any) -> list[tuple[str, Any]]:
    """Return a module and those in it, each once and with its name, in the order of ``named_modules``."""
    found: list[tuple[str, Any]] = []
    seen: set[int] = set()
    waiting = [("", module)]
    while waiting:
        name, part = waiting.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        found.append((name, part))
        waiting += [(_join(name, key), child) for key, child in reversed(list_children(part))]
    return found


def list_parameters(module: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield name, parameter and owner of a module's parameters, each once, in the order of ``named_parameters``."""
    return _list_tensors(module, "_parameters")


def list_buffers(module: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield name, buffer and owner of a module's buffers, each once, in the order of ``named_buffers``."""
    return _list_tensors(module, "_buffers")


def _list_tensors(module: Any, table: str) -> Iterator[tuple[str, Any, Any]]:
    seen: set[int] = set()
    for name, owner in list_modules(module):
        for key, tensor in _list_entries(owner, table):
            if id(tensor) not in seen:
                seen.add(id(tensor))
                yield _join(name, key), tensor, owner


def _list_entries(module: Any, name: str) -> list[tuple[str, Any]]:
    """Return the entries of one of a module's tables that are not None."""
    table = read_attributes(module).get(name)
    entries: Any = ()
    if is_instance(table, dict):
        entries = dict.items(table)  # type: ignore[arg-type]
    elif is_of_package(table, "torch"):  # of a module of TorchScript
        entries = table.items()  # type: ignore[union-attr]
    return [(key, value) for key, value in entries if value is not None]


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def strip_wrappers(name: str) -> str:
    """Return the name that a parameter or buffer has without the modules that PyTorch wraps around others."""
    return ".".join(part for part in name.split(".") if part not in WRAPPING)


# -- tensors


def is_tensor(torch: Any, value: Any) -> bool:
    """Return whether a value is a tensor of any class."""
    return issubclass(type(value), torch.Tensor)


def read_tensor(torch: Any, value: Any) -> Any:
    """Return a plain, detached tensor with the numbers of a tensor; of a DTensor those of its part on this rank.

    None for anything else, and for a tensor whose class computes by itself.
    """
    kind = type(value)
    if kind is torch.Tensor or kind is torch.nn.Parameter:
        return value.detach()
    if not issubclass(kind, torch.Tensor):
        return None
    if is_distributed(value):
        return read_tensor(torch, value._local_tensor)
    if find_member(kind, "__torch_dispatch__") is not find_member(torch.Tensor, "__torch_dispatch__"):
        return None
    with torch._C.DisableTorchFunction():
        return find_member(torch.Tensor, "detach")(value)


def read_property(torch: Any, tensor: Any, name: str) -> Any:
    """Return a property that PyTorch defines for all tensors, such as ``grad``."""
    with torch._C.DisableTorchFunction():
        return find_member(torch.Tensor, name).__get__(tensor)


def is_distributed(value: Any) -> bool:
    """Return whether a value is a DTensor."""
    return type(value) is getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", _MISSING)


def list_placements(value: Any) -> tuple[Any, ...]:
    """Return how the dimensions of a mesh divide a DTensor; empty for any other tensor."""
    return value.placements if is_distributed(value) else ()


def bypass_modes(torch: Any) -> AbstractContextManager[None]:
    """Return a context in which the modes that the script has entered do not see operations on tensors.

    It is not entered without a mode: the script's handler of a signal may run in it.
    """
    core = torch._C
    if not (core._len_torch_dispatch_stack() or core._len_torch_function_stack()):
        return nullcontext()
    return _Bypass(core)


class _Bypass(AbstractContextManager[None]):
    def __init__(self, core: Any) -> None:
        self._guards = [core.DisableTorchFunction(), core._DisableTorchDispatch()]

    def __enter__(self) -> None:
        for guard in self._guards:
            guard.__enter__()

    def __exit__(self, *arguments: object) -> None:
        for guard in reversed(self._guards):
            guard.__exit__(*arguments)

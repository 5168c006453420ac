"""Record the values that a script keeps beside its models: queues, counters, normalizers, averages of weights.

They are read in the variables of the script's frames and modules, and in the objects of its own classes.
"""

import argparse
import collections
import gc
import random
import sys
import time
import types
import weakref
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, NamedTuple

from ...base.exceptions import LIBRARY
from ...rank import fingerprint
from ...rank.script_objects import (
    IdentityMap,
    bypass_modes,
    find_module_name,
    is_instance,
    is_of_package,
    list_bases,
    list_modules,
    list_names,
    list_own_members,
    list_parameters,
    read_attributes,
    read_tensor,
)
from .contract import EMPTY, GENERATOR, MOST_STATES, NUMBERS, SCAN_STEP, TENSORS, WEIGHTS

_MOST_VALUES = 4096  # that a scan visits
_MOST_MEMBERS = 32  # of a container, at each end
_MOST_DEPTH = 6
_MOST_ELEMENTS = 1 << 16  # of a tensor; a larger one is sampled
_MOST_BYTES = 1 << 18  # of an array
_SCAN_SECONDS = 3.0  # usual scans take milliseconds
_SCANS = 4  # without a change, after which a value is not read any more
_FRAMES = 64
_OPTIMIZED = 1  # flag of a function's code, whose frame copies its variables
_REFERENCES = 3  # to that copy: of its frame, of a variable here, and of the call that counts them
_PROGRAM = __name__.partition(".")[0]
_NAMESPACES = (types.SimpleNamespace, argparse.Namespace)
_SHARED = (int, float)  # one object may be the value of several names
_CONTAINERS = (list, tuple, collections.deque)


class _Value(NamedTuple):
    """A value to read. ``name``: as the script reaches it, such as norm.mean."""

    name: str
    value: Any
    depth: int


class _Scope(NamedTuple):
    """The variables of a module, or of a function's frame, whose name is ``function``."""

    function: str
    variables: dict[str, Any]


class StateReader:
    """Reads the values of a process before each step. Their names are the same in each run of the script."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self.views = IdentityMap()  # of tensors in the models' memory: steps before their scan, and the variable
        self._scans = 0
        self._known: dict[str, str] = {}  # last entry by name
        self._quiet: dict[str, int] = {}  # scans without a change
        self._members: dict[str, tuple[int, ...]] = {}  # ids of what quiet containers have
        self._apart: list[weakref.ref[Any]] = []  # objects that no variable names
        self._shapes: frozenset[tuple[int, ...]] = frozenset()  # of the models' parameters
        self._common = frozenset(read_attributes(torch.nn.Identity()))  # attributes of every module

    def read(self, frame: Any, models: list[Any], groups: Iterable[Any] = ()) -> tuple[str, ...]:
        """Return ``name=kind:digest`` of each value that has changed since the last call; at the first two of all.

        ``frame``: the innermost one; ``models``: those that the script trains; ``groups``: of their optimizers, which
        a variable of the script may name.
        """
        self._scans += 1
        entries = self._scan(frame, models, groups)
        changed = []
        for name, entry in entries.items():
            is_same = self._known.get(name) == entry
            self._quiet[name] = self._quiet.get(name, 0) + 1 if is_same else 0
            if not is_same or self._scans <= SCAN_STEP:
                changed.append(f"{name}={entry}")
        self._known.update(entries)
        return tuple(changed[:MOST_STATES])

    def _scan(self, frame: Any, models: list[Any], groups: Iterable[Any]) -> dict[str, str]:
        deadline = time.monotonic() + _SCAN_SECONDS
        owned, scopes = _list_scopes(frame)
        self._shapes = self._shapes or _list_shapes(self._torch, models)
        seen = {id(part) for model in models for _, part in list_modules(model)} | set(map(id, groups))
        memory = _list_memory(self._torch, models)
        waiting = collections.deque(_list_variables(scopes))
        waiting.extend(self._list_parts(models))
        has_rest = True
        entries: dict[str, str] = {}
        for _ in range(_MOST_VALUES):
            if not waiting and has_rest:
                has_rest = False
                waiting.extend(self._list_apart(owned, seen))
            if not waiting or len(entries) >= MOST_STATES or time.monotonic() > deadline:
                break
            item = waiting.popleft()
            is_quiet = self._quiet.get(item.name, 0) >= _SCANS and not self._has_new_members(item)
            if item.name in entries or is_quiet or id(item.value) in seen:
                continue
            if type(item.value) not in _SHARED:
                seen.add(id(item.value))
            found = _Numbers(self._torch, self._shapes, memory)
            found.add(item.value)
            for tensor in found.views:
                if self.views.get(tensor) is None:
                    self.views[tensor] = (self._scans - 1, item.name)
            if found.views:
                continue
            if found.entry:
                entries[item.name] = found.entry
            elif item.depth < _MOST_DEPTH:
                waiting.extend(self._list_members(item, owned))
        return entries

    def _has_new_members(self, item: _Value) -> bool:
        """Return whether a container has got other members since the last call, such as the best weights so far."""
        if not is_instance(item.value, dict, *_CONTAINERS):
            return False
        members = tuple(map(id, _list_items(item.value)[:_MOST_MEMBERS]))
        former = self._members.get(item.name, members)
        self._members[item.name] = members
        return members != former

    def _list_apart(self, owned: set[str], seen: set[int]) -> list[_Value]:
        """Return the objects of the script's classes that only a library holds, such as a callback."""
        if self._scans == SCAN_STEP:
            items = [item for item in gc.get_objects() if find_module_name(type(item)) in owned]
            apart = [item for item in items if id(item) not in seen]
            self._apart = [weakref.ref(item) for item in apart if _is_weak(item)][:MOST_STATES]
        items = [item for reference in self._apart if (item := reference()) is not None]
        return [_Value(list_names(type(item))[0], item, 0) for item in items]

    def _list_parts(self, models: list[Any]) -> Iterator[_Value]:
        """Yield what the modules of the models have beside their parameters and buffers."""
        for model in models:
            for _, part in list_modules(model):
                if not is_of_package(part, "torch"):
                    yield from self._list_attributes(_Value(list_names(type(part))[0], part, 0))

    def _list_members(self, item: _Value, owned: set[str]) -> Iterator[_Value]:
        value = item.value
        if is_instance(value, *_CONTAINERS):
            for index, member in enumerate(_list_items(value)[:_MOST_MEMBERS]):
                yield _Value(f"{item.name}[{index}]", member, item.depth + 1)
        elif is_instance(value, dict):
            for key, member in list(islice(dict.items(value), _MOST_MEMBERS)):
                if type(key) is str:
                    yield _Value(f"{item.name}[{key!r}]", member, item.depth + 1)
        elif issubclass(type(value), type):
            if find_module_name(value) in owned:
                for name, member in list_own_members(value).items():
                    yield _Value(f"{item.name}.{name}", member, item.depth + 1)
        elif find_module_name(type(value)) in owned or type(value) in _NAMESPACES:
            yield from self._list_attributes(item)

    def _list_attributes(self, item: _Value) -> Iterator[_Value]:
        """Yield the attributes of an object, also those in slots."""
        attributes = dict(read_attributes(item.value))
        for base in list_bases(type(item.value)):
            for name, member in list_own_members(base).items():
                if type(member) is types.MemberDescriptorType and name not in attributes:
                    try:
                        attributes[name] = member.__get__(item.value)
                    except AttributeError:
                        continue  # a slot without a value
        is_module = "_parameters" in attributes
        for name, value in attributes.items():
            if not (is_module and name in self._common):
                yield _Value(f"{item.name}.{name}", value, item.depth + 1)


class _Numbers:
    """The numbers and tensors in a value, and their digest.

    ``shapes``, ``memory``: of the models' parameters; ``views``: tensors that refer to them, as in a state_dict that
    the script has saved and keeps.
    """

    def __init__(self, torch: Any, shapes: frozenset[tuple[int, ...]], memory: frozenset[int]) -> None:
        self._memory = memory
        self.views: list[Any] = []
        self._torch = torch
        self._shapes = shapes
        self._digests: list[int] = []
        self._found: set[tuple[int, ...]] = set()
        self._kind = ""
        self._is_empty = False

    @property
    def entry(self) -> str:
        """Kind and digest; empty without a number."""
        kind = WEIGHTS if self._shapes and self._shapes <= self._found else self._kind
        kind = EMPTY if self._is_empty else kind
        return f"{kind}:{fingerprint.combine(self._digests):016x}" if kind else ""

    def add(self, value: Any, depth: int = 0) -> None:
        """Add what a value has."""
        kind = type(value)
        if kind is int or kind is float:
            self._note(fingerprint.hash_text(repr(value)), is_single=True)
        elif issubclass(kind, self._torch.Tensor):
            self._add_tensor(value)
        elif kind is self._torch.Generator or kind is random.Random:
            self._add_generator(value)
        elif is_of_package(value, "numpy"):
            self._add_array(value)
        elif depth < _MOST_DEPTH and is_instance(value, dict, *_CONTAINERS):
            members = _list_items(value)
            self._is_empty = not (members or depth)
            self._digests.append(len(members))
            for member in members[:_MOST_MEMBERS] + members[_MOST_MEMBERS:][-_MOST_MEMBERS:]:
                self.add(member, depth + 1)

    def _add_tensor(self, value: Any) -> None:
        with bypass_modes(self._torch), self._torch.no_grad():
            tensor = read_tensor(self._torch, value)
            if tensor is None or tensor.layout is not self._torch.strided or tensor.is_meta:
                return
            if tensor.numel() > 0 and tensor.data_ptr() in self._memory:
                self.views.append(value)
            if type(value) is not self._torch.nn.Parameter:
                self._found.add(tuple(tensor.shape))
            part = tensor.reshape(-1)
            part = part[:: max(1, part.numel() // _MOST_ELEMENTS)]
            self._note(fingerprint.digest(self._torch, part), is_single=part.numel() == 1)

    def _add_generator(self, value: Any) -> None:
        if type(value) is random.Random:
            state = repr(value.getstate()).encode()
        else:
            with bypass_modes(self._torch):
                state = value.get_state().numpy().tobytes()
        self._kind = GENERATOR
        self._digests.append(fingerprint.hash_bytes(state) & fingerprint.MASK)

    def _add_array(self, value: Any) -> None:
        numpy = sys.modules["numpy"]
        if type(value) is numpy.ndarray and not value.dtype.hasobject:
            part = value.reshape(-1)[: _MOST_BYTES // max(1, value.itemsize)]
            self._note(fingerprint.hash_bytes(part.tobytes()), is_single=value.size == 1)
        elif is_instance(value, numpy.number):
            self._note(fingerprint.hash_bytes(value.tobytes()), is_single=True)
        elif "numpy.random" in sys.modules and type(value) is numpy.random.Generator:
            self._kind = GENERATOR
            self._digests.append(fingerprint.hash_text(repr(value.bit_generator.state)) & fingerprint.MASK)

    def _note(self, digest: int, *, is_single: bool) -> None:
        self._kind = self._kind if is_single and self._kind else NUMBERS if is_single else TENSORS
        self._digests.append(digest & fingerprint.MASK)


def _list_items(value: Any) -> list[Any]:
    """Return what is in a container, without its own methods."""
    if is_instance(value, dict):
        return list(dict.values(value))
    kind = next(kind for kind in _CONTAINERS if is_instance(value, kind))
    return list(kind.__iter__(value))


def _is_weak(value: Any) -> bool:
    """Return whether a value can be referenced without keeping it alive."""
    return any("__weakref__" in list_own_members(base) for base in list_bases(type(value)))


def _list_scopes(frame: Any) -> tuple[set[str], list[_Scope]]:
    """Return the names of the script's modules, and the variables of its modules and frames, the outermost first."""
    functions = []
    modules = {}
    for _ in range(_FRAMES):
        if frame is None:
            break
        code = frame.f_code
        if _is_script(code.co_filename, frame.f_globals):
            modules[id(frame.f_globals)] = frame.f_globals
            if code.co_flags & _OPTIMIZED and not code.co_name.startswith("<"):
                functions.append(_Scope(code.co_name, _copy_variables(frame)))
        frame = frame.f_back
    for module in list(sys.modules.values()):
        table = read_attributes(module) if type(module) is types.ModuleType else {}
        path = table.get("__file__")
        if type(path) is str and path.endswith(".py") and _is_script(path, table):
            modules[id(table)] = table
    names = {name for table in modules.values() if type(name := table.get("__name__")) is str}
    return names, [*(_Scope("", table) for table in modules.values()), *reversed(functions)]


def _is_script(path: str, table: dict[str, Any]) -> bool:
    is_program = str(table.get("__name__")).partition(".")[0] == _PROGRAM
    return not (is_program or path.startswith("<") or LIBRARY.search(path))


def _copy_variables(frame: Any) -> dict[str, Any]:
    """Return the variables of a function. Until Python 3.13 its frame keeps a copy, which would keep them alive."""
    variables = frame.f_locals
    copy = dict(variables)
    if sys.version_info < (3, 13) and sys.getrefcount(variables) <= _REFERENCES:
        variables.clear()
    return copy


def _list_variables(scopes: list[_Scope]) -> Iterator[_Value]:
    names = set()
    for function, variables in scopes:
        for name, value in list(variables.items()):
            if type(name) is str and not name.startswith("__"):
                yield _Value(f"{function}.{name}" if name in names else name, value, 0)
                names.add(name)


def _list_memory(torch: Any, models: list[Any]) -> frozenset[int]:
    """Return where the parameters are in memory."""
    with bypass_modes(torch):
        return frozenset(item.data_ptr() for item in _read_parameters(torch, models) if not item.is_meta)


def _list_shapes(torch: Any, models: list[Any]) -> frozenset[tuple[int, ...]]:
    with bypass_modes(torch):
        return frozenset(tuple(item.shape) for item in _read_parameters(torch, models))


def _read_parameters(torch: Any, models: list[Any]) -> Iterator[Any]:
    """Yield the tensors of the parameters that can be read. Call it with ``bypass_modes``."""
    tensors = (read_tensor(torch, item) for model in models for _, item, _ in list_parameters(model))
    return (tensor for tensor in tensors if tensor is not None)

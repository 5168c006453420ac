"""Check values of code that the kernel does not trust against declared types."""

import math
from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, Final, Literal, Union, get_args, get_origin, get_type_hints

import msgspec

_Check = Callable[[Any], bool]


def conforms(value: object, kind: Any) -> bool:
    """Return whether a value, with all that it contains, has a declared type. A ``float`` is a number of seconds.

    Raises: msgspec.ValidationError for a Struct with a member that the API server would refuse.
    """
    return _build_check(kind)(value)


@cache
def _build_check(kind: Any) -> _Check:
    origin = get_origin(kind)
    parts = get_args(kind)
    if origin is Literal:
        return lambda value: value in parts
    if origin in (Union, UnionType):
        others = [_build_check(part) for part in parts if part is not NoneType]
        has_none = NoneType in parts
        return lambda value: any(check(value) for check in others) if value is not None else has_none
    checks = [_build_check(part) for part in parts if part is not ...]
    if origin is Mapping:
        return lambda value: (
            isinstance(value, Mapping) and all(checks[0](key) and checks[1](item) for key, item in value.items())
        )
    if origin is not None:  # a tuple of any length, or a set
        return lambda value: isinstance(value, origin) and all(map(checks[0], value))
    if kind in _SIMPLE:
        return _SIMPLE[kind]
    if issubclass(kind, msgspec.Struct):
        return lambda value: isinstance(value, kind) and _is_storable(value)
    members = _list_members(kind)
    return lambda value: isinstance(value, kind) and all(check(getattr(value, name)) for name, check in members)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf


def _list_members(kind: Any) -> list[tuple[str, _Check]]:
    """Return the members of a record, each with its check."""
    is_record = is_dataclass(kind) or hasattr(kind, "_fields")  # of a NamedTuple
    hints = get_type_hints(kind) if is_record else {}
    return [(name, _build_check(part)) for name, part in hints.items()]


def _is_storable(value: msgspec.Struct) -> bool:
    msgspec.convert(msgspec.to_builtins(value), type(value))
    return True


_SIMPLE: Final[Mapping[Any, _Check]] = {Any: lambda _: True, None: lambda value: value is None, float: _is_number}

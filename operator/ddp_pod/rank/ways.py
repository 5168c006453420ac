"""The ways from names of the script to the values in its objects, such as ``model.head.cache[0]``."""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Final, NamedTuple

from .script_objects import is_instance, is_module
from .values import MODULE_TABLES, list_attributes

_MOST_PARTS: Final = 20_000  # of all objects together
_DEEPEST: Final = 4
# Python has one object for equal ones of these, so that another variable's value may be the same object by chance.
_SHARED: Final = (bool, int, float, complex, str, bytes, type(None), type)


class Root(NamedTuple):
    """A value of the script's own line, under its name there."""

    name: str
    value: Any


def list_ways(roots: Sequence[Root]) -> Mapping[int, str]:
    """Return the shortest way to each value below the roots, by the value's id. The roots keep these values alive."""
    ways: dict[int, str] = {}
    known = {id(root.value) for root in roots}
    for part in islice(_walk(roots), _MOST_PARTS):
        if id(part.value) not in known and not _is_shared(part.value):
            ways.setdefault(id(part.value), part.name)
    return ways


def _walk(roots: Sequence[Root]) -> Iterator[Root]:
    """Yield the parts of the roots, then the parts of these, and so on: each object's parts once."""
    waiting = deque((root, 0) for root in roots)
    seen: set[int] = set()
    while waiting:
        owner, depth = waiting.popleft()
        if id(owner.value) in seen or _is_shared(owner.value):
            continue
        seen.add(id(owner.value))
        for name, value in _list_parts(owner.value):
            part = Root(f"{owner.name}{name}", value)
            yield part
            if depth + 1 < _DEEPEST:
                waiting.append((part, depth + 1))


def _is_shared(value: Any) -> bool:
    return is_instance(value, *_SHARED) or (type(value) is tuple and not value)


def _list_parts(owner: Any) -> Iterator[tuple[str, Any]]:
    """Yield the items or attributes of an object, without code of the script."""
    if is_instance(owner, dict):
        yield from ((f"[{key!r}]", part) for key, part in dict.items(owner) if type(key) in (str, int))
    elif type(owner) in (list, tuple):
        yield from ((f"[{number}]", part) for number, part in enumerate(owner))
    else:
        attributes = list_attributes(owner)
        for name in MODULE_TABLES if is_module(owner) else ():
            table = attributes.get(name)
            if type(table) is dict:
                yield from ((f".{key}", part) for key, part in table.items())
        yield from ((f".{name}", part) for name, part in attributes.items() if name not in MODULE_TABLES)

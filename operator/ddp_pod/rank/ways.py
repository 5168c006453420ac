"""The way from a name of the script to a value that a library's function has, such as ``model.head.cache[0]``."""

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, Final, NamedTuple

from .script_objects import is_instance, is_module
from .values import list_attributes

_MOST_OBJECTS: Final = 2000
_DEEPEST: Final = 4
_TABLES: Final = ("_parameters", "_buffers", "_modules")  # of a module
_NUMBERS_AND_TEXTS: Final = (bool, int, float, complex, str, bytes, type(None))


class Root(NamedTuple):
    """A value of the script's own line, under its name there."""

    name: str
    value: Any


def find_way(roots: Sequence[Root], value: Any) -> str:
    """Return how a value is reached from one of the roots, the shortest way; empty: it is not, or is one of them."""
    waiting = deque((root, 0) for root in roots)
    seen = {id(root.value) for root in roots}
    if id(value) in seen:
        return ""
    while waiting and len(seen) < _MOST_OBJECTS:
        (name, owner), depth = waiting.popleft()
        for part, inner in _list_parts(owner) if depth < _DEEPEST else ():
            if inner is value:
                return f"{name}{part}"
            if id(inner) not in seen and not is_instance(inner, *_NUMBERS_AND_TEXTS):
                seen.add(id(inner))
                waiting.append((Root(f"{name}{part}", inner), depth + 1))
    return ""


def _list_parts(owner: Any) -> Iterator[tuple[str, Any]]:
    """Yield the items or attributes of an object, without code of the script."""
    if is_instance(owner, dict):
        items = islice(dict.items(owner), _MOST_OBJECTS)
        yield from ((f"[{key!r}]", part) for key, part in items if type(key) in (str, int))
    elif type(owner) in (list, tuple):
        yield from ((f"[{number}]", part) for number, part in enumerate(owner[:_MOST_OBJECTS]))
    elif not is_instance(owner, type):
        attributes = list_attributes(owner)
        for name in _TABLES if is_module(owner) else ():
            table = attributes.get(name)
            if type(table) is dict:
                yield from ((f".{key}", part) for key, part in table.items())
        yield from ((f".{name}", part) for name, part in attributes.items() if name not in _TABLES)

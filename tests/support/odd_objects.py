"""Objects of other owners in shapes that no component sends: what a definition without a schema lets through."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from itertools import cycle, islice
from typing import Any, Final

Object = dict[str, Any]

_MISSING: Final = object()


def nest(levels: int) -> Any:
    """Return lists within lists."""
    value: Any = "end"
    for _ in range(levels):
        value = [value]
    return value


ODD_VALUES: Final = {
    "missing": _MISSING,
    "null": None,
    "text": "text",
    "empty text": "",
    "unicode": "ü\U0001f525\u202e\u0000",
    "long text": "x" * 5000,
    "digits": "9" * 5000,
    "zero": 0,
    "negative": -1,
    "huge": 10**30,
    "float": 1e308,
    "boolean": True,
    "NaN": "NaN",
    "infinite": "-Infinity",
    "early time": "0001-01-01T00:00:00Z",
    "late time": "9999-12-31T23:59:59.999999-23:59",
    "no time": "9999999-13-45T99:99:99Z",
    "list": [],
    "list of texts": ["text"],
    "list of nulls": [None],
    "list of lists": [[[]]],
    "list of maps": [{}],
    "list of odd maps": [{"type": [], "name": 7, "status": {}}],
    "map": {},
    "map of null": {"": None},
    "map of numbers": {"a": 1, "b": 1e308},
    "map of lists": {"type": ["a"], "name": ["b"]},
    "nested": nest(300),
}
"""Values that replace a part of an object; a marker for a part that is missing."""


def list_odd_shapes(good: Mapping[str, Any], parts: Sequence[str], each: int = 5) -> Iterator[tuple[str, Object]]:
    """Yield copies of an object in which one part is odd, each with a description.

    ``parts``: paths such as ``status.conditions.0.type``. ``each``: odd values of one part; all are used in turn.
    """
    values = cycle(ODD_VALUES.items())
    for path in parts:
        for description, value in islice(values, each):
            yield f"{path}: {description}", replace_part(good, path, value)


def replace_part(good: Mapping[str, Any], path: str, value: Any) -> Object:
    """Return a copy of an object with another value at a path."""
    changed = copy.deepcopy(dict(good))
    node: Any = changed
    *parents, last = [int(name) if name.isdecimal() else name for name in path.split(".")]
    for name in parents:
        node = node[name]
    if value is _MISSING:
        del node[last]
    else:
        node[last] = copy.deepcopy(value)
    return changed


def list_paths(value: Any, path: str = "") -> Iterator[str]:
    """Yield the paths of all parts of an object."""
    members: Any = ()
    if isinstance(value, dict):
        members = ((name, member) for name, member in value.items() if "." not in name)
    elif isinstance(value, list):
        members = ((str(index), member) for index, member in enumerate(value))
    for name, member in members:
        inner = f"{path}.{name}" if path else name
        yield inner
        yield from list_paths(member, inner)

"""Records that cross a process boundary as JSON objects: written as they are, read within limits.

The limits of a member are declared with its field. What reads a record of an untrusted pod passes ``clean``, which
every text goes through.
"""

import functools
import json
import math
import types
import typing
from collections.abc import Callable, Sequence
from dataclasses import MISSING, field, fields, is_dataclass
from typing import Any, Final, NamedTuple, TypeVar

Clean = Callable[[str, int], str]
"""Returns at most a number of characters of a text."""
Record = TypeVar("Record")

_MOST_ITEMS: Final = 16
_MOST_CHARACTERS: Final = 300
_NUMBER_LIMIT: Final = 2**31 - 1


class _Member(NamedTuple):
    """A field of a record. ``key``: its name in JSON; ``kind``: its type, without None."""

    name: str
    key: str
    kind: Any
    limits: typing.Mapping[str, Any]


def text(most: int = _MOST_CHARACTERS, *, keeps_end: bool = False) -> Any:
    """Declare a text. Of a longer one the beginning is kept, or the end."""
    return field(default="", metadata={"most": most, "keeps_end": keeps_end})


def choice(choices: Sequence[str], default: str = "") -> Any:
    """Declare a text that is one of ``choices``."""
    return field(default=default, metadata={"choices": frozenset(choices)})


def items(most: int) -> Any:
    """Declare a list, of which the first items are kept."""
    return field(default=(), metadata={"most": most})


def number(most: float = _NUMBER_LIMIT, *, default: float | None = None) -> Any:
    """Declare a number from 0 to ``most``."""
    return field(default=default, metadata={"most": most, "least": 0})


def encode_json(record: object) -> bytes:
    """Return a record as JSON. Raises: ValueError for a number that JSON does not have."""
    return json.dumps(to_json(record), allow_nan=False).encode()


def json_name(name: str) -> str:
    """Return the name in JSON of a record's field: ``pod_index`` is ``podIndex``."""
    first, *rest = name.split("_")
    return first + "".join(part.capitalize() for part in rest)


def to_json(record: Any) -> dict[str, Any]:
    """Return the JSON object of a record, without members that are unknown, empty or not finite."""
    members = {
        member.key: _encode(getattr(record, member.name)) for member in _list_members(typing.cast(Any, type(record)))
    }
    return {key: value for key, value in members.items() if value not in (None, "", [], {})}


def _encode(value: Any) -> Any:
    if is_dataclass(value):
        return to_json(value)
    if isinstance(value, tuple):
        return [_encode(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def read_record(kind: type[Record], raw: object, clean: Clean = lambda text, most: text[:most]) -> Record:
    """Return the record in a JSON object.

    Unknown members are ignored. A member of a wrong type, or a number out of its range, counts as absent.
    """
    values = {}
    if isinstance(raw, dict):
        for member in _list_members(typing.cast(Any, kind)):
            value = _read(member.kind, raw.get(member.key), member.limits, clean)
            if value is not None:
                values[member.name] = value
    return kind(**values)


def _read(kind: Any, raw: object, limits: typing.Mapping[str, Any], clean: Clean) -> Any:
    """Return a member's value; None: it has none that is valid."""
    if is_dataclass(kind):
        return read_record(typing.cast(type, kind), raw, clean) if isinstance(raw, dict) else None
    if typing.get_origin(kind) is tuple:
        item_kind = typing.get_args(kind)[0]
        first = raw[: limits.get("most", _MOST_ITEMS)] if isinstance(raw, list) else []
        read = (_read(item_kind, item, {}, clean) for item in first)
        return tuple(item for item in read if item is not None)
    if kind is str:
        return _read_text(raw, limits, clean) if isinstance(raw, str) else None
    if kind is bool:
        return raw if isinstance(raw, bool) else None
    return _read_number(kind, raw, limits)


def _read_text(raw: str, limits: typing.Mapping[str, Any], clean: Clean) -> str | None:
    choices = limits.get("choices")
    if choices is not None:
        return raw if raw in choices else None
    most = limits.get("most", _MOST_CHARACTERS)
    return clean(raw[-most:] if limits.get("keeps_end") else raw, most)


def _read_number(kind: Any, raw: object, limits: typing.Mapping[str, Any]) -> Any:
    if isinstance(raw, bool) or not isinstance(raw, int if kind is int else (int, float)):
        return None
    least = limits.get("least", -math.inf)
    most = limits.get("most", math.inf if kind is float else _NUMBER_LIMIT)
    try:
        is_valid = math.isfinite(raw) and least <= raw <= most
        return kind(raw) if is_valid else None
    except OverflowError:
        return None


@functools.cache
def _list_members(kind: Any) -> Sequence[_Member]:
    """Return the fields of a record."""
    hints = typing.get_type_hints(kind)
    members = []
    for item in fields(kind):
        hint = hints[item.name]
        if typing.get_origin(hint) in (typing.Union, types.UnionType):
            hint = next(option for option in typing.get_args(hint) if option is not types.NoneType)
        members.append(_Member(item.name, json_name(item.name), hint, item.metadata))
        assert item.default is not MISSING or item.default_factory is not MISSING, f"{kind.__name__}.{item.name}"
    return members

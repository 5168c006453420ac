"""Command-line flags and YAML for configuration dataclasses, derived from their fields.

A configuration is a tree of frozen dataclasses, each next to the code that uses it. Fields created by :func:`option`
have a help text and limits, and become flags. Flags are flat (``--batch-size``), files are nested
(``data: {batch_size: 32}``).
"""

import dataclasses
import difflib
import math
import operator
import sys
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from ddp_sdk.errors import UserError, require

_LIMITS = {
    "at_least": ("at least", operator.ge), "above": ("above", operator.gt),
    "at_most": ("at most", operator.le), "below": ("below", operator.lt),
}  # fmt: skip
# The greatest seed: torch's generators accept it, also with the epoch added.
MAX_SEED = 2**62
T = typing.TypeVar("T")


def option(
    default: Any,
    help: str,
    *,
    flag: str | None = None,
    choices: tuple[str, ...] | None = None,
    only: Mapping[str, tuple[str, ...]] | None = None,
    **limits: float,
) -> Any:
    """Create a dataclass field with the help text and flag of its command-line option.

    ``flag`` defaults to the field's name with dashes. ``choices`` and ``limits`` (``at_least``, ``above``, ``at_most``,
    ``below``) are checked by :class:`SettingsGroup`. ``only``: the settings with whose values this one is read, by
    their dotted names; without values, it is read if that setting is on.
    """
    assert limits.keys() <= _LIMITS.keys(), limits
    metadata = {"help": help, "flag": flag, "choices": choices, "only": only or {}, "limits": limits}
    return dataclasses.field(default=default, metadata=metadata)


class SettingsGroup:
    """Base of a group of settings, a frozen dataclass.

    Its constructor raises :class:`UserError` for values beyond the limits of their options.
    """

    group: ClassVar[str]

    def __init_subclass__(cls, group: str = "") -> None:
        cls.group = group and f"{group}."

    def __post_init__(self) -> None:
        for field in dataclasses.fields(typing.cast(Any, self)):
            value = getattr(self, field.name)
            if value is None or "help" not in field.metadata:
                continue
            key = self.group + field.name
            choices = field.metadata["choices"]
            limits = field.metadata["limits"]
            for item in value if isinstance(value, tuple) else (value,):
                if choices and item not in choices:
                    raise UserError(key, f"{item!r} is not known", f"choose from {', '.join(choices)}")
            require(
                _is_within(value, limits),
                key,
                f"{_shorten(value)} is out of range",
                f"it must be {' and '.join(f'{_LIMITS[name][0]} {_format(limit)}' for name, limit in limits.items())}",
            )


def _is_within(value: Any, limits: Mapping[str, float]) -> bool:
    if limits and isinstance(value, float) and not math.isfinite(value):
        return False
    return all(_LIMITS[name][1](value, limit) for name, limit in limits.items())


def _shorten(value: float) -> str:
    text = str(value)
    return text if len(text) <= 40 else f"{text[:20]}… ({len(text)} digits)"


def _format(limit: float) -> str:
    return str(limit) if isinstance(limit, int) else f"{limit:g}"


@dataclass(frozen=True)
class Option:
    """One leaf of the configuration tree."""

    path: tuple[str, ...]
    flag: str
    type: Any
    optional: bool
    help: str
    choices: tuple[str, ...] | None
    only: Mapping[str, tuple[str, ...]]

    @property
    def key(self) -> str:
        """Return the dotted name used in files and messages, for example ``data.batch_size``."""
        return ".".join(self.path)

    def parse(self, text: str) -> Any:
        """Parse ``text`` from the command line; return invalid text unchanged, which :func:`build` rejects."""
        if self.optional and text.lower() in ("none", "null", ""):
            return None
        if typing.get_origin(self.type) is tuple:
            return tuple(part.strip() for part in text.split(",") if part.strip())
        if self.type is bool:
            return _TRUTH.get(text.lower(), text)
        try:
            return self.type(text)
        except ValueError:
            return text


_TRUTH = dict.fromkeys(("true", "yes", "on", "1"), True) | dict.fromkeys(("false", "no", "off", "0"), False)
_TYPE_NAMES = {int: "a whole number", float: "a number", str: "text", bool: "true or false", tuple: "a list"}


def _strip_optional(annotation: Any) -> tuple[Any, bool]:
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        inner = [arg for arg in typing.get_args(annotation) if arg is not type(None)]
        assert len(inner) == 1, annotation
        return inner[0], True
    return annotation, False


def options(cls: type, prefix: tuple[str, ...] = ()) -> Iterator[Option]:
    """Yield all leaves of the configuration class ``cls``, in the order of their declaration."""
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        if dataclasses.is_dataclass(hints[field.name]):
            yield from options(typing.cast(type, hints[field.name]), (*prefix, field.name))
        elif "help" in field.metadata:
            annotation, optional = _strip_optional(hints[field.name])
            flag = field.metadata["flag"] or "--" + field.name.replace("_", "-")
            described = (field.metadata[name] for name in ("help", "choices", "only"))
            yield Option((*prefix, field.name), flag, annotation, optional, *described)


def merge(base: Mapping[str, Any], overlay: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``base`` with its values overridden by those of ``overlay``, nested mappings merged."""
    merged = dict(base)
    for key, value in overlay.items():
        if isinstance(value, Mapping) and isinstance(merged.get(key), Mapping):
            merged[key] = merge(merged[key], value)
        else:
            merged[key] = value
    return merged


def build(cls: type[T], values: Mapping[str, Any], prefix: tuple[str, ...] = ()) -> T:
    """Build an instance of the configuration class ``cls`` from nested mappings; absent values take their defaults.

    Raises :class:`UserError` for an unknown name, a value of the wrong type, or a value that ``__post_init__`` rejects.
    """
    hints = typing.get_type_hints(cls)
    fields = {field.name: field for field in dataclasses.fields(typing.cast(Any, cls))}
    arguments: dict[str, Any] = {}
    for name, value in values.items():
        dotted = ".".join((*prefix, str(name)))
        if name not in fields:
            close = difflib.get_close_matches(str(name), fields, n=1)
            remedy = f"did you mean {'.'.join((*prefix, close[0]))!r}?" if close else f"known: {', '.join(fields)}"
            raise UserError(dotted, "unknown setting", remedy)
        annotation, optional = _strip_optional(hints[name])
        if dataclasses.is_dataclass(annotation):
            if not isinstance(value, Mapping):
                raise UserError(dotted, f"{value!r} is not a mapping", "give one, for example {batch_size: 32}")
            arguments[name] = build(typing.cast(type, annotation), value, (*prefix, name))
        else:
            arguments[name] = _coerce(dotted, value, annotation, optional)
    return cls(**arguments)


def _coerce(dotted: str, value: Any, annotation: Any, optional: bool) -> Any:
    """Convert ``value`` to the type of its field; files have 1 for 1.0 and lists for tuples."""
    if value is None:
        if optional:
            return None
        raise UserError(dotted, "must not be empty", "give a value, or omit the setting")
    if typing.get_origin(annotation) is tuple:
        if isinstance(value, list | tuple):
            return tuple(str(item) for item in value)
    elif annotation is float and isinstance(value, int | float) and not isinstance(value, bool):
        # An integer may exceed the range of float; the limits reject infinity.
        return math.inf if abs(value) > sys.float_info.max else float(value)
    elif annotation is float and isinstance(value, str):
        # YAML 1.1 parses 1e-3 as text: it requires a dot in a number with an exponent.
        try:
            return float(value)
        except ValueError:
            pass
    elif isinstance(value, annotation) and not (annotation is int and isinstance(value, bool)):
        return value
    kind = _TYPE_NAMES[typing.get_origin(annotation) or annotation]
    raise UserError(dotted, f"{value!r} is not {kind}", f"give {kind}")

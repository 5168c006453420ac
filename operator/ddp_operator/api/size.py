"""Limits on the size and nesting of a spec, checked before anything else reads it: every later check is cheap.

The API server stores objects of 1.5 MB with 10,000 nested lists, and does not check the pod template. Decoders and
functions that copy an object recurse, and Kopf exits if it cannot decode an event.
"""

import json
import math
from collections.abc import Callable, Collection
from typing import Any, Final, NamedTuple

from ddp_operator.api.errors import FieldError, InvalidManifest

MAX_BYTES: Final = 256 << 10
"""Maximum size as JSON: `kubectl apply` stores a copy of the object in an annotation of at most this size."""
MAX_VALUES: Final = 10_000
"""Maximum number of values, lists and objects."""
MAX_DEPTH: Final = 64
"""Maximum levels of lists and objects. A pod template needs about 15."""
_SEARCH_DEPTH: Final = 8
"""Levels in which the largest value is searched. One argument of a container is at the sixth."""
REMEDY: Final = "put scripts into the image or spec.code, and data into a ConfigMap or a volume"


TOO_DEEP: Final = f"has more than {MAX_DEPTH} levels of lists and objects; remove the inner ones"
OVERSIZE: Final = "$oversize"
"""Member of a spec that the cache keeps instead of one that is too large: path and message of its refusal."""


class OversizeSpec(InvalidManifest):
    """A spec that exceeds a limit."""


def refuse_oversize(spec: Any, path: str = "spec") -> None:
    """Check the size of a spec, or of a part of it at ``path``. Raises: OversizeSpec."""
    if isinstance(spec, dict) and OVERSIZE in spec:
        raise OversizeSpec([FieldError(*map(str, spec[OVERSIZE][:2]))])
    values = 0
    level = [spec]
    for _ in range(MAX_DEPTH):
        level = [child for value in level for child in _list_children(value)]
        values += len(level)
        if values > MAX_VALUES:
            largest = _find_largest(spec, path, _count)
            problem = f"{path} has more than {MAX_VALUES} values, {_count(largest.value)} of them here"
            raise OversizeSpec([FieldError(largest.path, f"{problem}; {REMEDY}")])
    if level:
        raise OversizeSpec([FieldError(path, TOO_DEEP)])

    size = _measure(spec)
    if size > MAX_BYTES:
        largest = _find_largest(spec, path, _measure)
        limit = f"{path} has {_format(size)} as JSON, and the limit is {_format(MAX_BYTES)}"
        message = f"{limit}; {_format(_measure(largest.value))} are here: {REMEDY}"
        raise OversizeSpec([FieldError(largest.path, message)])


class _Member(NamedTuple):
    path: str
    value: Any


def _find_largest(value: Any, path: str, measure: Callable[[Any], int]) -> _Member:
    """Return the innermost member that has at least half of the measure of the value around it."""
    for _ in range(_SEARCH_DEPTH):
        if _count(value) > MAX_VALUES:
            break
        names = [f".{name}" for name in value] if isinstance(value, dict) else []
        names = names or [f"[{index}]" for index in range(_count(value))]
        members = [_Member(path + name, child) for name, child in zip(names, _list_children(value), strict=True)]
        largest = max(members, key=lambda member: measure(member.value), default=None)
        if largest is None or 2 * measure(largest.value) < measure(value):
            break
        path, value = largest
    return _Member(path, value)


def _list_children(value: Any) -> Collection[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def _count(value: Any) -> int:
    return len(_list_children(value))


def _format(size: int) -> str:
    return f"{math.ceil(size / 1024)} KiB"


def _measure(value: Any) -> int:
    """Return the size of a value as JSON in bytes."""
    text = json.dumps(value, default=str, ensure_ascii=False, separators=(",", ":"))
    return len(text.encode(errors="surrogatepass"))

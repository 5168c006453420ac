"""Fields of the spec in the release before, which are deprecated: taken over wherever they are written or stored.

Jobs, files and profiles of that release work for one more: the CRD keeps the fields, and the commands name what
to write instead. All that reads a spec sees the form of this version alone. Pure.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from ddp_operator.api.errors import FieldError

_UNTIL: Final = "0.4"
"""The release that refuses these fields."""
TEXT: Final[Mapping[str, Any]] = {"type": "string", "description": "Part of a deprecated field."}
"""The schema of text in a former field."""


@dataclass(frozen=True, slots=True, eq=False)
class FormerField:
    """A field that is part of another one now.

    ``path``: from the spec, such as ``shm``; below ``inputs[]`` of each item of a list. ``remedy``: what to write
    instead. ``schema``: of its values. ``take_over``: takes a value and the spec, or the item of the
    list, that has it, and returns what replaces it there; a value of another shape may come from a file. Members that
    are written themselves take precedence.
    """

    path: str
    remedy: str
    schema: Mapping[str, Any]
    take_over: Callable[[Any, Mapping[str, Any]], Mapping[str, Any]]


def describe_members(**members: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the schema of a former object."""
    return {"type": "object", "properties": members}


def take_over_former(spec: Any, former: Sequence[FormerField]) -> Any:
    """Return a spec in the form of this version. Raises: InvalidManifest, if a field has no replacement."""
    for field in former:
        spec = _take_over(spec, *_split(field), field)
    return spec


def list_changed(spec: Any, former: Sequence[FormerField]) -> dict[str, Any]:
    """Return the stored members whose form has changed; None: only the new form has the member."""
    taken = take_over_former(spec, former)
    if not isinstance(spec, Mapping) or taken is spec:
        return {}
    return {name: spec.get(name) for name in {**spec, **taken} if spec.get(name) != taken.get(name)}


def find_former(spec: Any, former: Sequence[FormerField], at: str = "spec") -> list[FieldError]:
    """Return the former fields of a spec at ``at``, each with what to write instead."""
    return [
        FieldError(f"{at}{place}", f"deprecated until {_UNTIL}; {field.remedy}")
        for field in former
        for place in _find(spec, *_split(field), field)
    ]


def add_former(schema: dict[str, Any], former: Sequence[FormerField]) -> None:
    """Add the former fields to the schema of a spec, unless it lacks the group that they were in."""
    for field in former:
        items, _, below = field.path.rpartition("[].")
        node = schema
        if items:
            node = node["properties"].get(items, {}).get("items", {})
        *groups, name = below.split(".")
        for group in groups:
            node = node.get("properties", {}).get(group, {})
        if "properties" in node:
            node["properties"][name] = {**field.schema, "description": f"Deprecated until {_UNTIL}: {field.remedy}."}


def _split(field: FormerField) -> tuple[str, tuple[str, ...]]:
    """Return the list whose items have a field, empty if there is none, and the names from there."""
    items, _, below = field.path.rpartition("[].")
    return items, tuple(below.split("."))


def _take_over(spec: Any, items: str, names: tuple[str, ...], field: FormerField) -> Any:
    if not isinstance(spec, Mapping):
        return spec
    if not items:
        return _replace(spec, names, field)
    listed = spec.get(items)
    if not isinstance(listed, list):
        return spec
    return {**spec, items: [_replace(item, names, field) for item in listed]}


def _replace(owner: Any, names: tuple[str, ...], field: FormerField) -> Any:
    """Return an object with the members that replace a field."""
    if not _has(owner, names):
        return owner
    value = owner
    for name in names:
        value = value[name]
    return _merge(field.take_over(value, owner), _without(owner, names))


def _find(spec: Any, items: str, names: tuple[str, ...], field: FormerField) -> Iterator[str]:
    """Yield the places of a field in a spec."""
    if not items:
        if _has(spec, names):
            yield f".{field.path}"
        return
    listed = spec.get(items) if isinstance(spec, Mapping) else None
    for index, item in enumerate(listed if isinstance(listed, list) else ()):
        if _has(item, names):
            yield f".{items}[{index}].{'.'.join(names)}"


def _has(value: Any, names: Sequence[str]) -> bool:
    for name in names:
        if not isinstance(value, Mapping) or name not in value:
            return False
        value = value[name]
    return True


def _without(owner: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Return an object without a member at any depth."""
    name, *below = names
    kept = {key: value for key, value in owner.items() if key != name}
    return {**kept, name: _without(owner[name], below)} if below else kept


def _merge(base: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Return both objects in one; the members of ``own`` take precedence."""
    merged = {**base, **own}
    for name, value in base.items():
        if isinstance(value, Mapping) and isinstance(own.get(name), Mapping):
            merged[name] = _merge(value, own[name])
    return merged

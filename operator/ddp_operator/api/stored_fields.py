"""Read stored values field by field: what cannot be read is left out and named, and the rest is kept.

Another version, another program or a damaged file may have written them.
"""

from collections.abc import Mapping
from types import UnionType
from typing import Annotated, Any, Final, NamedTuple, Union, get_args, get_origin

import msgspec
from msgspec.structs import replace

from ddp_operator.api.operator_state import find_state_problem, restore_state, take_over_former
from ddp_operator.api.status import Status

_MAX_NAMED: Final = 5
_OUTCOMES: Final = ("Succeeded", "Failed")
"""Conditions that are phases too."""


class Reading(NamedTuple):
    """What can be read of a stored value, in the form in which it is stored; UNSET: nothing."""

    value: Any
    left_out: tuple[str, ...] = ()
    """Paths of the fields that cannot be read."""


class StoredStatus(NamedTuple):
    """The readable fields of a resource's status: typed, and as they are stored."""

    status: Status
    stored: Mapping[str, Any]
    left_out: tuple[str, ...] = ()
    """Paths of the fields that cannot be read, without those of the operator's state."""
    state_problem: str = ""
    """Why the operator's state was restored from the other fields; empty if it is readable."""

    @property
    def lacks_phase(self) -> bool:
        """Whether the phase is unknown, because it cannot be read."""
        return self.status.phase is None and not {"status", "status.phase"}.isdisjoint(self.left_out)


def read_fields(value: Any, kind: Any, path: str) -> Reading:
    """Return what can be read of a value as ``kind``. ``path``: its name."""
    try:
        msgspec.convert(value, kind)
    except msgspec.ValidationError:
        pass
    else:
        return Reading(value)

    for part in _list_parts(kind):
        members = get_args(part)
        if isinstance(value, Mapping) and isinstance(part, type) and issubclass(part, msgspec.Struct):
            return _read_members(value, part, path)
        if isinstance(value, Mapping) and get_origin(part) is dict:
            return _join({name: read_fields(item, members[1], f"{path}.{name}") for name, item in value.items()})
        if isinstance(value, list) and get_origin(part) in (tuple, list):
            readings = [read_fields(item, members[0], f"{path}[{index}]") for index, item in enumerate(value)]
            joined = _join(dict(enumerate(readings)))
            return joined._replace(value=list(joined.value.values()))
        if part is str and isinstance(value, float) and not value.is_integer():
            return Reading(repr(value))  # a former version wrote 5e-05 without quotes
    return Reading(msgspec.UNSET, (path,))


def read_status(resource: Mapping[str, Any]) -> StoredStatus:
    """Return the status of a resource. If its phase cannot be read, a job that has ended gets it from a condition."""
    stored = take_over_former(resource.get("status") or {})
    problem = find_state_problem(stored)
    if problem:
        stored = {name: value for name, value in stored.items() if name != "operatorState"}

    reading = read_fields(stored, Status, "status")
    kept = {} if reading.value is msgspec.UNSET else reading.value
    status = msgspec.convert(kept, Status)
    outcome = next(filter(status.is_true, _OUTCOMES), None)
    if outcome is not None and "status.phase" in reading.left_out:
        kept = {**kept, "phase": outcome}
        status = msgspec.convert(kept, Status)

    spoiled = [path for path in reading.left_out if path.startswith("status.operatorState")]
    if spoiled:
        problem = f"cannot be read at {spoiled[0]}"
    if problem:
        status = replace(status, operator_state=restore_state(status))
        kept = {**kept, "operatorState": msgspec.to_builtins(status.operator_state)}
    left_out = tuple(path for path in reading.left_out if path not in spoiled)
    return StoredStatus(status, kept, left_out, problem)


def describe_left_out(paths: tuple[str, ...]) -> str:
    """Return the sentence that names fields that are left out."""
    named = ", ".join(paths[:_MAX_NAMED])
    if len(paths) == 1:
        return f"{named} cannot be read and is left out"
    more = f" and {len(paths) - _MAX_NAMED} more" if len(paths) > _MAX_NAMED else ""
    return f"{named}{more} cannot be read and are left out"


def _list_parts(kind: Any) -> list[Any]:
    """Return the alternatives of an annotation."""
    if get_origin(kind) is Annotated:
        return _list_parts(get_args(kind)[0])
    if get_origin(kind) in (Union, UnionType):
        return [part for member in get_args(kind) for part in _list_parts(member)]
    return [kind]


def _read_members(value: Mapping[str, Any], kind: type[msgspec.Struct], path: str) -> Reading:
    """Return the readable members of an object; UNSET without one that it must have."""
    types = {field.encode_name: field.type for field in msgspec.structs.fields(kind)}
    readings = {}
    for name, item in value.items():
        if name in types:
            readings[name] = read_fields(item, types[name], f"{path}.{name}")
        else:
            is_refused = kind.__struct_config__.forbid_unknown_fields
            readings[name] = Reading(msgspec.UNSET, (f"{path}.{name}",)) if is_refused else Reading(item)
    joined = _join(readings)
    try:
        msgspec.convert(joined.value, kind)
    except msgspec.ValidationError:
        return Reading(msgspec.UNSET, joined.left_out or (path,))
    return joined


def _join(readings: Mapping[Any, Reading]) -> Reading:
    """Return the members that can be read, and the paths of all that cannot."""
    kept = {name: reading.value for name, reading in readings.items() if reading.value is not msgspec.UNSET}
    return Reading(kept, tuple(path for reading in readings.values() for path in reading.left_out))

"""A status with a value in every field, and the same with a value of a wrong type in one of them."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from datetime import datetime
from types import UnionType
from typing import Annotated, Any, Final, Literal, Union, get_args, get_origin

import msgspec

from ddp_operator.api.status import Status
from tests.support.builders import Json

TIME: Final = "2026-11-20T12:00:00Z"
_VALUES: Final[dict[Any, Any]] = {str: "text", int: 1, bool: True, datetime: TIME, Any: {"nodes": 1}}

OF_0_2_0: Final[Json] = {
    "phase": "Running",
    "attempt": 3,
    "attemptNodes": 2,
    "restarts": {
        "total": 2, "counted": 4, "free": 1, "disruptedInARow": 1, "used": 2, "withoutProgress": 1, "step": 90,
        "checkpointStep": 80, "inPlace": 3, "inPlaceBefore": 2, "inPlaceAfterLoss": 1, "replaced": 1, "beforeRun": 0,
        "all": 5,
    },
    "usage": {"gpus": 2, "since": TIME, "idleSince": TIME, "gpuSeconds": 7, "productive": 5, "waiting": 2, "lost": []},
    "children": ["uid-1", "uid-2"],
    "startStep": 40,
    "history": {"columns": "time,step", "rows": ["1763640000,40"]},
}  # fmt: skip
"""What an operator of 0.2.0 has stored of a job after two new attempts."""


def build_full_status() -> Json:
    """Return the status of a job that has succeeded."""
    status: Json = _build(Status)
    ended = {"type": "Succeeded", "status": "True", "reason": "AllNodesSucceeded", "lastTransitionTime": TIME}
    points = ["time,step,loss", "1763640000,1,0.5"]
    return status | {"phase": "Succeeded", "conditions": [_build_condition() | ended], "points": points}


def list_paths(value: Any, path: str = "status") -> Iterator[str]:
    """Yield the path of each member and item below a value."""
    members = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, item in members:
        below = f"{path}.{name}" if isinstance(name, str) else f"{path}[{name}]"
        yield below
        if below != "status.profile.job":
            yield from list_paths(item, below)


def spoil(status: Json, path: str) -> Json:
    """Return a status with a value of a wrong type at a path: a list of an object, or for a list an object."""
    spoiled = copy.deepcopy(status)
    names = path.removeprefix("status.").replace("[", ".[").split(".")
    keys = [int(name[1:-1]) if name.startswith("[") else name for name in names]
    parent: Any = spoiled
    for key in keys[:-1]:
        parent = parent[key]
    parent[keys[-1]] = {"odd": 1} if isinstance(parent[keys[-1]], list) else [{"odd": 1}]
    return spoiled


def _build_condition() -> Json:
    condition: Json = _build(Status)["conditions"][0]
    return condition


def _build(kind: Any) -> Any:
    """Return a value of a type, as it is stored."""
    origin = get_origin(kind)
    members = get_args(kind)
    if origin is Annotated or origin in (Union, UnionType):
        return _build(members[0])
    if origin is Literal:
        return members[0]
    if origin is tuple:
        return [_build(members[0])]
    if kind in _VALUES:
        return _VALUES[kind]
    return {field.encode_name: _build(field.type) for field in msgspec.structs.fields(kind)}

"""The operator's state in a stored status: restore one that is lost, and take over fields of a former version.

Whatever is stored there, the job keeps at least as many used restarts as its status shows to users.
"""

from collections.abc import Mapping
from typing import Any, Final

import msgspec
from msgspec.structs import replace

from ddp_operator.api.status import STATE_VERSION, OperatorState, RestartCounts, Status

_NAME: Final = "operatorState"
_COUNTS: Final = tuple(field.encode_name for field in msgspec.structs.fields(RestartCounts))


def take_over_former(stored: Any) -> Any:
    """Return a stored status with the fields of this version, for which former versions had others."""
    return _take_over_state(_take_over_points(stored)) if isinstance(stored, Mapping) else stored


def _take_over_points(stored: Mapping[str, Any]) -> Mapping[str, Any]:
    history = stored.get("history")
    if not isinstance(history, Mapping):
        return stored
    rows = history.get("rows")
    points = [history.get("columns"), *rows] if isinstance(rows, list) else []
    own = {name: value for name, value in stored.items() if name != "history"}
    return {"points": points, **own} if all(isinstance(line, str) for line in points) else own


def _take_over_state(stored: Mapping[str, Any]) -> Mapping[str, Any]:
    if _NAME in stored:
        return stored
    restarts = stored.get("restarts")
    if not isinstance(restarts, Mapping) or "counted" not in restarts:
        return stored
    usage = stored.get("usage")
    state = {
        "version": STATE_VERSION,
        "restarts": {name: restarts[name] for name in _COUNTS if name in restarts},
    }
    state |= {name: stored[former] for name, former in _FORMER_OF_STATUS.items() if former in stored}
    if isinstance(usage, Mapping):
        state |= {name: usage[former] for name, former in _FORMER_OF_USAGE.items() if former in usage}
    return {**stored, _NAME: state}


_FORMER_OF_STATUS: Final = {"nodes": "attemptNodes", "children": "children", "startStep": "startStep"}
_FORMER_OF_USAGE: Final = {"usageTime": "since", "idleSince": "idleSince"}


def find_state_problem(stored: Any) -> str:
    """Return why the operator's state in a stored status is not to be read; empty if it is, or if the job has none."""
    if not isinstance(stored, Mapping):
        return ""
    state = stored.get(_NAME)
    if state is None:
        return "is missing" if stored.get("attempt") else ""
    if not isinstance(state, Mapping):
        return "is no object"
    version = state.get("version")
    return "" if version == STATE_VERSION else f"has version {version!r:.20}, and this operator reads {STATE_VERSION}"


def restore_state(status: Status) -> OperatorState:
    """Return the operator's state as far as users' fields show it, beside what is left of it.

    The counts err on the side of a job that fails earlier: the present step and checkpoint stand for those at the last
    failure, so that only newer ones are progress.
    """
    known = status.counts
    shown = status.restarts
    total = max(0, status.attempt - 1)
    in_place = max(known.in_place, shown.in_place)
    used = max(known.used, shown.used)
    counts = replace(
        known,
        total=total,
        used=used,
        counted=max(known.counted, used),
        in_place=in_place,
        in_place_before=known.in_place_before or (in_place if total else 0),
        replaced=max(known.replaced, shown.all - total - in_place),
        step=max(known.step, status.progress.step or 0 if status.progress is not None else 0),
        checkpoint_step=max(known.checkpoint_step, status.checkpoint.step if status.checkpoint is not None else 0),
    )
    nodes = status.operator_state.nodes or status.nodes.desired
    return replace(status.operator_state, version=STATE_VERSION, restarts=counts, nodes=nodes)

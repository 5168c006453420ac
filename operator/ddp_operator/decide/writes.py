"""Which changes of a status can wait. Pure."""

from msgspec.structs import replace

from ddp_operator.api.columns import render_columns
from ddp_operator.api.status import Status
from ddp_operator.decide.conditions import QUEUE_REASONS


def is_minor_change(old: Status, new: Status) -> bool:
    """Return whether two statuses differ only in pod counts, messages and measurements, and in no printed column.

    Such a write can wait. Otherwise a large job would cause one write per pod, and `kubectl get -w` would repeat lines.
    """
    if _list_condition_states(old) != _list_condition_states(new) or render_columns(old) != render_columns(new):
        return False
    same = {name: getattr(old, name) for name in ("nodes", "conditions", "goodput", "stragglers", "usage")}
    state = old.operator_state
    new = new.remember(children=state.children, usage_time=state.usage_time, idle_since=state.idle_since)
    if old.progress is not None and new.progress is not None:  # the first progress is not a minor change
        same["progress"] = old.progress
    return replace(new, **same) == old


def _list_condition_states(status: Status) -> list[tuple[str, str, str, int, str]]:
    return [
        (
            condition.type,
            condition.status,
            condition.reason,
            condition.observed_generation,
            # Messages of a queue change seldom, and users wait for them.
            condition.message if condition.reason in QUEUE_REASONS else "",
        )
        for condition in status.conditions
    ]

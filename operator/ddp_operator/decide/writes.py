"""Which changes of a status can wait, and the history rows that a write adds. Pure."""

from datetime import datetime
from itertools import pairwise
from statistics import median
from typing import Final

from msgspec.structs import replace

from ddp_operator.api.columns import render_columns
from ddp_operator.api.status import ENDED_PHASES, History, Status
from ddp_operator.decide import conditions as c
from ddp_operator.decide.conditions import QUEUE_REASONS
from ddp_pod.contract.numbers import parse_count

MAX_ROWS: Final = 60
COLUMNS: Final = (
    *("time", "restarts", "epoch", "step", "loss", "samples_per_second", "steps_per_second", "learning_rate"),
    *("validation_accuracy", "validation_loss", "checkpoint_step"),
)
_SOON: Final = 0.9  # of the usual gap: passes are a little early and late


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


def extend_history(status: Status, now: datetime) -> Status:
    """Return the status with a row for this moment, unless the last row is recent or has the same values.

    Above the limit every second row is dropped, and from then on rows are added half as often.
    """
    progress = status.progress
    rows = status.history.rows if status.history is not None else ()
    if progress is None or progress.step is None:
        return status
    values = (
        status.restarts.all,
        progress.epoch,
        progress.step,
        progress.loss,
        progress.samples_per_second,
        progress.steps_per_second,
        progress.learning_rate,
        progress.val_accuracy,
        progress.val_loss,
        status.checkpoint.step if status.checkpoint else None,
    )
    text = ",".join("" if value is None else str(value) for value in values)
    if rows and rows[-1].partition(",")[2] == text:
        return status

    time = int(now.timestamp())
    if _is_recent(rows, time) and status.phase not in (*ENDED_PHASES, c.HELD):
        return status
    rows = (*rows, f"{time},{text}")
    if len(rows) > MAX_ROWS:
        rows = (*rows[:-1:2], rows[-1])
    return replace(status, history=History(columns=",".join(COLUMNS), rows=rows))


def _is_recent(rows: tuple[str, ...], time: int) -> bool:
    """Return whether the last row is younger than the usual gap between rows."""
    heads = [row.partition(",")[0] for row in rows]
    times = [time for time in map(parse_count, heads) if time is not None]
    gaps = [after - before for before, after in pairwise(times)]
    return bool(gaps) and time - times[-1] < _SOON * median(gaps)

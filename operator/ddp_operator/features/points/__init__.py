"""``status.points``: rows of metrics over time, which `ddp report` draws (ADR 0028)."""

from datetime import datetime
from itertools import pairwise
from statistics import median
from typing import Final

from msgspec.structs import replace

from ddp_operator.api.status import ENDED_PHASES, Status
from ddp_operator.decide import conditions as c
from ddp_operator.decide.hooks import Feature
from ddp_pod.contract.numbers import parse_count

MAX_ROWS: Final = 60


COLUMNS: Final = (
    *("time", "restarts", "epoch", "step", "loss", "samples_per_second", "steps_per_second", "learning_rate"),
    *("validation_accuracy", "validation_loss", "checkpoint_step"),
)


_SOON: Final = 0.9  # of the usual gap: passes are a little early and late


def extend_points(status: Status, now: datetime) -> Status:
    """Return the status with a row for this moment, unless the last row is recent or has the same values.

    Above the limit every second row is dropped, and from then on rows are added half as often.
    """
    progress = status.progress
    rows = status.points[1:]
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
    return replace(status, points=(",".join(COLUMNS), *rows))


def _is_recent(rows: tuple[str, ...], time: int) -> bool:
    """Return whether the last row is younger than the usual gap between rows."""
    heads = [row.partition(",")[0] for row in rows]
    times = [time for time in map(parse_count, heads) if time is not None]
    gaps = [after - before for before, after in pairwise(times)]
    return bool(gaps) and time - times[-1] < _SOON * median(gaps)


FEATURE: Final = Feature("points", maturity="beta", page="ui.md", extend=extend_points)

"""How a job's figures went: a few dozen points, which go along with a status that is written anyway. Pure."""

from datetime import datetime
from itertools import pairwise
from statistics import median
from typing import Final

from msgspec.structs import replace

from ddp_operator.api.status import ENDED_PHASES, History, Status

MAX_ROWS: Final = 60
COLUMNS: Final = (
    *("time", "restarts", "epoch", "step", "loss", "samples_per_second", "steps_per_second", "learning_rate"),
    *("validation_accuracy", "validation_loss", "checkpoint_step"),
)
_SOON: Final = 0.9  # of the usual gap: passes come a little early and late


def extend_history(status: Status, now: datetime) -> Status:
    """Return the status with a row for this moment, unless the last one is recent or says the same.

    When there are too many, every second one goes, so that rows come half as often from then on.
    """
    p, rows = status.progress, status.history.rows if status.history is not None else ()
    if p is None or p.step is None:
        return status
    values = (
        *(status.restarts.all, p.epoch, p.step, p.loss, p.samples_per_second, p.steps_per_second, p.learning_rate),
        *(p.val_accuracy, p.val_loss, status.checkpoint.step if status.checkpoint else None),
    )
    time, figures = int(now.timestamp()), ",".join("" if value is None else str(value) for value in values)
    if rows and rows[-1].partition(",")[2] == figures:
        return status
    times = [int(head) for head in (row.partition(",")[0] for row in rows) if head.isdecimal()]
    gaps = [after - before for before, after in pairwise(times)]
    if gaps and time - times[-1] < _SOON * median(gaps) and status.phase not in ENDED_PHASES:
        return status
    rows = (*rows, f"{time},{figures}")
    if len(rows) > MAX_ROWS:
        rows = (*rows[:-1:2], rows[-1])
    return replace(status, history=History(columns=",".join(COLUMNS), rows=rows))

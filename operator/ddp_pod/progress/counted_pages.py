"""Pages in Prometheus' text format from a rank's counters, merged with the values from its log or its posts."""

import math
import time
from collections.abc import Mapping

from ..base.files import log
from ..base.pod import Pod
from ..contract.names import (
    METRIC_COMPUTE_SECONDS,
    METRIC_EPOCH,
    METRIC_EPOCHS,
    METRIC_GLOBAL_STEP,
    METRIC_LAST_STEP,
    METRIC_LEARNING_RATE,
    METRIC_LOSS,
    METRIC_LOST_LOSS,
    METRIC_PROGRESS,
    METRIC_SAMPLES,
    METRIC_STEP_SECONDS,
    METRIC_STEPS,
    METRIC_TOTAL_MARGIN,
    METRIC_TOTAL_STEPS,
    METRIC_WORLD_SIZE,
)
from ..rank.counters import CounterMemory, RankCounters

STEP_SLACK = 2.0
"""Steps by which a script may count differently."""
STEP_SHARE = 0.02
"""Share of the total by which a run may end early, or exceed it."""
ALIGNED = "# counted"
"""First line of a page whose steps are optimizer steps: they continue with the counter."""


def create_counters(pod: Pod) -> CounterMemory | None:
    """Return the memory of a pod's counters; None if the job disables them, or the system has no shared memory."""
    if not pod.auto_instrument:
        return None
    try:
        return CounterMemory(pod.runtime, pod.nproc_per_node)
    except (OSError, ValueError) as error:
        log(f"optimizer steps are not counted: cannot create shared memory: {error}")
        return None


def format_page(values: Mapping[str, float], rank: int) -> str:
    """Return values of a rank as a page."""
    rows = []
    for name in sorted(values):
        rows.append(f"# TYPE {name} {'counter' if name.endswith(('_total', '_sum')) else 'gauge'}")
        rows.append(f'{name}{{rank="{rank}"}} {values[name]!r}')
    return "\n".join(rows) + "\n"


def merge_counters(values: Mapping[str, float], counters: RankCounters, *, is_aligned: bool) -> dict[str, float]:
    """Return a rank's values with its counters.

    ``values``: from the log or posts; ``is_aligned``: whether their steps are optimizer steps. Steps in another unit,
    such
    as samples, do not change.
    """
    merged = dict(values)
    if METRIC_GLOBAL_STEP not in merged:
        _add_steps(merged, counters)
        _add_plan(merged, counters)
    elif is_aligned:
        _continue_steps(merged, counters)
        _add_plan(merged, counters)

    merged[METRIC_LAST_STEP] = time.time() - (time.monotonic() - counters.last_step_time)
    merged[METRIC_WORLD_SIZE] = float(counters.world_size)
    measured = {
        METRIC_STEP_SECONDS: counters.step_seconds or None,
        METRIC_COMPUTE_SECONDS: counters.work_seconds,
        METRIC_SAMPLES: counters.samples,
        METRIC_LEARNING_RATE: counters.learning_rate,
        METRIC_LOSS: counters.loss,
    }
    for name, value in measured.items():
        if value is not None:
            merged.setdefault(name, value)
    if counters.lost_loss_step is not None:  # the log may show an older loss
        merged[METRIC_LOSS] = math.nan
        merged.setdefault(METRIC_LOST_LOSS, float(counters.lost_loss_step + (counters.first_step or 0)))
    return merged


def _add_steps(values: dict[str, float], counters: RankCounters) -> None:
    values[METRIC_STEPS] = float(counters.steps)
    position = find_position(counters)
    if position is not None:
        values[METRIC_GLOBAL_STEP] = position


def _add_plan(values: dict[str, float], counters: RankCounters) -> None:
    """Add the epoch and the totals that the rank knows; the log may show the epoch as the script counts it."""
    for name, number in ((METRIC_EPOCH, counters.epoch), (METRIC_EPOCHS, counters.epochs)):
        if number is not None:
            values.setdefault(name, float(number))
    if counters.total_steps is not None and METRIC_GLOBAL_STEP in values:
        values.pop(METRIC_TOTAL_MARGIN, None)
        values[METRIC_TOTAL_STEPS] = float(counters.total_steps)
        values[METRIC_PROGRESS] = min(1.0, values[METRIC_GLOBAL_STEP] / counters.total_steps)


def find_position(counters: RankCounters) -> float | None:
    """Return the run's step by the state of the rank's optimizer; None: unknown."""
    return None if counters.first_step is None else float(counters.first_step + counters.steps)


def _continue_steps(values: dict[str, float], counters: RankCounters) -> None:
    """Advance a page to the present: it was written with the last line that showed a step."""
    ahead = counters.steps - values.get(METRIC_STEPS, 0.0)
    if ahead < 0:  # the line is of a former process in the rank's place, whose position is not that of this one
        del values[METRIC_GLOBAL_STEP]
        values.pop(METRIC_PROGRESS, None)
        _add_steps(values, counters)
        return
    values[METRIC_STEPS] = float(counters.steps)
    values[METRIC_GLOBAL_STEP] += ahead
    total = values.get(METRIC_TOTAL_STEPS)
    if total and values[METRIC_GLOBAL_STEP] > total:
        del values[METRIC_TOTAL_STEPS]  # the total was of another number
        values.pop(METRIC_PROGRESS, None)
    elif total:
        values[METRIC_PROGRESS] = values[METRIC_GLOBAL_STEP] / total


def drop_lost_loss(values: Mapping[str, float]) -> dict[str, float]:
    """Return values as JSON can have them: a loss that is not finite becomes the step since which it is not."""
    finite = {name: value for name, value in values.items() if math.isfinite(value)}
    if not math.isfinite(values.get(METRIC_LOSS, 0.0)):
        finite.setdefault(METRIC_LOST_LOSS, finite.get(METRIC_GLOBAL_STEP, finite.get(METRIC_STEPS, 0.0)))
    return finite


def find_missing_steps(progress: Mapping[str, float]) -> float:
    """Return the steps between the last one and the stated total; 0: none, or so few that the total may be off.

    Scripts count differently by two steps, and skip steps whose gradients overflow. A total of samples may be that of
    all ranks: the length of a dataset that a sampler divides.
    """
    step = progress.get(METRIC_GLOBAL_STEP, progress.get(METRIC_STEPS, 0.0))
    total = progress.get(METRIC_TOTAL_STEPS, 0.0)
    margin = progress.get(METRIC_TOTAL_MARGIN, 0.0)
    tolerance = max(STEP_SLACK, STEP_SHARE * total, margin)
    is_of_all_ranks = margin > 0 and abs(total - step * progress.get(METRIC_WORLD_SIZE, 1.0)) <= tolerance
    return 0.0 if total - step <= tolerance or is_of_all_ranks else total - step


def complete_progress(progress: Mapping[str, float]) -> dict[str, float]:
    """Return the progress of a script that has succeeded: its last step is the run's, unless many steps are missing."""
    completed = dict(progress)
    step = completed.get(METRIC_GLOBAL_STEP, completed.get(METRIC_STEPS))
    if not step or find_missing_steps(progress):
        return completed
    completed[METRIC_PROGRESS] = 1.0
    if METRIC_TOTAL_STEPS in completed:
        completed[METRIC_TOTAL_STEPS] = step
    epochs = completed.get(METRIC_EPOCHS, 0.0)
    # The script counts epochs from 0, or its last one took less than a second.
    if completed.get(METRIC_EPOCH) == epochs - 1.0 or (epochs and METRIC_TOTAL_STEPS in completed):
        completed[METRIC_EPOCH] = epochs
    return completed

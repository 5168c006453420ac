"""The progress of a rank: its counters, merged with the values from its log or its posts, and its completion."""

import math
import time
from dataclasses import replace

from ..base.files import log
from ..base.pod import Pod
from ..contract.progress import RankProgress
from ..rank.counters import CounterMemory, RankCounters

STEP_SLACK = 2.0
"""Steps by which a script may count differently."""
STEP_SHARE = 0.02
"""Share of the total by which a run may end early, or exceed it."""


def create_counters(pod: Pod) -> CounterMemory | None:
    """Return the memory of a pod's counters; None if the job disables them, or the system has no shared memory."""
    if not pod.auto_instrument:
        return None
    try:
        return CounterMemory(pod.runtime, pod.nproc_per_node)
    except (OSError, ValueError) as error:
        log(f"optimizer steps are not counted: cannot create shared memory: {error}")
        return None


def merge_counters(known: RankProgress | None, counters: RankCounters) -> RankProgress:
    """Return a rank's progress with its counters.

    ``known``: from the log or posts. Steps in another unit than optimizer steps, such as samples, do not change.
    """
    progress = RankProgress(is_counted=True) if known is None else replace(known)
    progress.rank = counters.rank
    if progress.step is None:
        _add_steps(progress, counters)
        _add_plan(progress, counters)
    elif progress.is_counted:
        _continue_steps(progress, counters)
        _add_plan(progress, counters)

    progress.last_step_time = time.time() - (time.monotonic() - counters.last_step_time)
    progress.world_size = float(counters.world_size)
    measured = {
        "step_seconds": counters.step_seconds or None,
        "compute_seconds": counters.work_seconds,
        "samples": counters.samples,
        "learning_rate": counters.learning_rate,
    }
    if progress.lost_loss_step is None:
        measured["loss"] = counters.loss
    for name, value in measured.items():
        if getattr(progress, name) is None:
            setattr(progress, name, value)
    if counters.lost_loss_step is not None:  # the log may show an older loss
        progress.loss = math.nan
        if progress.lost_loss_step is None:
            progress.lost_loss_step = float(counters.lost_loss_step + (counters.first_step or 0))
    note_lost_loss(progress)
    return progress


def _add_steps(progress: RankProgress, counters: RankCounters) -> None:
    progress.steps = float(counters.steps)
    # By the state of the rank's optimizer.
    progress.step = None if counters.first_step is None else float(counters.first_step + counters.steps)


def _add_plan(progress: RankProgress, counters: RankCounters) -> None:
    """Add the epoch and the totals that the rank knows; the log may show the epoch as the script counts it."""
    if progress.epoch is None and counters.epoch is not None:
        progress.epoch = float(counters.epoch)
    if progress.epochs is None and counters.epochs is not None:
        progress.epochs = float(counters.epochs)
    if counters.total_steps is not None and progress.step is not None:
        progress.total_margin = None
        progress.total_steps = float(counters.total_steps)
        progress.share = min(1.0, progress.step / counters.total_steps)


def _continue_steps(progress: RankProgress, counters: RankCounters) -> None:
    """Advance the progress to the present: it was written with the last line that showed a step."""
    assert progress.step is not None
    ahead = counters.steps - (progress.steps or 0.0)
    if ahead < 0:  # the line is of a former process in the rank's place, whose position is not that of this one
        progress.share = None
        _add_steps(progress, counters)
        return
    progress.steps = float(counters.steps)
    progress.step += ahead
    if progress.total_steps and progress.step > progress.total_steps:
        progress.total_steps = None  # it was of another number
        progress.share = None
    elif progress.total_steps:
        progress.share = progress.step / progress.total_steps


def note_lost_loss(progress: RankProgress) -> None:
    """Record since which step the loss is not finite, at the latest since the last one: JSON has no such number."""
    if progress.loss is not None and not math.isfinite(progress.loss) and progress.lost_loss_step is None:
        step = progress.known_step or 0.0
        progress.lost_loss_step = step if math.isfinite(step) else 0.0


def find_missing_steps(progress: RankProgress) -> float:
    """Return the steps between the last one and the stated total; 0: none, or so few that the total may be off.

    Scripts count differently by two steps, and skip steps whose gradients overflow. A total of samples may be that of
    all ranks: the length of a dataset that a sampler divides.
    """
    step = progress.known_step or 0.0
    total = progress.total_steps or 0.0
    margin = progress.total_margin or 0.0
    tolerance = max(STEP_SLACK, STEP_SHARE * total, margin)
    is_of_all_ranks = margin > 0 and abs(total - step * (progress.world_size or 1.0)) <= tolerance
    return 0.0 if total - step <= tolerance or is_of_all_ranks else total - step


def complete_progress(progress: RankProgress) -> RankProgress:
    """Return the progress of a script that has succeeded: its last step is the run's, unless many steps are missing."""
    step = progress.known_step
    if not step or find_missing_steps(progress):
        return progress
    completed = replace(progress, share=1.0)
    if completed.total_steps is not None:
        completed.total_steps = step
    epochs = completed.epochs or 0.0
    # The script counts epochs from 0, or its last one took less than a second.
    if completed.epoch == epochs - 1.0 or (epochs and completed.total_steps is not None):
        completed.epoch = epochs
    return completed

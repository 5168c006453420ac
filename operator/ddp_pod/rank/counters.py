"""Counters of each rank's optimizer steps, in memory that the rank writes and the launcher reads.

The rank writes without a lock and the launcher reads without its cooperation, also while it hangs. One number of eight
bytes is read and written at once; numbers of one step may be of two successive steps. The memory belongs to no file: a
page of a mapped file blocks its writer while the kernel writes it to a disk.
"""

import math
import mmap
import os
from contextlib import suppress
from typing import Any, NamedTuple

from ..base.runtime_files import COUNTERS_FILE

_COUNTS = 32
FEATURE_NUMBERS = 384
"""The last numbers of a slot, which the feature that samples steps writes."""
SLOT_NUMBERS = _COUNTS + FEATURE_NUMBERS  # whole lines of the cache, so that two ranks share none
_NUMBER_BYTES = 8
SLOT_BYTES = SLOT_NUMBERS * _NUMBER_BYTES
_MOST = 2.0**53  # the largest count that a number of eight bytes holds exactly

# Indexes of the numbers in a rank's slot. Those that every step writes are neighbours.
STEPS = 0
LAST_STEP_TIME = 1
WORK_SECONDS = 2
FIRST_STEP_TIME = 3
PAUSE_SECONDS = 4
LONGEST_STEP = 5
BATCH = 6
SAMPLES = 7
STEPS_WITH_SAMPLES = 8
LEARNING_RATE = 9
LOSS = 10
HAS_LOSS = 11
FIRST_STEP = 12
VISIBILITY = 13
RANK = 14
WORLD_SIZE = 15
PID = 16
OWNER = 17  # process that has made a step: the rank's own, or one that its program has started
LOST_LOSS_STEP = 18  # the step since which the loss is not finite; 0: it is finite
EPOCH = 19  # from 1; 0: unknown, as of the following ones
EPOCHS = 20
TOTAL_STEPS = 21

# Values of VISIBILITY.
UNKNOWN = 0.0  # the rank has not imported PyTorch's optimizers, or it is no Python program
COUNTED = 1.0
INVISIBLE = 2.0  # the steps were recorded as a CUDA graph: their replay calls no optimizer


class RankCounters(NamedTuple):
    """The counts of a rank's process. None: unknown.

    ``is_counted``: whether its steps are visible; ``is_recorded``: whether they are
    a CUDA graph; ``last_step_time``: of the monotonic clock; ``step_seconds``: sum of
    the time between steps, without long pauses; ``longest_step``: the longest time between two steps, with pauses;
    ``work_seconds``: host time from each step to the next backward; ``first_step``: the run's step before the first one
    of this process, from the optimizer's state; ``lost_loss_step``: the process's step since which the loss is not
    finite; ``owner``: the process that counts, if the rank's own one is no Python program; ``epoch``: from 1.
    """

    pid: int
    rank: int
    world_size: int
    is_counted: bool
    is_recorded: bool
    steps: int
    last_step_time: float
    step_seconds: float
    longest_step: float
    work_seconds: float | None
    samples: float | None
    learning_rate: float | None
    loss: float | None
    first_step: int | None
    lost_loss_step: int | None = None
    owner: int = 0
    epoch: int | None = None
    epochs: int | None = None
    total_steps: int | None = None

    @property
    def shows_steps(self) -> bool:
        """Whether steps were counted, and those that follow will be."""
        return self.is_counted and self.steps > 0


class CounterMemory:
    """The slots of a pod's local ranks. Create it before the processes that share it are started."""

    def __init__(self, runtime: str, nproc: int) -> None:
        self._nproc = nproc
        path = os.path.join(runtime, COUNTERS_FILE)
        with suppress(FileNotFoundError):
            os.unlink(path)
        size = nproc * SLOT_BYTES
        self._descriptor = _open_memory(path)
        os.ftruncate(self._descriptor, size)
        self._memory: Any = memoryview(mmap.mmap(self._descriptor, size)).cast("d")

    def read(self, local_rank: int) -> RankCounters | None:
        """Return the counters of a local rank's last process; None before its shim has started."""
        if not 0 <= local_rank < self._nproc:
            return None
        start = local_rank * SLOT_NUMBERS
        return _parse_slot(self._memory[start : start + _COUNTS].tolist())

    def view_feature_numbers(self, local_rank: int) -> Any | None:
        """Return the memory that a feature writes in the slot of a local rank; None without that rank."""
        if not 0 <= local_rank < self._nproc:
            return None
        start = local_rank * SLOT_NUMBERS + _COUNTS
        return self._memory[start : start + FEATURE_NUMBERS]

    def read_all(self) -> dict[int, RankCounters]:
        """Return the counters of all local ranks that have any."""
        counters = {local_rank: self.read(local_rank) for local_rank in range(self._nproc)}
        return {local_rank: found for local_rank, found in counters.items() if found is not None}


def _open_memory(path: str) -> int:
    """Return a descriptor of shared memory that other processes of this user can open as ``path``. Raises: OSError."""
    create = getattr(os, "memfd_create", None)
    if create is None or not os.path.isdir("/proc/self/fd"):
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    descriptor = int(create("ddp-counters"))
    os.symlink(f"/proc/{os.getpid()}/fd/{descriptor}", path)
    return descriptor


def _parse_slot(numbers: list[float]) -> RankCounters | None:
    """Return the counters in a slot, to which the user's process can write anything."""
    pid = read_count(numbers[PID])
    if not pid:
        return None
    steps = read_count(numbers[STEPS])
    first_step = numbers[FIRST_STEP]
    return RankCounters(
        pid=pid,
        rank=read_count(numbers[RANK]),
        world_size=max(1, read_count(numbers[WORLD_SIZE])),
        is_counted=numbers[VISIBILITY] == COUNTED,
        is_recorded=numbers[VISIBILITY] == INVISIBLE,
        steps=steps,
        last_step_time=_read_seconds(numbers[LAST_STEP_TIME]),
        step_seconds=_sum_step_seconds(numbers, steps),
        longest_step=_read_seconds(numbers[LONGEST_STEP]),
        work_seconds=_read_known(numbers[WORK_SECONDS]),
        samples=_sum_samples(numbers, steps),
        learning_rate=_read_known(numbers[LEARNING_RATE]),
        loss=numbers[LOSS] if numbers[HAS_LOSS] else None,
        first_step=read_count(first_step) if math.isfinite(first_step) else None,
        lost_loss_step=read_count(numbers[LOST_LOSS_STEP]) or None,
        owner=read_count(numbers[OWNER]),
        epoch=read_count(numbers[EPOCH]) or None,
        epochs=read_count(numbers[EPOCHS]) or None,
        total_steps=read_count(numbers[TOTAL_STEPS]) or None,
    )


def _sum_step_seconds(numbers: list[float], steps: int) -> float:
    """Return the time of all steps. The first one, whose beginning is unknown, counts as an average one."""
    if steps < 2:
        return 0.0
    seconds = _read_seconds(numbers[LAST_STEP_TIME] - numbers[FIRST_STEP_TIME] - numbers[PAUSE_SECONDS])
    return seconds * steps / (steps - 1)


def _sum_samples(numbers: list[float], steps: int) -> float | None:
    """Return the samples of all steps; None if the batch size is unknown."""
    batch = read_count(numbers[BATCH])
    if not batch:
        return None
    return _read_seconds(numbers[SAMPLES]) + batch * max(0.0, steps - _read_seconds(numbers[STEPS_WITH_SAMPLES]))


def read_count(number: float) -> int:
    """Return a count in a slot; 0 if it is none."""
    return int(number) if 0 <= number < _MOST else 0


def _read_seconds(number: float) -> float:
    return number if 0 <= number < _MOST else 0.0


def _read_known(number: float) -> float | None:
    return number if math.isfinite(number) else None

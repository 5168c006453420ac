"""The rank's side of its counters: the slot of the shared memory that a process writes."""

import fcntl
import math
import mmap
import os
from array import array
from typing import Any

from ..base.runtime_files import COUNTERS_FILE
from .counters import (
    COUNTED,
    FIRST_STEP,
    LEARNING_RATE,
    OWNER,
    PID,
    RANK,
    SLOT_BYTES,
    SLOT_NUMBERS,
    UNKNOWN,
    VISIBILITY,
    WORK_SECONDS,
    WORLD_SIZE,
    read_count,
)


def open_slot(runtime: str, local_rank: int) -> Any:
    """Return a rank's own slot as a writable view of numbers, without counts. Raises: OSError, ValueError."""
    descriptor = _open_counters(runtime)
    try:
        slot = _map_slot(descriptor, local_rank)
    finally:
        os.close(descriptor)
    slot[:] = create_private_slot()
    return slot


def create_private_slot() -> Any:
    """Return a slot without counts that only this process reads."""
    slot = array("d", bytes(SLOT_BYTES))
    for index in (WORK_SECONDS, LEARNING_RATE, FIRST_STEP):
        slot[index] = math.nan
    return memoryview(slot)


def announce(runtime: str, local_rank: int) -> None:
    """Note that a process which the rank's program has started may count steps. Raises: OSError, ValueError."""
    descriptor = _open_counters(runtime)
    try:
        slot = _map_slot(descriptor, local_rank)
        if slot[VISIBILITY] == UNKNOWN:
            slot[VISIBILITY] = COUNTED
    finally:
        os.close(descriptor)


def claim_slot(runtime: str, local_rank: int) -> Any | None:
    """Return a rank's slot for this process, which the rank's program has started.

    None: another process that still runs counts in it. Raises: OSError, also if another process claims it now;
    ValueError.
    """
    descriptor = _open_counters(runtime)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        slot = _map_slot(descriptor, local_rank)
        owner = read_count(slot[OWNER])
        if owner and os.path.exists(f"/proc/{owner}"):
            return None
        return take_slot(slot)
    finally:
        fcntl.flock(descriptor, fcntl.LOCK_UN)  # the mapping keeps the lock beyond the descriptor
        os.close(descriptor)


def take_slot(slot: Any) -> Any:
    """Return a rank's slot for this process, which has made a step, without the counts of a former owner."""
    if slot[OWNER]:
        kept = {index: slot[index] for index in (RANK, WORLD_SIZE, PID)}
        slot[:] = create_private_slot()
        for index, number in kept.items():
            slot[index] = number
    slot[OWNER] = os.getpid()
    slot[VISIBILITY] = COUNTED
    return slot


def _open_counters(runtime: str) -> int:
    """Return a descriptor of a pod's counters. Raises: OSError."""
    return os.open(os.path.join(runtime, COUNTERS_FILE), os.O_RDWR)


def _map_slot(descriptor: int, local_rank: int) -> Any:
    """Return a rank's slot as a view of numbers. Raises: OSError, ValueError."""
    memory = memoryview(mmap.mmap(descriptor, 0)).cast("d")
    return memory[local_rank * SLOT_NUMBERS : (local_rank + 1) * SLOT_NUMBERS]

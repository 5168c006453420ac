"""The process groups of a pod's ranks, by the records that their processes write (``groups``)."""

import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from ..base.files import read_json
from ..base.pod import Pod, WorkerRecord, list_workers
from .groups import MEMBER, SLOTS, GroupRecord

_RECORD_LIMIT = 4096  # bytes of a file
_TEXT_LIMIT = 160  # characters
_FILE = re.compile(r"(\d{1,4})\.\d{1,2}\.json")


class RankGroups(NamedTuple):
    """The groups of one rank's processes. ``has_steps``: whether its optimizer steps were counted; None: unknown."""

    worker: WorkerRecord
    records: Sequence[GroupRecord]
    has_steps: bool | None = None

    @property
    def coverage(self) -> float:
        """How many ranks of the job the largest group spans: its size, divided by its members below this rank."""
        members: dict[int, set[int]] = {}
        for record in self.records:
            if record.largest:
                members.setdefault(record.largest, set()).add(record.largest_rank)
        return max((size / len(ranks) for size, ranks in members.items()), default=0.0)

    @property
    def waiting(self) -> list[GroupRecord]:
        """The processes that wait for their first group. Those of a nested launcher wait for each other."""
        run = self.worker.run
        return [record for record in self.records if record.is_waiting and record.run == run]


def read_groups(pod: Pod, count_steps: Callable[[int], int | None] = lambda rank: None) -> list[RankGroups]:
    """Return the groups of this pod's ranks. The files may contain anything. ``count_steps``: of a local rank."""
    folder = os.path.join(pod.runtime, "groups")
    records: dict[int, list[GroupRecord]] = {}
    with suppress(OSError):
        for name in os.listdir(folder):
            match = _FILE.fullmatch(name)
            record = parse_record(read_json(os.path.join(folder, name), _RECORD_LIMIT)) if match else None
            if match and record is not None:
                records.setdefault(int(match[1]), []).append(record)
    groups = []
    for worker in sorted(list_workers(pod), key=lambda worker: worker.rank):
        steps = count_steps(worker.local_rank)
        own = records.get(worker.local_rank, ())[:SLOTS]
        groups.append(RankGroups(worker, own, None if steps is None else steps > 0))
    return groups


def list_trainers(pod: Pod) -> dict[int, set[int]]:
    """Return the processes of each Python rank that train: its own, and those in a process group."""
    return {
        rank.worker.local_rank: {rank.worker.pid, *(record.pid for record in rank.records if record.phase == MEMBER)}
        for rank in read_groups(pod)
        if rank.worker.kind != "program"
    }


def parse_record(raw: Mapping[str, object]) -> GroupRecord | None:
    """Return the record of a process; None if it is invalid."""
    values: dict[str, Any] = {}
    for name, default in GroupRecord._field_defaults.items():
        value = raw.get(name, default)
        if type(value) is not type(default):
            return None
        values[name] = value[:_TEXT_LIMIT] if isinstance(value, str) else value
    return GroupRecord(**values)

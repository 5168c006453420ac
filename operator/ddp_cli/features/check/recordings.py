"""Read what the processes of a checked run have recorded. The files may contain anything."""

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Final, NamedTuple

from ddp_pod.contract.records import read_record
from ddp_pod.features.check.contract import (
    BATCH,
    COMPLETED,
    END,
    FILE,
    IDLE_SUFFIX,
    LOAD,
    LOADER,
    MODEL,
    MOST_RECORDS,
    RESTORE,
    SAVE,
    START,
    STEP,
    BatchRecord,
    EndRecord,
    FileRecord,
    IdleRecord,
    LoaderRecord,
    LoadRecord,
    ModelRecord,
    RestoreRecord,
    SaveRecord,
    StartRecord,
    StepRecord,
)

_FILE: Final = re.compile(r"(\d{1,4})\.(\d{1,3})\.jsonl")
_MOST_PROCESSES: Final = 4096
_LINE_LIMIT: Final = 1 << 20
_KINDS: Final[dict[str, type]] = {
    START: StartRecord,
    MODEL: ModelRecord,
    LOADER: LoaderRecord,
    BATCH: BatchRecord,
    LOAD: LoadRecord,
    FILE: FileRecord,
    RESTORE: RestoreRecord,
    STEP: StepRecord,
    SAVE: SaveRecord,
    END: EndRecord,
}

Digests = dict["Parameter", str]
"""The digest of each parameter of a process."""


class Parameter(NamedTuple):
    """A parameter. ``model``: index of its model, in the order of the models' first calls."""

    model: int
    name: str


@dataclass
class Process:
    """The records of one process of a rank. ``loaders``: each with the number of steps before it."""

    rank: int
    number: int
    start: StartRecord = field(default_factory=StartRecord)
    models: list[ModelRecord] = field(default_factory=list)
    loaders: list[tuple[int, LoaderRecord]] = field(default_factory=list)
    steps: list[StepRecord] = field(default_factory=list)
    saves: list[SaveRecord] = field(default_factory=list)
    batches: list[BatchRecord] = field(default_factory=list)
    loads: list[LoadRecord] = field(default_factory=list)
    files: list[FileRecord] = field(default_factory=list)
    restores: list[RestoreRecord] = field(default_factory=list)
    end: EndRecord | None = None

    def add(self, record: Any) -> None:
        """Add a record in the order of the file."""
        match record:
            case StartRecord():
                self.start = record
            case ModelRecord():
                self.models.append(record)
            case LoaderRecord():
                self.loaders.append((len(self.steps), record))
            case StepRecord():
                self.steps.append(record)
            case SaveRecord():
                self.saves.append(record)
            case BatchRecord():
                self.batches.append(record)
            case LoadRecord():
                self.loads.append(record)
            case FileRecord():
                self.files.append(record)
            case RestoreRecord():
                self.restores.append(record)
            case EndRecord():
                self.end = record

    @cached_property
    def parameters(self) -> list[Parameter]:
        """The parameters of all models, in the order of a step's digests."""
        return [Parameter(index, name) for index, model in enumerate(self.models) for name in model.names]

    @cached_property
    def facts(self) -> dict[Parameter, "ParameterFacts"]:
        """What is known of each parameter."""
        rows = (row for model in self.models for row in _list_facts(model))
        return dict(zip(self.parameters, rows, strict=True))

    @property
    def initial(self) -> Digests:
        """The digests of the parameters before the first step.

        Loose parameters stand alone: torch.func puts them into a module for a call, which is recorded with them.
        """
        loose = {number for number, model in enumerate(self.models) if model.loose}
        known = self.facts.items()
        return {parameter: facts.initial for parameter, facts in known if not loose or parameter.model in loose}

    @cached_property
    def buffers(self) -> list[str]:
        """The names of all buffers, in the order of a step's digests."""
        return [name for model in self.models for name in model.buffer_names]

    def digests(self, step: StepRecord) -> Digests:
        """Return the digests after a step, of the models that were called before."""
        return dict(zip(self.parameters, step.digests, strict=False))

    def gradients(self, step: StepRecord) -> Digests:
        """Return the digests of the gradients that a step used."""
        return dict(zip(self.parameters, step.gradients, strict=False))

    @property
    def ended_itself(self) -> bool:
        """Whether the script came to its end with exit code 0. A process that was stopped has another end, or none."""
        return self.end is not None and self.end.reason == COMPLETED


class ParameterFacts(NamedTuple):
    """A parameter before the first step. ``place``: the line that built its module."""

    initial: str
    is_trainable: bool
    is_sharded: bool
    place: str


def _list_facts(model: ModelRecord) -> Iterator[ParameterFacts]:
    for index in range(len(model.names)):
        yield ParameterFacts(
            initial=_get(model.digests, index, ""),
            is_trainable=bool(_get(model.trainable, index, 1)),
            is_sharded=bool(_get(model.sharded, index, 0)),
            place=_get(model.places, index, "") or model.built,
        )


def _get(values: Sequence[Any], index: int, default: Any) -> Any:
    return values[index] if index < len(values) else default


@dataclass(frozen=True)
class Recording:
    """The processes of a run: of each rank in order."""

    ranks: dict[int, list[Process]]

    @property
    def firsts(self) -> list[Process]:
        """The first process of each rank that made a step."""
        return [processes[0] for _, processes in sorted(self.ranks.items()) if processes[0].steps]

    @property
    def saves(self) -> list[SaveRecord]:
        """The saves of all processes."""
        return [save for processes in self.ranks.values() for process in processes for save in process.saves]


def zip_steps(ranks: Sequence[Process]) -> Iterator[tuple[StepRecord, ...]]:
    """Yield the records of each step that all ranks have made."""
    yield from zip(*(process.steps for process in ranks), strict=False)


def read_recording(folder: Path) -> Recording:
    """Return the records in a folder. Lines that are no records are left out."""
    ranks: dict[int, list[Process]] = {}
    names = sorted(path.name for path in folder.glob("*.jsonl"))[:_MOST_PROCESSES]
    matches = [match for match in map(_FILE.fullmatch, names) if match]
    for match in sorted(matches, key=lambda match: (int(match[1]), int(match[2]))):
        process = Process(int(match[1]), int(match[2]))
        for record in _read_records(folder / match[0]):
            process.add(record)
        ranks.setdefault(process.rank, []).append(process)
    return Recording(ranks)


def read_idle(folder: Path) -> IdleRecord | None:
    """Return what the processes of a run without a step have done; None if they left no record."""
    records = []
    for file in sorted(folder.glob(f"*.{IDLE_SUFFIX}"))[:_MOST_PROCESSES]:
        with suppress(OSError, ValueError, RecursionError):
            records.append(read_record(IdleRecord, json.loads(file.read_bytes()[:_LINE_LIMIT])))
    if not records:
        return None
    opened = dict.fromkeys(path for record in records for path in record.opened)
    return IdleRecord(any(record.is_cut for record in records), tuple(opened))


def _read_records(path: Path) -> Iterator[Any]:
    with path.open("rb") as file:
        for _ in range(MOST_RECORDS):
            line = file.readline(_LINE_LIMIT)
            if not line:
                return
            yield parse_record(line)


def parse_record(line: bytes) -> Any:
    """Return the record in a line; None if it has none."""
    try:
        raw = json.loads(line)
    except (ValueError, RecursionError):
        return None
    kind = _KINDS.get(str(raw.get("event"))) if isinstance(raw, dict) else None
    return None if kind is None else read_record(kind, raw)

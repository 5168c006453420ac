"""What a run folder holds, as series and tables for the page."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import yaml

from ddp_operator import constants
from ddp_operator.api.status import ENDED_PHASES, Status
from ddp_operator.local.folder import RunFolder, read_rows
from ddp_operator.status.conditions import FAILED, INTERRUPTED

Point = tuple[float, float]
Row = Mapping[str, float]

_SERIES = re.compile(r'^(\w+)\{rank="(\d+)"\} (\S+)$', re.MULTILINE)
_STEP_COUNT = "ddp_step_seconds_count"


@dataclass(frozen=True, slots=True)
class Mark:
    """Something that happened at a moment, seconds since the run's first figures."""

    time: float
    label: str


@dataclass(frozen=True, slots=True)
class Event:
    """A line of events.log."""

    time: str
    type: str
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class RankTime:
    """One rank's mean step at the end of the run, in seconds."""

    rank: int
    steps: int
    step: float
    data: float
    compute: float

    @property
    def wait(self) -> float:
        """The rest: mostly waiting for other ranks."""
        return max(0.0, self.step - self.data - self.compute)


@dataclass(frozen=True, slots=True)
class Run:
    """A run for the page. Times are seconds since the first row of figures.

    ``command``: the command line, empty in an older folder. ``under_way``: a `ddp run` still writes the folder.
    """

    name: str
    command: str
    under_way: bool
    resource: Mapping[str, Any]
    status: Status
    rows: Sequence[Row]
    marks: Sequence[Mark]
    events: Sequence[Event]
    ranks: Sequence[RankTime]

    @property
    def interrupted(self) -> bool:
        """Whether `ddp run` ended before the job did."""
        failed = self.status.condition(FAILED)
        closed = failed is not None and failed.reason == INTERRUPTED
        return closed or (not self.under_way and self.status.phase not in ENDED_PHASES)

    def series(self, column: str) -> list[Point]:
        """Return a column over time, without the rows that lack it."""
        start = self.rows[0]["time"] if self.rows else 0.0
        return [(row["time"] - start, row[column]) for row in self.rows if column in row]


def read_run(path: Path) -> Run:
    """Return the contents of a run folder; missing parts are empty. Raises: ValueError, if it is not a run folder."""
    folder = RunFolder(path)
    if not folder.status.exists():
        raise ValueError(f"{path}: not a run folder of `ddp run`: there is no status.yaml")
    under_way = folder.in_use  # read before the status: a run that ends meanwhile was not interrupted
    try:
        resource = yaml.safe_load(folder.status.read_text(encoding="utf-8"))
        status = msgspec.convert(resource.get("status") or {}, Status)
    except (yaml.YAMLError, msgspec.ValidationError, AttributeError) as error:
        raise ValueError(f"{folder.status}: cannot be read ({str(error).splitlines()[0]})") from None
    rows = [row for row in read_rows(folder.metrics) if "time" in row] if folder.metrics.exists() else []
    rows.sort(key=lambda row: row["time"])
    pages = {page.stem: page.read_text(encoding="utf-8", errors="replace") for page in folder.pages.glob("*.prom")}
    return Run(
        name=path.resolve().name,
        command=folder.command_line,
        under_way=under_way,
        resource=resource,
        status=status,
        rows=rows,
        marks=find_marks(rows),
        events=parse_events(folder.events.read_text(encoding="utf-8") if folder.events.exists() else ""),
        ranks=parse_ranks(pages[stem] for stem in sorted(pages) if stem.startswith(f"attempt-{status.attempt}-")),
    )


def find_marks(rows: Sequence[Row]) -> list[Mark]:
    """Return where training restarted: a later attempt, or a counter of the process that starts at 0 again."""
    marks = []
    for before, after in pairwise(rows):
        time = after["time"] - rows[0]["time"]
        if after.get("attempt", 1) > before.get("attempt", 1):
            marks.append(Mark(time, f"attempt {after['attempt']:.0f}"))
        elif after.get("steps", 0.0) < before.get("steps", 0.0):
            marks.append(Mark(time, "restart"))
    return marks


def split_step_time(rows: Sequence[Row]) -> list[tuple[float, float, float, float]]:
    """Return (time, data, compute, wait) in seconds a step between neighbouring rows of one process."""
    parts = []
    for before, after in pairwise(rows):
        needed = ("steps", "step_seconds", "data_seconds", "compute_seconds")
        if not all(name in before and name in after for name in needed):
            continue
        steps, whole, data, compute = (after[name] - before[name] for name in needed)
        if steps > 0 and min(whole, data, compute) >= 0:
            time = after["time"] - rows[0]["time"]
            parts.append((time, data / steps, compute / steps, max(0.0, whole - data - compute) / steps))
    return parts


def parse_events(text: str) -> list[Event]:
    """Return the lines of an events.log."""
    found = []
    for line in text.splitlines():
        match = re.fullmatch(r"(\S+) (\w+) (\w+): (.*)", line)
        if match:
            found.append(Event(*match.groups()))
    return found


def parse_ranks(pages: Iterable[str]) -> list[RankTime]:
    """Return the ranks of the last metrics pages, in order."""
    ranks: dict[int, dict[str, float]] = {}
    for page in pages:
        for name, rank, value in _SERIES.findall(page):
            try:
                ranks.setdefault(int(rank), {})[name] = float(value)
            except ValueError:
                continue
    times = []
    for rank, values in sorted(ranks.items()):
        steps = values.get(_STEP_COUNT, 0.0)
        if steps > 0:
            parts = (constants.METRIC_STEP_SECONDS, constants.METRIC_DATA_SECONDS, constants.METRIC_COMPUTE_SECONDS)
            times.append(RankTime(rank, int(steps), *(values.get(name, 0.0) / steps for name in parts)))
    return times

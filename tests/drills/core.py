"""Drills, their outcomes, and the table of all drills."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.drills.scene import Scene


class NotHere(Exception):
    """This machine lacks a requirement of a drill; the message has its name."""


class Perished(Exception):
    """The job did not recover; the message has the details."""


@dataclass
class DrillOutcome:
    """The result of one run of a drill. ``floor`` names the floor of its recovery: ranks, agents or none.

    ``lost``: repeated steps; ``seconds``: from the fault to the next new step; None if there is no measurement.
    ``waits``: the part of these seconds in which the fault lasts, or that the job's own limits require. ``by_hand``:
    the floor, measured directly after the drill.
    """

    lost: int | None = None
    seconds: float | None = None
    floor: str = ""
    waits: float = 0.0
    note: str = ""
    by_hand: float | None = None


@dataclass(frozen=True)
class Drill:
    """One fault. ``fast``: it is part of every test run. ``trains``: with real training."""

    name: str
    about: str
    act: Callable[[Scene], DrillOutcome]
    fast: bool = False
    trains: bool = True


DRILLS: dict[str, Drill] = {}


def drill(
    name: str, about: str, *, fast: bool = False, trains: bool = True
) -> Callable[[Callable[[Scene], DrillOutcome]], Callable[..., DrillOutcome]]:
    """Register a function as a drill. It raises Perished or AssertionError if the job does not survive."""

    def register(act: Callable[[Scene], DrillOutcome]) -> Callable[..., DrillOutcome]:
        assert name not in DRILLS
        DRILLS[name] = Drill(name, about, act, fast, trains)
        return act

    return register


@dataclass
class DrillRow:
    """A drill's line in the table."""

    drill: Drill
    outcomes: list[DrillOutcome] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    not_here: str = ""

    @property
    def tried(self) -> int:
        """The number of its runs."""
        return len(self.outcomes) + len(self.problems)


COLUMNS = ("drill", "runs", "survived", "steps lost", "recovery", "floor", "ratio", "")


def build_table(rows: Sequence[DrillRow]) -> str:
    """Return the table, and the closing line."""
    cells = [COLUMNS, *map(_cells, rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(COLUMNS))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in cells]
    tried = sum(row.tried for row in rows)
    survived = sum(len(row.outcomes) for row in rows)
    return "\n".join([*lines, "", f"DRILLS {survived}/{tried}"])


def _cells(row: DrillRow) -> tuple[str, ...]:
    if row.not_here:
        return (row.drill.name, "0", "-", "-", "-", "-", "-", f"not run here: {row.not_here}")
    lost = [outcome.lost for outcome in row.outcomes if outcome.lost is not None]
    timed = [outcome for outcome in row.outcomes if outcome.seconds is not None]
    taken = statistics.median([outcome.seconds or 0.0 for outcome in timed]) if timed else None
    floors = [outcome.by_hand + outcome.waits for outcome in timed if outcome.by_hand is not None]
    floor = statistics.median(floors) if floors else None
    notes = list(dict.fromkeys(outcome.note for outcome in row.outcomes if outcome.note))
    return (
        row.drill.name,
        str(row.tried),
        f"{len(row.outcomes)}",
        "-" if not lost else f"{min(lost)}" if min(lost) == max(lost) else f"{min(lost)}-{max(lost)}",
        "-" if taken is None else f"{taken:.1f} s",
        "-" if floor is None else f"{floor:.1f} s",
        "-" if floor is None or taken is None else f"{taken / floor:.2f}",
        "; ".join([*notes, *(problem.splitlines()[0] for problem in row.problems)]),
    )


def check_blamed(status: Mapping[str, Any], pod: int) -> None:
    """Check that the last failure is attributed to this pod."""
    failure = status.get("lastFailure") or {}
    if failure.get("podIndex") != pod:
        raise Perished(f"status does not blame pod {pod}: {failure}")

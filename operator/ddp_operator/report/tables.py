"""The tables below the charts: interruptions, ranks, Events, and where and with what the run was made."""

import statistics
from collections.abc import Mapping, Sequence
from html import escape
from typing import Final

from ddp_operator.progress import format_duration
from ddp_operator.report.run import Event, Mark, RankTime
from ddp_operator.status.stragglers import RATIO

_SHOWN_RANKS: Final = 16


def list_interruptions(marks: Sequence[Mark]) -> str:
    """Return what the numbers on the charts stand for."""
    rows = [
        _row([("number", str(number)), ("time", format_duration(mark.time)), ("name", mark.label), ("", mark.cause)])
        for number, mark in enumerate(marks, 1)
    ]
    return _box("Interruptions", _table(("", "time", "what", "cause"), rows, "wide")) if rows else ""


def list_ranks(ranks: Sequence[RankTime]) -> str:
    """Return the mean step of each rank, that first which keeps the others waiting longest; many are folded."""
    if not ranks:
        return ""
    usual = statistics.median(rank.own for rank in ranks)
    heads = ["rank", "steps", "step, ms"]
    if usual:
        heads[1:1] = ["own work, x median", "data, ms", "compute, ms", "waiting, ms"]
    rows = []
    for rank in sorted(ranks, key=lambda rank: (-rank.own, rank.rank)):
        cells = [str(rank.rank), f"{rank.steps:,}", f"{1000 * rank.step:,.1f}"]
        if usual:
            parts = [f"{1000 * part:,.1f}" for part in (rank.data, rank.compute, rank.wait)]
            cells[1:1] = [f"{rank.own / usual:.2f}", *parts]
        late = usual and rank.own >= RATIO * usual
        rows.append(_row([("number", cell) for cell in cells], "late" if late else ""))
    text = _table(heads, rows[:_SHOWN_RANKS], "ranks", "number")
    if rows[_SHOWN_RANKS:]:
        rest = _table(heads, rows[_SHOWN_RANKS:], "ranks", "number")
        text += f"<details><summary>{len(rows) - _SHOWN_RANKS} more ranks</summary>{rest}</details>"
    return _box("Ranks of the last attempt, the slowest first" if usual else "Ranks of the last attempt", text)


def list_events(events: Sequence[Event], start: float) -> str:
    """Return the Events, at the times of the charts."""
    rows = [
        _row([("time", format_duration(event.time - start)), (f"name {event.type}", event.reason), ("", event.message)])
        for event in events
    ]
    return _box("Events", _table(("time", "reason", "message"), rows, "wide")) if rows else ""


def list_facts(facts: Mapping[str, str]) -> str:
    """Return how to make the run again."""
    rows = [_row([("name", name), ("", value)]) for name, value in facts.items() if value]
    return _box("Command and environment", _table((), rows, "wide")) if rows else ""


def _box(title: str, text: str) -> str:
    return f'<h2>{title}</h2><div class="box">{text}</div>'


def _table(heads: Sequence[str], rows: Sequence[str], kind: str, cells: str = "") -> str:
    head = "".join(f'<th class="{cells}">{escape(name)}</th>' for name in heads)
    return f'<table class="{kind}"><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table>'


def _row(cells: Sequence[tuple[str, str]], kind: str = "") -> str:
    """Return a row of cells, each with its class and its text."""
    inner = "".join(f'<td class="{escape(name)}">{escape(text)}</td>' for name, text in cells)
    return f'<tr class="{kind}">{inner}</tr>'

"""Charts as SVG text. Their colours are CSS variables of the page, so that they follow its light or dark theme."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from ddp_operator.progress import format_duration
from ddp_operator.report.run import Mark, Point

_WIDTH, _HEIGHT = 640, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 60, 14, 22, 30
_MOST_POINTS = 400
_GAP_MARK = 26  # labels of marks closer than that would lie on each other


@dataclass(frozen=True, slots=True)
class Series:
    """A named line; ``color`` is the number of the page's colour."""

    name: str
    points: Sequence[Point]
    color: int = 1


def line_chart(
    title: str, series: Sequence[Series], marks: Sequence[Mark], *, unit: str = "", zero: bool = False
) -> str:
    """Return a chart of lines over the run's seconds; an empty string where there is no point. ``zero``: from 0 on."""
    lines = [Series(s.name, thin(finite(s.points)), s.color) for s in series]
    lines = [line for line in lines if line.points]
    if not lines:
        return ""
    frame = _Frame.around([point for line in lines for point in line.points], zero=zero)
    body = []
    for line in lines:
        path = " ".join(f"{frame.x(x):.1f},{frame.y(y):.1f}" for x, y in line.points)
        body.append(f'<polyline class="line c{line.color}" points="{path}"/>')
        if len(line.points) <= 60:
            body += [
                f'<circle class="dot c{line.color}" cx="{frame.x(x):.1f}" cy="{frame.y(y):.1f}" r="2.5">'
                f"<title>{escape(line.name)} {format_number(y)}{escape(unit)} at {format_duration(x)}</title></circle>"
                for x, y in line.points
            ]
    return _figure(title, frame, body, marks, [(line.name, line.color) for line in lines], unit)


def stacked_chart(
    title: str, names: Sequence[str], rows: Sequence[Sequence[float]], marks: Sequence[Mark], *, unit: str = ""
) -> str:
    """Return areas on top of each other. A row: the time, then a value for each name."""
    rows = [row for row in rows if all(map(math.isfinite, row))]
    rows = rows[:: math.ceil(len(rows) / _MOST_POINTS)] if rows else []
    if len(rows) < 2:
        return ""
    frame = _Frame.around([(row[0], sum(row[1:])) for row in rows], zero=True)
    body = []
    for place, name in enumerate(names):
        top = [(frame.x(row[0]), frame.y(sum(row[1 : place + 2]))) for row in rows]
        base = [(frame.x(row[0]), frame.y(sum(row[1 : place + 1]))) for row in reversed(rows)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in [*top, *base])
        mean = sum(row[place + 1] for row in rows) / len(rows)
        words = f"{escape(name)}: {format_number(mean)}{escape(unit)} on average"
        body.append(f'<polygon class="area c{place + 1}" points="{path}"><title>{words}</title></polygon>')
    return _figure(title, frame, body, marks, [(name, place + 1) for place, name in enumerate(names)], unit)


def finite(points: Sequence[Point]) -> list[Point]:
    """Return the points that can be drawn: a loss may be NaN."""
    return [(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y)]


def thin(points: Sequence[Point]) -> list[Point]:
    """Return at most so many points as a chart can show, among them the least and the greatest of each stretch."""
    if len(points) <= _MOST_POINTS:
        return list(points)
    stretch = math.ceil(len(points) / (_MOST_POINTS // 2))
    kept: list[Point] = []
    for start in range(0, len(points), stretch):
        part = points[start : start + stretch]
        extremes = {min(part, key=_value), max(part, key=_value)}
        kept += sorted(extremes)
    return kept


def _value(point: Point) -> float:
    return point[1]


def nice_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Return round numbers that span low to high: steps of 1, 2 or 5 times a power of ten."""
    if high <= low:
        high = low + (abs(low) or 1.0)
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
    first = math.floor(low / step) * step
    return [first + step * n for n in range(math.ceil((high - first) / step - 1e-9) + 1)]


def time_ticks(high: float) -> list[float]:
    """Return times to write below a chart: round seconds, minutes or hours."""
    steps = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 21600, 43200, 86400]
    step = next((step for step in steps if high / step <= 7), math.ceil(high / 7 / 86400) * 86400)
    return [float(step * n) for n in range(int(high // step) + 1)]


def format_number(value: float) -> str:
    """Return a number as short as it is readable: 0.0123, 12.3, 1,230, 1.2M."""
    size = abs(value)
    if size >= 1e6:
        return f"{value / 1e6:.3g}M" if size < 1e9 else f"{value:.3g}"
    if size >= 1000:
        return f"{value:,.0f}"
    return "0" if value == 0 else f"{value:.3g}"


@dataclass(frozen=True, slots=True)
class _Frame:
    """From values to places on the chart."""

    last: float
    ticks: Sequence[float]

    @classmethod
    def around(cls, points: Sequence[Point], *, zero: bool) -> _Frame:
        values = [y for _, y in points]
        return cls(max(1.0, *(x for x, _ in points)), nice_ticks(0.0 if zero else min(values), max(values)))

    def x(self, seconds: float) -> float:
        return _LEFT + seconds / self.last * (_WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        low, high = self.ticks[0], self.ticks[-1]
        return _HEIGHT - _BOTTOM - (value - low) / (high - low) * (_HEIGHT - _TOP - _BOTTOM)


def _figure(
    title: str,
    frame: _Frame,
    body: Sequence[str],
    marks: Sequence[Mark],
    legend: Sequence[tuple[str, int]],
    unit: str,
) -> str:
    parts = [f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(title)}">']
    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM
    for tick in frame.ticks:
        y = frame.y(tick)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(
            f'<text class="tick" x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{format_number(tick)}</text>'
        )
    for tick in time_ticks(frame.last):
        words = format_duration(tick)
        parts.append(
            f'<text class="tick" x="{frame.x(tick):.1f}" y="{bottom + 18}" text-anchor="middle">{words}</text>'
        )
    parts += body
    free = 0.0
    for mark in marks:
        x = frame.x(min(mark.time, frame.last))
        parts.append(f'<line class="mark" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{bottom}"/>')
        if x >= free:
            anchor = "end" if x > right - 60 else "middle"
            parts.append(
                f'<text class="mark" x="{x:.1f}" y="{_TOP - 8}" text-anchor="{anchor}">{escape(mark.label)}</text>'
            )
            free = x + _GAP_MARK * 2
    parts.append("</svg>")
    keys = "".join(f'<span class="key c{color}">{escape(name)}</span>' for name, color in legend)
    head = f"{escape(title)}{f' <small>{escape(unit.strip())}</small>' if unit.strip() else ''}"
    return f"<figure><figcaption><b>{head}</b>{keys if len(legend) > 1 else ''}</figcaption>{''.join(parts)}</figure>"

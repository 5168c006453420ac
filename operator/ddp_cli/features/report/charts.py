"""Build charts as SVG text. Their colours are CSS variables of the page, which has a light and a dark theme."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from operator import itemgetter

from ddp_cli.features.report.run import Mark, Point
from ddp_operator.api.texts import format_duration

_WIDTH = 640
_HEIGHT = 260
_LEFT = 60
_RIGHT = 14
_TOP = 26
_BOTTOM = 34
_MOST_POINTS = 400
_LETTER = 8.5  # width of a letter in a label, at the size of a narrow page


@dataclass(frozen=True, slots=True)
class Series:
    """A named line of separate stretches; ``color`` is the number of the page's colour."""

    name: str
    stretches: Sequence[Sequence[Point]]
    color: int = 1


@dataclass(frozen=True, slots=True)
class TimeAxis:
    """The time axis of all charts of a page: its end in seconds, interruptions, and checkpoints with their steps."""

    end: float
    marks: Sequence[Mark] = ()
    checkpoints: Sequence[Point] = ()


def line_chart(title: str, series: Sequence[Series], axis: TimeAxis, *, unit: str = "", zero: bool = False) -> str:
    """Return a chart of lines, empty for fewer than two points. ``zero``: the value axis starts at 0."""
    lines = [(line, [part for part in map(finite, line.stretches) if part]) for line in series]
    lines = [(line, parts) for line, parts in lines if parts]
    values = [value for _, parts in lines for part in parts for _, value in part]
    if len(values) < 2:
        return ""
    frame = _Frame(axis.end, nice_ticks(0.0 if zero else min(values), max(values)))
    body = []
    for line, parts in lines:
        few = sum(map(len, parts)) <= 60
        for part in parts:
            points = thin(part)
            path = " ".join(f"{frame.x(x):.1f},{frame.y(y):.1f}" for x, y in points)
            body.append(f'<polyline class="line c{line.color}" points="{path}"/>')
            body += [
                f'<circle class="dot c{line.color}" cx="{frame.x(x):.1f}" cy="{frame.y(y):.1f}" r="2.5">'
                f"<title>{escape(line.name)} {format_number(y)}{escape(unit)} at {format_duration(x)}</title></circle>"
                for x, y in points
                if few or len(points) == 1
            ]
    return _figure(title, frame, body, axis, [(line.name, line.color) for line, _ in lines], unit)


def stacked_chart(
    title: str, names: Sequence[str], stretches: Sequence[Sequence[Sequence[float]]], axis: TimeAxis, *, unit: str = ""
) -> str:
    """Return a chart of stacked areas. A row of a stretch: the time, then a value for each name."""
    parts = [[row for row in part if all(map(math.isfinite, row))] for part in stretches]
    parts = [part[:: math.ceil(len(part) / _MOST_POINTS)] for part in parts if len(part) > 1]
    rows = [row for part in parts for row in part]
    if not rows:
        return ""
    frame = _Frame(axis.end, nice_ticks(0.0, max(sum(row[1:]) for row in rows)))
    body = []
    legend = [(name, number) for number, name in enumerate(names, 1)]
    for name, number in legend:
        mean = sum(row[number] for row in rows) / len(rows)
        tooltip = f"{escape(name)}: {format_number(mean)}{escape(unit)} on average"
        for part in parts:
            top = [(frame.x(row[0]), frame.y(sum(row[1 : number + 1]))) for row in part]
            base = [(frame.x(row[0]), frame.y(sum(row[1:number]))) for row in reversed(part)]
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in [*top, *base])
            body.append(f'<polygon class="area c{number}" points="{path}"><title>{tooltip}</title></polygon>')
    return _figure(title, frame, body, axis, legend, unit)


def finite(points: Sequence[Point]) -> list[Point]:
    """Return the finite points: a loss may be NaN."""
    return [(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y)]


def thin(points: Sequence[Point]) -> list[Point]:
    """Return at most ``_MOST_POINTS`` points: the minimum and the maximum of each part."""
    if len(points) <= _MOST_POINTS:
        return list(points)
    stretch = math.ceil(len(points) / (_MOST_POINTS // 2))
    kept: list[Point] = []
    for start in range(0, len(points), stretch):
        part = points[start : start + stretch]
        kept += sorted({min(part, key=itemgetter(1)), max(part, key=itemgetter(1))})
    return kept


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
    """Return the labels of a time axis: round seconds, minutes or hours."""
    steps = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 21600, 43200, 86400]
    step = next((step for step in steps if high / step <= 7), math.ceil(high / 7 / 86400) * 86400)
    return [float(step * n) for n in range(int(high // step) + 1)]


def format_number(value: float) -> str:
    """Return a number in short form: 0.0123, 12.3, 1,230, 1.2M."""
    size = abs(value)
    if size >= 1e9:
        return f"{value:.3g}"
    if size >= 1e6:
        return f"{value / 1e6:.3g}M"
    if size >= 1000:
        return f"{value:,.0f}"
    return "0" if value == 0 else f"{value:.3g}"


@dataclass(frozen=True, slots=True)
class _Frame:
    """Converts values to coordinates of the chart."""

    last: float
    ticks: Sequence[float]

    def x(self, seconds: float) -> float:
        return _LEFT + min(1.0, seconds / max(1.0, self.last)) * (_WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        low = self.ticks[0]
        high = self.ticks[-1]
        return _HEIGHT - _BOTTOM - (value - low) / (high - low) * (_HEIGHT - _TOP - _BOTTOM)


def _figure(
    title: str, frame: _Frame, body: Sequence[str], axis: TimeAxis, legend: Sequence[tuple[str, int]], unit: str
) -> str:
    parts = [f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(title)}">']
    for tick in frame.ticks:
        y = frame.y(tick)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(_text("tick", _LEFT - 8, y + 4, "end", format_number(tick)))
    for tick in time_ticks(frame.last):
        parts.append(_text("tick", frame.x(tick), _HEIGHT - 6, "middle", format_duration(tick)))
    parts += [*body, *_draw_checkpoints(frame, axis.checkpoints), *_draw_marks(frame, axis.marks), "</svg>"]
    heading = escape(title)
    if unit.strip():
        heading += f" <small>{escape(unit.strip())}</small>"
    keys = ""
    if len(legend) > 1:
        keys = "".join(f'<span class="key c{color}">{escape(name)}</span>' for name, color in legend)
    return f"<figure><figcaption><b>{heading}</b>{keys}</figcaption>{''.join(parts)}</figure>"


def _text(kind: str, x: float, y: float, anchor: str, content: str) -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(content)}</text>'


def _draw_checkpoints(frame: _Frame, checkpoints: Sequence[Point]) -> Iterator[str]:
    """Yield triangles below the time axis, without those that would overlap the previous one."""
    free = 0.0
    y = _HEIGHT - _BOTTOM
    for time, step in checkpoints:
        x = frame.x(time)
        if x >= free:
            tooltip = f"checkpoint of step {step:,.0f} at {format_duration(time)}"
            yield f'<path class="checkpoint" d="M{x:.1f},{y + 1}l4,7h-8z"><title>{tooltip}</title></path>'
            free = x + 9


def _draw_marks(frame: _Frame, marks: Sequence[Mark]) -> Iterator[str]:
    """Yield a vertical line for each mark, with its number and label, or with its number if the label has no room.

    The label of the last mark may be on its left.
    """
    places = [frame.x(mark.time) for mark in marks] + [_WIDTH + _LETTER]
    free = 0.0
    for number, (x, mark) in enumerate(zip(places, marks, strict=False), 1):
        label = f"{number} {mark.label}"
        line = f'<line class="mark" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP - 4}" y2="{_HEIGHT - _BOTTOM}">'
        yield f"{line}<title>{escape(label)} at {format_duration(mark.time)}</title></line>"
        left_limit = x if number == len(marks) else 0.0
        # text, anchor and its x, left end of the text, right limit
        for text, anchor, anchor_x, start, limit in (
            (label, "start", x - 3, x - 3, places[number] - _LETTER),
            (label, "end", x + 3, x - _LETTER * len(label), left_limit),
            (str(number), "middle", x, x - _LETTER / 2, float(_WIDTH)),
        ):
            end = start + _LETTER * len(text)
            if start >= free and end <= limit:
                yield _text("mark", anchor_x, _TOP - 9, anchor, text)
                free = end
                break

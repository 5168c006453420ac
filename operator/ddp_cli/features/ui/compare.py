"""Two or more runs side by side: which is better, the settings that differ, their curves, and their results."""

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple

from ddp_cli.features.ui.curves import build_curves
from ddp_cli.features.ui.job_page import JobPage, average, format_value
from ddp_cli.features.ui.render import render, to_json
from ddp_cli.features.ui.run import RecordedRun
from ddp_cli.local.folder import choose_rate
from ddp_operator.api import constants

_COMPARED: Final = ("loss", "accuracy", "rate", "learning-rate")
_RESULTS: Final = ("step", "epoch", "duration", "nodes", "GPUs", "restarts", "goodput")
_WINDOW: Final = 0.1
"""Part of the steps over which a noisy value is averaged."""
_EQUAL: Final = 0.02
_MOST_DIFFERENCES: Final = 300
_OPTION: Final = re.compile(r" (--[^\s=]+)(?:[= ]('[^']*'|[^\s-]\S*))?")
"""An option of a command line and its value, if it has one."""
_TRAINER: Final = f"template.spec.containers[{constants.TRAINER_CONTAINER}]."
_INCIDENTAL: Final = ("rendezvous.port", "command", "image", "uid", "directory")
"""Settings that differ anyway, and facts that are settings too."""


class Result(NamedTuple):
    """A row of a table: a measured value or a setting of each run. ``verdict``: which is better; empty: no such row."""

    name: str
    values: Sequence[str | datetime]
    verdict: str = ""


def render_comparison(pages: Sequence[JobPage]) -> str:
    """Return the page that compares jobs."""
    return render(
        "compare",
        pages=pages,
        results=list_results(pages),
        unfinished=list_unfinished(pages),
        differences=find_differences([page.run for page in pages]),
        curves=to_json(join_curves([page.run for page in pages])),
    )


def join_curves(runs: Sequence[RecordedRun]) -> dict[str, Any]:
    """Return the charts with a line for each run, over the time since its own start."""
    charts: dict[str, dict[str, Any]] = {}
    rate = choose_common_rate(runs)
    for number, run in enumerate(runs):
        for chart in build_curves(run, run.name, rate)["charts"]:
            if chart["id"] in _COMPARED:
                joined = charts.setdefault(chart["id"], {**chart, "lines": []})
                joined["lines"] += [{**line, "color": number} for line in chart["lines"] if line["name"] == run.name]
    shown = [chart for chart in charts.values() if chart["lines"]]
    return {"clock": "each job's start", "charts": shown, "marks": [], "checkpoints": []}


def choose_common_rate(runs: Sequence[RecordedRun]) -> tuple[str, str]:
    """Return the throughput's column and unit for all runs: steps, if samples are not known of all that have any."""
    rates = {rate for run in runs if average(run, (rate := choose_rate(run.rows))[0]) is not None}
    return rates.pop() if len(rates) == 1 else choose_rate(())


def list_results(pages: Sequence[JobPage]) -> list[Result]:
    """Return the measured values of the jobs, a row for each that is known of one of them."""
    runs = [page.run for page in pages]
    names = [run.name for run in runs]
    cards = [{card.name: f"{card.value} {card.note}".strip() for card in page.cards} for page in pages]
    common = min((max((row.get("step", 0.0) for row in run.rows), default=0.0) for run in runs), default=0.0)
    since = (1 - _WINDOW) * common
    column, unit = choose_common_rate(runs)
    window = f"mean of steps {since:,.0f} to {common:,.0f}"
    measured = [
        _rank(f"training loss, {window}", names, [average(run, "loss", max(since, 1.0), common) for run in runs]),
        _rank(f"mean throughput, {unit}", names, [average(run, column) for run in runs], more_is_better=True),
    ]
    described = [
        Result("state", [page.state.word for page in pages]),
        Result("started", [datetime.fromtimestamp(run.start, UTC) if run.start else "" for run in runs]),
        *(Result(name, [values.get(name, "") for values in cards]) for name in _RESULTS),
    ]
    return [result for result in (*measured, *described) if any(result.values)]


def list_unfinished(pages: Sequence[JobPage]) -> list[str]:
    """Return the jobs that have not done all they should: those that still train, and others with their state."""
    return [
        f"{page.run.name} {'still trains' if page.trains else f'({page.state.word})'}"
        for page in pages
        if "Succeeded" not in (page.status.phase, page.status.dev.result if page.status.dev is not None else None)
    ]


def _rank(name: str, runs: Sequence[str], values: Sequence[float | None], *, more_is_better: bool = False) -> Result:
    """Return the result with the best run, and by how much it is better than the next one."""
    known = [(value, run) for value, run in zip(values, runs, strict=True) if value is not None]
    known.sort(reverse=more_is_better)
    verdict = ""
    if len(known) > 1:
        best, second = known[0][0], known[1][0]
        leaders = [run for value, run in known if abs(value - best) <= _EQUAL * abs(best)]
        verdict = f"{leaders[0]} is better" + (f" by {abs(best - second) / abs(second):.0%}" if second else "")
        if len(leaders) > 1:
            verdict = f"equal within {_EQUAL:.0%}"
        if 1 < len(leaders) < len(known):
            verdict = f"{' and '.join(leaders)} are better, and {verdict}"
    return Result(name, ["" if value is None else format_value(value) for value in values], verdict)


def find_differences(runs: Sequence[RecordedRun]) -> list[Result]:
    """Return the settings and arguments that differ between runs."""
    flat = [dict(_flatten("", run.resource.get("spec") or {})) | dict(run.facts) for run in runs]
    names = [name for name in dict.fromkeys(name for settings in flat for name in settings) if name not in _INCIDENTAL]
    found = [Result(name, [settings.get(name, "") for settings in flat]) for name in names]
    differences = [difference for difference in found if len(set(difference.values)) > 1]
    return [item._replace(name=item.name.removeprefix(_TRAINER)) for item in differences[:_MOST_DIFFERENCES]]


def _flatten(path: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from _flatten(f"{path}.{name}" if path else str(name), item)
    elif isinstance(value, list) and value and all(isinstance(item, str) for item in value):
        yield from _list_options(shlex.join(value), path)
    elif isinstance(value, list):
        for number, item in enumerate(value):
            name = item.get("name", number) if isinstance(item, Mapping) else number
            yield from _flatten(f"{path}[{name}]", item)
    else:
        yield path, str(value)


def _list_options(command: str, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield the options of a command line by name, and its other words together."""
    others = _OPTION.sub("", f" {command}")
    for name, value in _OPTION.findall(f" {command}"):
        yield f"{path} {name}".strip(), value or "set"
    yield f"{path or 'command'} without options", others.strip()

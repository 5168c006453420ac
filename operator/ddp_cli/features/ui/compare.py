"""Two or more runs side by side: their curves in one chart, their results, and the settings that differ."""

from collections.abc import Sequence
from typing import Any, Final

from ddp_cli.features.ui.curves import build_curves
from ddp_cli.features.ui.job_page import find_differences, list_cards
from ddp_cli.features.ui.render import render, to_json
from ddp_cli.features.ui.run import RecordedRun
from ddp_operator.api.kubeobjects import utc_now

_COMPARED: Final = ("loss", "accuracy", "rate", "learning-rate")


def render_comparison(runs: Sequence[RecordedRun], keys: Sequence[str]) -> str:
    """Return the page that compares runs."""
    return render(
        "compare",
        runs=list(zip(keys, runs, strict=True)),
        results=list_results(runs),
        differences=find_differences(runs),
        curves=to_json(join_curves(runs)),
    )


def join_curves(runs: Sequence[RecordedRun]) -> dict[str, Any]:
    """Return the charts with a line for each run, over the time since its own start."""
    charts: dict[str, dict[str, Any]] = {}
    for number, run in enumerate(runs):
        for chart in build_curves(run, run.name)["charts"]:
            if chart["id"] in _COMPARED:
                joined = charts.setdefault(chart["id"], {**chart, "lines": []})
                own = next((line for line in chart["lines"] if line["name"] == run.name), None)
                joined["lines"] += [{**own, "color": number}] if own is not None else []
    return {
        "start": 0.0,
        "end": max((run.end for run in runs), default=0.0),
        "charts": [chart for chart in charts.values() if chart["lines"]],
        "marks": [],
        "attempts": [],
        "checkpoints": [],
    }


def list_results(runs: Sequence[RecordedRun]) -> list[tuple[str, list[str]]]:
    """Return the measured values of the runs, a row for each that is known of one of them."""
    now = utc_now()
    columns = []
    for run in runs:
        values: dict[str, str] = {"phase": run.status.phase or ""}
        values |= {card.name: f"{card.value} {card.note}".strip() for card in list_cards(run, now)}
        losses = [row["loss"] for row in run.rows if "loss" in row]
        columns.append(values | ({"lowest loss": f"{min(losses):.4g}"} if losses else {}))
    names = dict.fromkeys(name for values in columns for name in values)
    return [(name, [values.get(name, "") for values in columns]) for name in names]

"""Two or more runs side by side: their curves in one chart, their results, and the settings that differ."""

from collections.abc import Sequence
from typing import Any, Final

from ddp_cli.features.ui.curves import build_curves
from ddp_cli.features.ui.job_page import find_differences
from ddp_cli.features.ui.render import clean_data, render, to_json
from ddp_cli.features.ui.run import RecordedRun
from ddp_operator.api.status import Progress
from ddp_operator.api.texts import format_duration

_COMPARED: Final = ("loss", "accuracy", "rate", "learning-rate")


def render_comparison(runs: Sequence[RecordedRun], keys: Sequence[str]) -> str:
    """Return the page that compares runs."""
    return render(
        "compare",
        runs=list(zip(keys, runs, strict=True)),
        results=list_results(runs),
        differences=find_differences(runs),
        curves=to_json(clean_data(join_curves(runs))),
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
    rows: dict[str, list[str]] = {}
    for run in runs:
        status = run.status
        progress = status.progress or Progress()
        duration = ""
        if status.start_time and status.completion_time:
            duration = format_duration((status.completion_time - status.start_time).total_seconds())
        losses = [row["loss"] for row in run.rows if "loss" in row]
        values = {
            "phase": status.phase or "",
            "step": f"{progress.step:,}" if progress.step is not None else "",
            "loss": progress.loss or "",
            "lowest loss": f"{min(losses):.4g}" if losses else "",
            "val. loss": progress.val_loss or "",
            "val. accuracy": progress.val_accuracy or "",
            "throughput": progress.throughput or "",
            "duration": duration,
            "restarts": str(status.restarts.all),
            "goodput": status.goodput or "",
        }
        for name, value in values.items():
            rows.setdefault(name, []).append(value)
    return [(name, values) for name, values in rows.items() if any(values)]

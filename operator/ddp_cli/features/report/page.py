"""Build the HTML page of a run; all its text is escaped."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from html import escape as escape_markup
from importlib import resources
from typing import Final

from msgspec.structs import replace

from ddp_cli.features.report.charts import Series, TimeAxis, format_number, line_chart, stacked_chart
from ddp_cli.features.report.run import LoggedEvent, Mark, RankTime, RecordedRun, split_step_time
from ddp_cli.local.ending import explain_interruption
from ddp_cli.local.folder import choose_rate
from ddp_cli.view.why import explain_why, omit_cluster_advice
from ddp_operator._version import __version__
from ddp_operator.api.status import LastFailure, Progress
from ddp_operator.api.texts import format_duration
from ddp_operator.decide.conditions import find_doubts
from ddp_operator.decide.failures import describe_detail, describe_place
from ddp_operator.decide.stalls import RATIO
from ddp_pod.contract.credentials import hide_credentials

_STYLE: Final = (resources.files(__package__) / "page.css").read_text(encoding="utf-8")


def build_page(run: RecordedRun, now: datetime) -> str:
    """Return the page of a run. Its Content-Security-Policy forbids external resources."""
    status = run.status
    phase: str = "Interrupted" if run.interrupted else status.phase or "Unknown"
    if phase == "Held" and status.dev is not None:
        phase = status.dev.result or phase
    why = explain_why(run.resource, (), now)
    summary = f"{why.what} {omit_cluster_advice(why.todo)}" if run.command else str(why)
    if run.interrupted:
        summary = explain_interruption(run.resource, status, run.command)
    last_failure = status.last_failure
    if last_failure is not None and run.command:
        last_failure = replace(last_failure, remedy=omit_cluster_advice(last_failure.remedy))
    failure = _failure(last_failure) if last_failure else ""
    succeeded = phase == "Succeeded"
    is_doubtful = bool(find_doubts(status))
    kind = "" if is_doubtful else phase
    title = f"{phase} with a warning" if is_doubtful else phase
    sections = [
        f'<header><h1>{escape(run.name)}<span class="phase {kind}">{title}</span></h1>',
        f"<p>{escape(summary)}</p></header>",
        f'<dl class="cards">{"".join(_cards(run))}</dl>',
        "" if succeeded else failure,
        _charts(run),
        list_interruptions(run.marks),
        failure if succeeded else "",
        list_ranks(run.ranks),
        list_links(run.status.tracking.links if run.status.tracking else ()),
        list_events(run.events, run.start),
        list_facts({"command": run.command, **run.facts}),
        f"<footer>Written by ddp {escape(__version__)}</footer>",
    ]
    policy = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<link rel="icon" href="data:,">\n<title>{escape(run.name)}</title>\n'
        f"<style>{_STYLE}</style>\n</head>\n<body>\n" + "\n".join(filter(None, sections)) + "\n</body>\n</html>\n"
    )


def escape(text: str) -> str:
    """Return text as markup, without credentials of URLs: people pass a report on."""
    return escape_markup(hide_credentials(text))


def _cards(run: RecordedRun) -> Iterable[str]:
    status = run.status
    progress = status.progress or Progress()
    duration = None
    if status.start_time and status.completion_time:
        duration = format_duration((status.completion_time - status.start_time).total_seconds())
    column, unit = choose_rate(run.rows)
    rates = [rate for part in run.series(column) for _, rate in part if rate > 0]
    facts = [
        ("duration", duration),
        ("nodes", str(status.nodes.desired) if status.nodes.desired else None),
        ("epoch", _count(progress.epoch, progress.epochs)),
        ("step", _count(progress.step, progress.total_steps)),
        ("loss", progress.loss),
        ("val. accuracy", progress.val_accuracy),
        ("val. loss", progress.val_loss),
        (f"{unit}, mean", format_number(sum(rates) / len(rates)) if rates else None),
        ("attempts", str(status.attempt) if status.attempt > 1 else None),
        ("restarts", str(status.restarts.all) if status.restarts.all else None),
    ]
    for name, value in facts:
        if value is not None:
            yield f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>"


def _count(done: int | None, total: int | None) -> str | None:
    if done is None:
        return None
    return f"{done:,} of {total:,}" if total and total != done else f"{done:,}"


def _charts(run: RecordedRun) -> str:
    axis = TimeAxis(run.end, run.marks, run.checkpoints)
    column, unit = choose_rate(run.rows)
    losses = [Series("training", run.series("loss")), Series("validation", run.series("validation_loss"), 2)]
    steps = [
        [(time - run.start, *(1000 * part for part in parts)) for time, *parts in stretch]
        for stretch in split_step_time(run.rows)
    ]
    charts = [
        line_chart("Throughput", [Series(unit, run.series(column))], axis, unit=f" {unit}", zero=True),
        line_chart("Loss", losses, axis),
        line_chart("Validation accuracy", [Series("accuracy", run.series("validation_accuracy"))], axis),
        stacked_chart("Time of a step on rank 0", ("data", "compute", "waiting and other"), steps, axis, unit=" ms"),
        line_chart("Learning rate", [Series("learning rate", run.series("learning_rate"))], axis),
    ]
    drawn = "".join(charts)
    if not drawn:
        return f"<p>No charts: {escape(run.step_hint or 'the script reported no steps.')}</p>"
    signs = (("mark", "interruption", run.marks), ("checkpoint", "checkpoint", run.checkpoints))
    keys = "".join(f'<span class="sign {kind}">{name}</span>' for kind, name, items in signs if items)
    legend = f'<p class="legend">Time since the start of the run{keys}</p>'
    return f'<h2>Over time</h2>{legend}<div class="charts">{drawn}</div>'


def _failure(failure: LastFailure) -> str:
    where = f"attempt {failure.attempt}, {describe_place(failure)}"
    trace = f"<pre>{escape(failure.traceback.rstrip())}</pre>" if failure.traceback else ""
    hint = f"<p><b>What to do:</b> {escape(failure.remedy)}</p>" if failure.remedy else ""
    return (
        f'<h2>Last failure</h2><div class="box bad"><b>{escape(failure.category)}</b>: '
        f"{escape(describe_detail(failure))}<br><small>{escape(where)}</small>{trace}{hint}</div>"
    )


_SHOWN_RANKS: Final = 16


def list_interruptions(marks: Sequence[Mark]) -> str:
    """Return a table of the interruptions whose numbers are on the charts."""
    rows = [
        _row([("number", str(number)), ("time", format_duration(mark.time)), ("name", mark.label), ("", mark.cause)])
        for number, mark in enumerate(marks, 1)
    ]
    return _box("Interruptions", _table(("", "time", "what", "cause"), rows, "wide")) if rows else ""


def list_ranks(ranks: Sequence[RankTime]) -> str:
    """Return a table of the ranks' mean steps, the slowest first; ranks after the sixteenth are folded."""
    if not ranks:
        return ""
    median = statistics.median(rank.own for rank in ranks)
    heads = ["rank", "steps", "step, ms"]
    if median:
        heads[1:1] = ["own work, x median", "data, ms", "compute, ms", "waiting, ms"]
    rows = []
    for rank in sorted(ranks, key=lambda rank: (-rank.own, rank.rank)):
        cells = [str(rank.rank), f"{rank.steps:,}", f"{1000 * rank.step:,.1f}"]
        if median:
            parts = [f"{1000 * part:,.1f}" for part in (rank.data, rank.compute, rank.wait)]
            cells[1:1] = [f"{rank.own / median:.2f}", *parts]
        is_straggler = median and rank.own >= RATIO * median
        rows.append(_row([("number", cell) for cell in cells], "late" if is_straggler else ""))
    text = _table(heads, rows[:_SHOWN_RANKS], "ranks", "number")
    if rows[_SHOWN_RANKS:]:
        rest = _table(heads, rows[_SHOWN_RANKS:], "ranks", "number")
        text += f"<details><summary>{len(rows) - _SHOWN_RANKS} more ranks</summary>{rest}</details>"
    return _box("Ranks of the last attempt, the slowest first" if median else "Ranks of the last attempt", text)


def list_links(links: Sequence[str]) -> str:
    """Return links to the run in experiment trackers."""
    rows = [f'<tr><td><a href="{escape(link)}">{escape(link)}</a></td></tr>' for link in links]
    return _box("Trackers", _table((), rows, "wide")) if rows else ""


def list_events(events: Sequence[LoggedEvent], start: float) -> str:
    """Return a table of the Events, with times since the start of the run."""
    rows = [
        _row([("time", format_duration(event.time - start)), (f"name {event.type}", event.reason), ("", event.message)])
        for event in events
    ]
    return _box("Events", _table(("time", "reason", "message"), rows, "wide")) if rows else ""


def list_facts(facts: Mapping[str, str]) -> str:
    """Return a table of the command and the environment, for a repetition of the run."""
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

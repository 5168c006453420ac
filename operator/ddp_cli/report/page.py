"""Build the HTML page of a run; all its text is escaped."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from html import escape as escape_markup
from typing import Final

from msgspec.structs import replace

from ddp_cli.local.ending import explain_interruption
from ddp_cli.local.folder import choose_rate
from ddp_cli.report.charts import Series, TimeAxis, format_number, line_chart, stacked_chart
from ddp_cli.report.run import LoggedEvent, Mark, RankTime, RecordedRun, split_step_time
from ddp_cli.view.local_advice import omit_cluster_advice
from ddp_cli.view.why import explain_why
from ddp_operator._version import __version__
from ddp_operator.api.status import LastFailure, Progress
from ddp_operator.api.texts import format_duration
from ddp_operator.decide.conditions import find_doubts
from ddp_operator.decide.failures import describe_detail, describe_place
from ddp_operator.decide.stalls import RATIO
from ddp_pod.contract.credentials import hide_credentials

# Blue, orange and green that colour-blind readers can distinguish, in a shade for each theme.
_STYLE: Final = """
:root { color-scheme: light dark; --page: #f6f7f9; --card: #ffffff; --ink: #1b1f24; --soft: #5b6570; --rule: #dfe3e8;
  --c1: #1f6feb; --c2: #d9730d; --c3: #2e8b57; --good: #1a7f37; --bad: #cf222e; --busy: #9a6700; }
@media (prefers-color-scheme: dark) { :root { --page: #0e1116; --card: #171b22; --ink: #e6e9ee; --soft: #9aa4b0;
  --rule: #2a313b; --c1: #6cb0ff; --c2: #ffa657; --c3: #56d38c; --good: #3fb950; --bad: #ff7b72; --busy: #e3b341; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1360px; padding: 28px 20px 48px; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
h1 { font-size: 24px; margin: 0; overflow-wrap: anywhere; } h2 { font-size: 17px; margin: 32px 0 10px; }
header p { margin: 6px 0 0; color: var(--soft); max-width: 90ch; overflow-wrap: anywhere; }
.phase { font-size: 13px; font-weight: 600; border: 1px solid; border-radius: 999px; padding: 2px 10px;
  margin-left: 10px; vertical-align: 4px; color: var(--busy); }
.phase.Succeeded { color: var(--good); } .phase.Failed, .phase.Rejected, .phase.Interrupted { color: var(--bad); }
.cards { display: grid; grid-template-columns: repeat(auto-fill, minmax(140px, 1fr)); gap: 10px; margin: 22px 0 0;
  padding: 0; }
.cards div, figure, .box { background: var(--card); border: 1px solid var(--rule); border-radius: 8px; }
.cards div { padding: 10px 14px; } .cards dt { color: var(--soft); font-size: 13px; }
.cards dd { margin: 0; font-size: 18px; font-weight: 600; font-variant-numeric: tabular-nums; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(460px, 100%), 1fr)); gap: 14px;
  margin-top: 22px; }
figure { margin: 0; padding: 12px 14px 6px; min-width: 0; } figcaption { display: flex; gap: 14px; flex-wrap: wrap; }
figcaption small { color: var(--soft); font-weight: 400; } svg { display: block; width: 100%; height: auto; }
.key::before { content: ""; display: inline-block; width: 10px; height: 10px; border-radius: 2px; margin-right: 6px;
  background: currentColor; }
.key { color: var(--soft); font-size: 13px; } .key.c1::before { background: var(--c1); }
.key.c2::before { background: var(--c2); } .key.c3::before { background: var(--c3); }
.legend { color: var(--soft); font-size: 13px; margin: 0 0 10px; } .sign { margin-left: 16px; white-space: nowrap; }
.sign.mark::before { content: "┆ "; color: var(--bad); font-weight: 700; }
.sign.checkpoint::before { content: "▲ "; color: var(--soft); font-size: 10px; }
.grid { stroke: var(--rule); } .tick { fill: var(--soft); font-size: 12px; } .checkpoint { fill: var(--soft); }
line.mark { stroke: var(--bad); stroke-dasharray: 4 3; } text.mark { fill: var(--bad); font-size: 12px; }
.line { fill: none; stroke-width: 2; stroke-linejoin: round; } .line.c1 { stroke: var(--c1); }
.line.c2 { stroke: var(--c2); } .line.c3 { stroke: var(--c3); }
.dot.c1 { fill: var(--c1); } .dot.c2 { fill: var(--c2); } .dot.c3 { fill: var(--c3); }
.area { opacity: 0.85; } .area.c1 { fill: var(--c1); } .area.c2 { fill: var(--c2); } .area.c3 { fill: var(--c3); }
.box { padding: 4px 14px; overflow-x: auto; } .box.bad { border-left: 4px solid var(--bad); padding: 12px 16px;
  overflow-wrap: anywhere; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th { text-align: left; color: var(--soft); font-weight: 500; font-size: 13px; }
th, td { padding: 6px 18px 6px 0; border-bottom: 1px solid var(--rule); vertical-align: top; }
th:last-child, td:last-child { padding-right: 0; } tr:last-child td { border-bottom: 0; }
td { overflow-wrap: anywhere; } td.number, th.number { text-align: right; }
td.time, td.name { white-space: nowrap; width: 1%; }
table.ranks { table-layout: fixed; min-width: 540px; } .ranks th:first-child { width: 50px; }
tr.late td { color: var(--bad); font-weight: 600; }
summary { color: var(--soft); cursor: pointer; padding: 8px 0; }
.Warning { color: var(--bad); }
pre { white-space: pre-wrap; overflow-wrap: anywhere; font-size: 13px; margin: 10px 0 0; }
footer { margin-top: 32px; color: var(--soft); font-size: 13px; }
/* A chart shrinks with the page, and its letters with it; a long text gets the whole width. */
@media (max-width: 620px) { body { padding: 20px 12px 32px; } .tick, text.mark { font-size: 17px; }
  .wide tr { display: block; padding: 8px 0; border-bottom: 1px solid var(--rule); } .wide tr:last-child { border: 0; }
  .wide td { display: inline; border: 0; padding: 0 10px 0 0; } .wide td:last-child { display: block; }
  .wide thead { display: none; } }
"""


def build_page(run: RecordedRun, now: datetime) -> str:
    """Return the page of a run. Its Content-Security-Policy forbids external resources."""
    status = run.status
    phase = "Interrupted" if run.interrupted else status.phase or "Unknown"
    why = explain_why(run.resource, (), now)
    summary = f"{why.what} {omit_cluster_advice(why.todo)}" if run.command else str(why)
    if run.interrupted:
        summary = explain_interruption(run.resource, status, run.command)
    last_failure = status.last_failure
    if last_failure is not None and run.command:
        last_failure = replace(last_failure, hint=omit_cluster_advice(last_failure.hint))
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
        ("nodes", str(status.attempt_nodes) if status.attempt_nodes else None),
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
    hint = f"<p><b>What to do:</b> {escape(failure.hint)}</p>" if failure.hint else ""
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

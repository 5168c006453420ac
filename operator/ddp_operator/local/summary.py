"""The summary of a run: its results, where they are, and of a failure the cause and what to do."""

import os
from pathlib import Path

from ddp_operator.api.status import LastFailure, Status
from ddp_operator.failures.text import describe_detail, describe_end, describe_place
from ddp_operator.local.folder import RunFolder, choose_rate, read_rows
from ddp_operator.progress import format_duration

_TRACEBACK_LINES = 15


def describe_run(name: str, status: Status, folder: RunFolder, *, seconds: float, interrupted: bool) -> str:
    """Return the summary as text."""
    outcome = "Interrupted" if interrupted else status.phase or "Unknown"
    attempts = f"{status.attempt} attempt{'s' if status.attempt != 1 else ''}"
    lines = [f"{name}: {outcome} after {format_duration(seconds)} ({attempts}, {_restarts(status)})"]
    lines += _results(status, folder)
    lines += [f"  warning:    {c.message}" for c in status.conditions if (c.type, c.status) == ("Distributed", "False")]
    if status.phase != "Succeeded":
        lines += _explain(status, folder)
    lines.append(f"  run folder: {_relative(folder.path)}")
    kept = ["status.yaml", "metrics.csv", "logs", "events.log", "errors.log"]
    lines.append(
        "  in it:      " + ", ".join(n + ("/" if n == "logs" else "") for n in kept if (folder.path / n).exists())
    )
    if folder.report.exists():
        lines.append(f"  report:     {_relative(folder.report)} (open it in a browser)")
    return "\n".join(lines)


def _restarts(status: Status) -> str:
    total = status.restarts.all
    return "no restarts" if not total else f"{total} restart{'s' if total != 1 else ''}"


def _results(status: Status, folder: RunFolder) -> list[str]:
    lines = []
    p = status.progress
    if p is not None:
        parts = [
            (p.val_accuracy, f"validation accuracy {p.val_accuracy}"),
            (p.loss, f"loss {p.loss}"),
            (p.epoch, f"epoch {p.epoch}" + (f" of {p.epochs}" if p.epochs else "")),
            (p.step, f"step {p.step}"),
        ]
        lines.append("  " + ", ".join(text for known, text in parts if known is not None))
    rows = read_rows(folder.metrics) if folder.metrics.exists() else []
    column, unit = choose_rate(rows)
    rates = [row[column] for row in rows if row.get(column, 0.0) > 0]
    if rates:
        mean, best = (f"{rate:,.0f}" if rate >= 10 else f"{rate:.2g}" for rate in (sum(rates) / len(rates), max(rates)))
        lines.append(f"  throughput: {mean} {unit} on average, {best} at best")
    return lines


def _explain(status: Status, folder: RunFolder) -> list[str]:
    failure = status.last_failure
    lines = []
    for condition in status.conditions:
        if (condition.type, condition.status) in (("Failed", "True"), ("Accepted", "False")):
            text = describe_end(condition, failure) if condition.type == "Failed" else condition.message
            lines += [f"  {condition.reason}: {text}"] if text else []
    return lines + _describe(failure, folder) if failure is not None else lines


def _describe(failure: LastFailure, folder: RunFolder) -> list[str]:
    message = describe_detail(failure).replace("\n", "\n              ")
    lines = [
        f"  cause:      {failure.category}: {message}",
        f"  where:      {describe_place(failure)}, attempt {failure.attempt}",
    ]
    if failure.traceback:
        tail = failure.traceback.rstrip().splitlines()[-_TRACEBACK_LINES:]
        # Of a rank that left no exception, the launcher has its last lines instead.
        head = "traceback" if any('  File "' in line for line in tail) else "last lines"
        lines += [f"  {head}:", *(f"    {line}" for line in tail)]
    if failure.hint:
        lines.append(f"  hint:       {failure.hint}")
    log = folder.logs / f"attempt-{failure.attempt}-pod-{failure.node}.log"
    if log.exists():
        lines.append(f"  log:        {_relative(log)}")
    return lines


def _relative(path: Path) -> str:
    """Return a path as short as a reader can use it."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative

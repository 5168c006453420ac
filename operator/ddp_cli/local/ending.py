"""Describe the end of a run, also of one whose `ddp run` was killed.

The record of such a run ends while the job is Running. Commands that read it find out that no process holds its lock,
and complete it in memory.
"""

import os
import signal
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

import msgspec

from ddp_cli.local.folder import STATUS_FILE, RunFolder, choose_rate
from ddp_cli.local.screen import count
from ddp_cli.view.failures import describe_end, describe_place
from ddp_cli.view.why import REMEDIES, describe_stragglers, omit_cluster_advice
from ddp_operator.api.display_texts import format_duration
from ddp_operator.api.errors import InvalidManifest
from ddp_operator.api.job import DDPTrainingJob
from ddp_operator.api.parse import parse_resource, parse_status
from ddp_operator.api.resources import claim_of
from ddp_operator.api.status import ENDED_PHASES, LastFailure, Status
from ddp_operator.decide import conditions as c
from ddp_operator.decide import other_reasons
from ddp_operator.decide.attempts import fail
from ddp_operator.decide.claims import name_claim
from ddp_operator.decide.doubts import find_doubts
from ddp_operator.decide.failures import describe_detail
from ddp_operator.decide.pace import drop_eta
from ddp_operator.decide.state import Observation, State
from ddp_operator.features import SCHEMA

_TRACEBACK_LINES = 15
_SIGNAL_NAMES = {
    signal.SIGINT: "Ctrl-C",
    signal.SIGHUP: "SIGHUP (its terminal was closed; nohup, setsid or tmux keeps a run)",
}


def describe_run(name: str, status: Status, folder: RunFolder, *, seconds: float, interrupted: bool) -> str:
    """Return the summary as text."""
    doubts = find_doubts(status)
    phase = "Interrupted" if interrupted else status.phase or "Unknown"
    outcome = f"{phase} with a warning" if doubts else phase
    restarts = count(status.restarts.all, "restart") if status.restarts.all else "no restarts"
    lines = [f"{name}: {outcome} after {format_duration(seconds)} ({count(status.attempt, 'attempt')}, {restarts})"]
    lines += _results(status, folder)
    for doubt in doubts:
        lines.append(f"  warning:    {doubt.reason}: {doubt.message}")
        lines.append(f"  hint:       {omit_cluster_advice(REMEDIES[doubt.reason]).format(name=name)}")
    distributed = status.condition(c.TRAINS_AS_ONE)
    if status.phase == "Succeeded" and distributed is not None and distributed.status == "Unknown":
        lines.append(f"  note:       {distributed.message}")
    if status.phase != "Succeeded":
        lines += _explain(status, folder)
    lines.append(f"  run folder: {_relative(folder.path)}")
    names = [STATUS_FILE, "metrics.csv", "logs/", "events.log", "errors.log"]
    lines.append(f"  files:      {', '.join(name for name in names if (folder.path / name).exists())}")
    if folder.report.exists():
        lines.append(f"  report:     {_relative(folder.report)} (open it in a browser)")
    name = _relative(folder.path)
    lines.append(f"  next:       ddp logs {name}" + ("" if status.phase == "Succeeded" else f"   ddp why {name}"))
    return "\n".join(lines)


def _results(status: Status, folder: RunFolder) -> list[str]:
    lines = []
    progress = status.progress
    if progress is not None:
        epochs = f" of {progress.epochs}" if progress.epochs else ""
        parts = [
            (progress.val_accuracy, f"validation accuracy {progress.val_accuracy}"),
            (progress.loss, f"loss {progress.loss}"),
            (progress.epoch, f"epoch {progress.epoch}{epochs}"),
            (progress.step, f"step {progress.step}"),
        ]
        lines.append("  " + ", ".join(text for value, text in parts if value is not None))
    elif status.phase != "Failed":  # a failure before the first step has a remedy of its own
        hint = folder.read_step_hint(status.attempt)
        lines += [f"  progress:   {hint}"] if hint else []
    rows = folder.read_rows()
    column, unit = choose_rate(rows)
    rates = [row[column] for row in rows if row.get(column, 0.0) > 0]
    if rates:
        mean, most, last = map(_format_rate, (sum(rates) / len(rates), max(rates), rates[-1]))
        lines.append(f"  throughput: {mean} {unit} mean, {most} maximum, {last} at the end")
    slow = describe_stragglers(status)
    lines += [f"  slow rank:  {slow}"] if slow else []
    return lines


def _format_rate(rate: float) -> str:
    return f"{rate:,.0f}" if rate >= 10 else f"{rate:.2g}"


def _explain(status: Status, folder: RunFolder) -> list[str]:
    failure = status.last_failure
    lines = _describe_failure(failure, folder) if failure is not None else []
    for condition in status.conditions:
        if (condition.type, condition.status) in (("Failed", "True"), ("Accepted", "False")):
            if condition.reason == c.RESTART_BUDGET_EXHAUSTED and not status.restarts.all:
                continue  # no restart was allowed, and the cause is above
            text = describe_end(condition, failure) if condition.type == "Failed" else condition.message
            lines += [f"  {condition.reason}: {text}"] if text else []
    return lines


def _describe_failure(failure: LastFailure, folder: RunFolder) -> list[str]:
    message = describe_detail(failure).replace("\n", "\n              ")
    lines = [
        f"  cause:      {failure.category}: {message}",
        f"  where:      {describe_place(failure)}, attempt {failure.attempt}",
    ]
    if failure.traceback:
        tail = failure.traceback.rstrip().splitlines()[-_TRACEBACK_LINES:]
        # For a rank without an exception, the launcher reports its last lines instead.
        head = "traceback" if any('  File "' in line for line in tail) else "last lines"
        lines += [f"  {head}:", *(f"    {line}" for line in tail)]
    if failure.remedy:
        lines.append(f"  hint:       {omit_cluster_advice(failure.remedy)}")
    log = folder.logs / f"attempt-{failure.attempt}-pod-{failure.pod_index}.log"
    if log.exists():
        lines.append(f"  log:        {_relative(log)}")
    return lines


def _relative(path: Path) -> str:
    """Return a path relative to the current folder if it is below it."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative


def read_record(folder: RunFolder) -> dict[str, Any]:
    """Return the resource of a run, with its interruption if `ddp run` was killed. Raises: ValueError.

    It writes nothing. On another host than that of `ddp run`, whether it was killed is unknown.
    """
    resource = folder.read_status()
    if folder.in_use or not folder.was_written_here:
        return resource
    ended = datetime.fromtimestamp(folder.last_write(), UTC)
    try:
        return interrupt(resource, folder.command_line, ended) or resource
    except InvalidManifest as error:
        raise ValueError(str(error)) from None


def read_summary(folder: RunFolder) -> str:
    """Return the summary of a run that has ended, or of one that was killed; empty for others. Raises: ValueError."""
    try:
        return folder.read(folder.summary).rstrip()
    except OSError:
        resource = read_record(folder)
    status = parse_status(resource)
    failed = status.condition(c.FAILED)
    if folder.in_use or failed is None or failed.reason != other_reasons.INTERRUPTED:
        return ""
    end = status.completion_time or status.start_time
    seconds = (end - status.start_time).total_seconds() if end and status.start_time else 0.0
    return describe_run(resource["metadata"]["name"], status, folder, seconds=seconds, interrupted=True)


def interrupt(
    resource: Mapping[str, Any], command: str, now: datetime, *, number: int | None = None
) -> dict[str, Any] | None:
    """Return the resource with the status of an interrupted job; None: the job had ended.

    ``number``: the signal that stopped `ddp run`; None: `ddp run` was killed. Raises: InvalidManifest.
    """
    job = parse_resource(resource, SCHEMA)
    if job.status.phase in ENDED_PHASES:
        return None
    message = explain_interruption(resource, job.status, command, number=number)
    return {**resource, "status": build_failed_status(job, other_reasons.INTERRUPTED, message, now)}


def build_failed_status(job: DDPTrainingJob, reason: str, message: str, now: datetime) -> dict[str, Any]:
    """Return the status of a job that ends without a pass, so that no feature completes it."""
    status = fail(State(job, Observation(), now), None, reason, message).status
    status = msgspec.structs.replace(status, progress=drop_eta(status.progress))
    return cast(dict[str, Any], msgspec.to_builtins(c.summarize(status, job.spec)))


def _describe_obstacle(status: Status) -> str:
    """Return what kept the job from training, in parentheses; empty if nothing did."""
    obstacle = c.find_obstacle(status)
    if obstacle is None or not obstacle.message:
        return ""
    # The last page may have a step that the conditions of the last pass do not know.
    waits_for_step = obstacle.type in (c.RENDEZVOUSED, c.PROGRESSING)
    if waits_for_step and obstacle.reason != other_reasons.STALLED and status.progress is not None:
        return ""
    return f" ({obstacle.reason}: {obstacle.message})"


def explain_interruption(
    resource: Mapping[str, Any], status: Status, command: str, *, number: int | None = None
) -> str:
    """Return that the run was interrupted, and how to resume it. ``number``: as in ``interrupt``."""
    failed = status.condition(c.FAILED)
    if failed is not None and failed.reason == other_reasons.INTERRUPTED:
        return failed.message
    if number is None:
        event = "`ddp run` was killed"
    else:
        event = f"stopped by {_SIGNAL_NAMES.get(signal.Signals(number)) or signal.Signals(number).name}"
    event += f" while the job was {status.phase or 'Pending'}{_describe_obstacle(status)}."
    claim = claim_of(resource)
    if claim and status.checkpoint is not None:
        remedy = f"Resume from the checkpoint of step {status.checkpoint.step} on {name_claim(claim)} with:"
    elif claim:
        remedy = f"No checkpoint was reported. The job resumes from {name_claim(claim)} if it has one. Start it with:"
    else:
        remedy = "spec.checkpoint is not set, so only the script knows whether it saved a checkpoint. Start it with:"
    return f"{event} {remedy} {command or 'ddp run FILE'}"

"""The termination message, and how a pod ended."""

import json
import os
import time
from typing import Any

from .contract import (
    ENV_TERMINATION_LOG,
    EXIT_OK,
    EXIT_PREEMPTED,
    EXIT_RETRYABLE,
    EXIT_USER_ERROR,
    TERMINATION_MESSAGE_LIMIT,
)
from .failure import (
    STORE_PROBLEMS,
    add_last_lines,
    build_signature,
    describe_failure,
    ended_silently,
    examine_agent,
    find_root_cause,
    read_errors,
)
from .failure_table import EXIT_CODES, NETWORK, Outcome, format_failure
from .files import log
from .metrics import MetricsEndpoint
from .pod import Pod, measure_groups
from .restarts import Restarts

_LAST_FAILURE_LIMIT = 1500  # bytes, of those that a termination message may have
_PLACES = (("rank", "rank"), ("local rank", "localRank"), ("pod", "node"), ("exit code", "exitCode"))


def fit_termination_message(message: dict[str, Any], limit: int = TERMINATION_MESSAGE_LIMIT) -> bytes:
    """Return the message as JSON of at most ``limit`` bytes: the traceback loses its head, then texts their tail."""
    message = dict(message)
    for field, keep_tail in (("traceback", True), ("progress", False), ("message", False), ("hint", False)):
        while True:
            text = json.dumps(message, ensure_ascii=False, allow_nan=False).encode("utf-8", "replace")
            if len(text) <= limit:
                return text
            value = message.get(field)
            if not isinstance(value, str):
                message[field] = {} if field == "progress" else ""
                break
            if not value:
                break
            room = max(0, len(value) - max(1, (len(text) - limit) // 6))
            message[field] = value[len(value) - room :] if keep_tail else value[:room]
    return json.dumps({"version": 1, "category": message["category"]}).encode()


def build_message(outcome: Outcome, report: dict[str, Any]) -> dict[str, Any]:
    """Return a failure as a termination message has it."""
    return {"version": 1, "category": outcome.category, **report, "secondary": outcome.secondary}


def finish(outcome: Outcome, report: dict[str, Any]) -> int:
    """Write the termination message and the last lines of the log. Returns the launcher's exit code."""
    message = build_message(outcome, report)
    path = os.environ.get(ENV_TERMINATION_LOG)
    if path:
        try:
            with open(path, "wb") as file:  # in place: it is a bind mount
                file.write(fit_termination_message(message))
        except OSError as error:
            log(f"cannot write {path}: {error.strerror}")
    if outcome.exit_code != EXIT_OK:
        place = [(name, report[key]) for name, key in _PLACES]
        lines = [f"---- {format_failure(outcome.category, place, report['message'])}"]
        lines.append(f"this pod's exit code {outcome.exit_code}; restarts in the same pods: {report['restarts']}")
        if outcome.secondary:
            lines.append("a secondary failure: another rank's explains it")
        if report["repeated"]:
            lines.append(f"the same {report['signature']} twice without progress in between: not tried again")
        log("\n".join([*lines, *([f"what to do: {report['hint']}"] if report["hint"] else [])]))
    return outcome.exit_code


def build_report(**known: Any) -> dict[str, Any]:
    """Return what a termination message says beside the outcome; what is not known is empty."""
    place = dict.fromkeys(("rank", "localRank", "node", "step"))
    text = dict.fromkeys(("message", "hint", "traceback", "signature"), "")
    return {**place, **text, "time": time.time(), "restarts": 0, "repeated": False, "progress": {}, **known}


def report_worker(
    pod: Pod, failure: dict[str, Any], restarts: Restarts, metrics: MetricsEndpoint, progress: dict[str, float]
) -> dict[str, Any]:
    """Return the report of a failed worker."""
    return build_report(
        exitCode=_as_of_shell(failure["exitCode"]),
        node=pod.node,
        message=describe_failure(failure),
        hint=failure["remedy"],
        restarts=restarts.count,
        signature=build_signature(failure),
        step=metrics.step(failure["localRank"]) if restarts.failed_step is None else restarts.failed_step,
        progress=progress,
        **{key: failure[key] for key in ("rank", "localRank", "traceback", "time")},
    )


def conclude(
    pod: Pod,
    result: dict[str, Any],
    status: int,
    restarts: Restarts,
    metrics: MetricsEndpoint,
    *,
    stopped: bool,
    final: list[dict[str, Any]],
    unsaved: str = "",
    uploads: dict[str, float],
) -> int:
    """Write the termination message and the last lines of the log. Returns the exit code.

    ``result`` is the agent's own report and ``status`` how its process ended; ``final`` are failures of workers that
    had decided the end before the pod was asked to stop; ``unsaved`` is what ``checkpoint.url`` lacks, and ``uploads``
    are the series of what it has.
    """
    progress = {**metrics.progress(), **uploads}
    of_pod = build_report(exitCode=EXIT_OK, node=pod.node, restarts=restarts.count, progress=progress)
    ended = result.get("result")
    if pod.elastic and result.get("type") == "RendezvousClosedError":
        log("training has ended without this pod")
        ended = "ok"
    if ended == "ok" and unsaved:  # which the pod takes with it
        message = f"training has succeeded, but {unsaved}"
        hint = "the next attempt goes on from the newest snapshot; see why the store does not answer"
        of_pod.update(message=message, hint=hint, exitCode=EXIT_RETRYABLE)
        return finish(Outcome(NETWORK.name, EXIT_RETRYABLE), of_pod)
    if ended == "ok":
        if metrics.last_failure:  # for who has not looked at the page since
            last = fit_termination_message(json.loads(metrics.last_failure), _LAST_FAILURE_LIMIT)
            of_pod["lastFailure"] = last.decode()
        return finish(Outcome("", EXIT_OK), {**of_pod, **measure_groups(pod)})
    if stopped and not final and result.get("type") not in STORE_PROBLEMS:
        message = "asked to stop by a signal" + (f"; {unsaved}" if unsaved else "")
        of_pod.update(message=message, exitCode=EXIT_PREEMPTED)
        return finish(EXIT_CODES[EXIT_PREEMPTED], of_pod)
    # Without a word of the agent about its workers, it lost its store before it saw how they ended.
    failures = final or restarts.failures or read_errors(pod)
    if failures and result.get("type") not in STORE_PROBLEMS:
        failure = find_root_cause(failures)
        if not failure["traceback"] or ended_silently(failure):
            failure = add_last_lines(pod, failure)
        outcome = failure["outcome"]
        of_worker = report_worker(pod, failure, restarts, metrics, progress)
        if restarts.repeated and of_worker["signature"]:
            of_worker["repeated"] = True
            outcome = outcome._replace(exit_code=EXIT_USER_ERROR)
        return finish(outcome, of_worker)
    outcome, message, hint = examine_agent(pod, result, status)
    if restarts.reason:
        message += f"; the last restart was because of: {restarts.reason}"
    # An agent that the launcher itself has ended says nothing by how it ended.
    by_launcher = result.get("type") in ("MasterNotFound", *STORE_PROBLEMS)
    code = outcome.exit_code if by_launcher else _as_of_shell(status or 1)
    of_pod.update(message=message, hint=hint, traceback=result.get("traceback", ""), exitCode=code)
    return finish(outcome, of_pod)


def _as_of_shell(code: int) -> int:
    """Return an exit code as a shell has it: 128 and the signal by which a process died."""
    return code if code >= 0 else 128 - code

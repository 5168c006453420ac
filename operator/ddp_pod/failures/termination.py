"""The end of a pod: its failure, the termination message, and the last lines of its log."""

import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, TypeVar

from ..base.files import log
from ..base.pod import Pod
from ..base.service import Conclusion
from ..contract.failure_record import EVIDENCE_EXIT_CODE, Failure, RankEnd
from ..contract.failure_table import EXIT_CODES, NETWORK
from ..contract.failure_text import format_failure
from ..contract.names import (
    ENV_TERMINATION_LOG,
    EXIT_OK,
    EXIT_PREEMPTED,
    EXIT_RETRYABLE,
    EXIT_USER_ERROR,
    TERMINATION_MESSAGE_LIMIT,
)
from ..contract.pod_end import PodEnd
from ..contract.records import to_json
from ..progress.rank_progress import RankReader, complete_progress
from .agent_failure import MASTER_NOT_FOUND, RENDEZVOUS_CLOSED, STORE_PROBLEMS, AgentEnd, examine_agent_exit
from .rank_ends import RemainingProcess, examine_rank_ends
from .restarts import InPlaceRestarts
from .text import UPLOAD_REMEDY
from .worker_failure import (
    add_last_lines,
    find_root_cause,
    is_bare_exit,
    read_recorded_failures,
    to_shell_exit_code,
)

MESSAGE_VERSION: Final = 2
_NESTED_LIMIT: Final = 1500  # bytes of a failure within a termination message
# Reasons for which the launcher itself ended the agent, whose exit code then has no meaning.
_ENDED_BY_LAUNCHER: Final = (MASTER_NOT_FOUND, *STORE_PROBLEMS)
AnyFailure = TypeVar("AnyFailure", bound=Failure)


def finish(end: PodEnd) -> int:
    """Write the termination message and the last lines of the log. Returns the exit code."""
    path = os.environ.get(ENV_TERMINATION_LOG)
    if path:
        try:
            with open(path, "wb") as file:  # in place: it is a bind mount
                file.write(encode_end(end))
        except OSError as error:
            log(f"cannot write {path}: {error.strerror}")
    if end.container_exit_code != EXIT_OK:
        log("\n".join(_describe_end(end)))
    return end.container_exit_code


def build_end(pod_index: int, exit_code: int, message: str, *, remedy: str = "", traceback: str = "") -> PodEnd:
    """Return the end of a pod without a failure of its workers. ``exit_code``: one of the launcher's."""
    outcome = EXIT_CODES[exit_code]
    return PodEnd(
        category=outcome.category,
        container_exit_code=outcome.exit_code,
        secondary=outcome.secondary,
        pod_index=pod_index,
        exit_code=exit_code,
        message=message,
        traceback=traceback,
        remedy=remedy,
        time=time.time(),
    )


def _describe_end(failure: Failure) -> list[str]:
    places = (
        ("rank", failure.rank),
        ("local rank", failure.local_rank),
        ("pod", failure.pod_index),
        ("exit code", failure.exit_code),
    )
    lines = [
        f"---- {format_failure(failure.category, places, failure.message)}",
        f"this pod's exit code: {failure.container_exit_code}; restarts in the same pods: {failure.restarts}",
    ]
    if failure.secondary:
        lines.append("secondary failure: another rank's failure caused it")
    if failure.repeated:
        lines.append(f"not restarted: {failure.signature} occurred twice without progress in between")
    if failure.remedy:
        lines.append(f"what to do: {failure.remedy}")
    return lines


def complete_worker_failure(failure: Failure, restarts: InPlaceRestarts, reader: RankReader) -> Failure:
    """Return the failure of a worker with the pod's restarts and the step that it had reached."""
    step = restarts.failed_step
    if step is None:
        step = reader.step(failure.local_rank or 0)
    return replace(failure, restarts=restarts.count, step=step)


def conclude(
    pod: Pod,
    end: AgentEnd,
    status: int,
    restarts: InPlaceRestarts,
    reader: RankReader,
    conclusion: Conclusion,
    *,
    stopped: bool,
    final: Sequence[Failure],
    remaining: Mapping[int, Sequence[RemainingProcess]],
    finished: bool = False,
    awaited: Failure | None = None,
) -> int:
    """Write the termination message and the last lines of the log. Returns the exit code.

    ``end`` is the agent's own report and ``status`` the end of its process; ``conclusion``: of the services; ``final``
    are failures of workers that had decided the end before the pod was asked to stop; ``remaining`` are the processes
    of each local rank that still ran when its program ended; ``finished``: all ranks of this pod have exited with 0;
    ``awaited``: the failure of a rank outside of collectives, if it may explain those of its peers.
    """
    progress = reader.progress()
    unsaved = conclusion.unsaved
    succeeded = end.result == "ok"
    if pod.elastic and end.reason == RENDEZVOUS_CLOSED:
        log("training ended without this pod")
        succeeded = True
    own = Failure(pod_index=pod.node, exit_code=EXIT_OK, time=time.time(), restarts=restarts.count)
    if succeeded and unsaved:
        return finish(
            PodEnd(**vars(_build_unsaved_failure(own, unsaved)), progress=progress, uploads=conclusion.uploads)
        )
    if succeeded:
        pod_end = PodEnd(
            **vars(own),
            progress=None if progress is None else complete_progress(progress),
            uploads=conclusion.uploads,
            groups=conclusion.groups,
            last_failure=restarts.last_failure,  # for an operator that has not read the report since
            ends=examine_rank_ends(pod, reader, remaining) if end.result == "ok" else (),
        )
        return finish(pod_end)

    has_store_problem = end.reason in STORE_PROBLEMS
    # An agent that lost its store may have ended before it reported the failures of its workers.
    if end.interrupted:  # the ranks may have agreed to end before this pod was asked to stop as well
        final = [failure for failure in final if not is_bare_exit(failure)]
    failures = final or restarts.failures or read_recorded_failures(pod)
    ends: tuple[RankEnd, ...] = ()
    if stopped and not final and not has_store_problem:
        failure = _build_stop_failure(own, unsaved)
        ends = examine_rank_ends(pod, reader, remaining) if finished else ()
    elif failures and not has_store_problem:
        failure = _build_worker_failure(pod, failures, restarts, reader)
        failed = {worker.rank for worker in failures}
        examined = examine_rank_ends(pod, reader, remaining)
        ends = tuple(rank_end for rank_end in examined if rank_end.rank not in failed and rank_end.exception)
    else:
        failure = _build_agent_failure(pod, end, status, restarts)
    awaited = None if awaited is None else replace(awaited, exit_code=None)  # it is alive
    return finish(PodEnd(**vars(failure), progress=progress, uploads=conclusion.uploads, ends=ends, awaited=awaited))


def _build_unsaved_failure(own: Failure, unsaved: str) -> Failure:
    return replace(
        own,
        category=NETWORK.name,
        container_exit_code=EXIT_RETRYABLE,
        exit_code=EXIT_RETRYABLE,
        message=f"training succeeded, but {unsaved}",
        remedy=UPLOAD_REMEDY,
    )


def _build_stop_failure(own: Failure, unsaved: str) -> Failure:
    return replace(
        own,
        category=EXIT_CODES[EXIT_PREEMPTED].category,
        container_exit_code=EXIT_PREEMPTED,
        exit_code=EXIT_PREEMPTED,
        message="asked to stop by a signal" + (f"; {unsaved}" if unsaved else ""),
    )


def _build_worker_failure(
    pod: Pod, failures: Sequence[Failure], restarts: InPlaceRestarts, reader: RankReader
) -> Failure:
    root_cause = find_root_cause(failures)
    is_local = root_cause.local_rank is not None
    if is_local and (not root_cause.traceback or root_cause.evidence == EVIDENCE_EXIT_CODE):
        root_cause = add_last_lines(pod, root_cause)
    failure = complete_worker_failure(root_cause, restarts, reader)
    if restarts.repeated and failure.signature:
        failure = replace(failure, repeated=True, container_exit_code=EXIT_USER_ERROR)
    return failure


def _build_agent_failure(pod: Pod, end: AgentEnd, status: int, restarts: InPlaceRestarts) -> Failure:
    failure = end.failure or examine_agent_exit(pod, status)
    message = failure.message
    if restarts.reason:
        message += f"; reason of the last restart: {restarts.reason}"
    exit_code = to_shell_exit_code(status or 1)
    if end.reason in _ENDED_BY_LAUNCHER:
        exit_code = failure.container_exit_code
    return replace(failure, message=message, exit_code=exit_code, restarts=restarts.count)


def encode_end(end: PodEnd, limit: int = TERMINATION_MESSAGE_LIMIT) -> bytes:
    """Return a termination message: JSON of at most ``limit`` bytes.

    Where it is too long, the traceback loses its beginning, and the message and the remedy their ends.
    """
    nested: dict[str, Any] = {
        name: shorten_failure(failure, _NESTED_LIMIT)
        for name in ("last_failure", "awaited")
        if (failure := getattr(end, name)) is not None
    }
    shortened = shorten_failure(replace(end, **nested), limit)
    message = _encode(shortened)
    if len(message) > limit:
        message = _encode(Failure(end.category, container_exit_code=end.container_exit_code))
    return message


def shorten_failure(failure: AnyFailure, limit: int) -> AnyFailure:
    """Return a failure whose JSON has at most ``limit`` bytes, unless its other members are longer."""
    for name in ("traceback", "progress", "message", "remedy"):
        excess = len(_encode(failure)) - limit
        value = getattr(failure, name, None)
        while excess > 0 and value:
            if isinstance(value, str):
                room = max(0, len(value) - max(1, excess // 6))  # JSON writes a character as up to six bytes
                value = value[len(value) - room :] if name == "traceback" else value[:room]
            else:
                value = None
            changes: dict[str, Any] = {name: value}
            failure = replace(failure, **changes)
            excess = len(_encode(failure)) - limit
    return failure


def _encode(failure: Failure) -> bytes:
    members = {"version": MESSAGE_VERSION, "category": failure.category, **to_json(failure)}
    return json.dumps(members, ensure_ascii=False, allow_nan=False).encode("utf-8", "replace")

"""Failures of workers: read a worker's error file, classify it once, and find the root cause among several.

A worker's exception is in its error file (``tracebacks.record_exception``); torchrun reports its exit code.
"""

import errno
import itertools
import math
import os
import re
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final, NamedTuple

from ..base.exceptions import (
    LIBRARY,
    PLACE,
    EndedChild,
    ExceptionFacts,
    FailingCode,
    find_exceptions,
    find_native_exception,
    parse_chain,
    shorten_message,
)
from ..base.files import LOCAL_TYPES, read_json
from ..base.pod import Pod, list_workers, read_worker
from ..base.runtime_files import CHILD_ERROR, OWN_END, SHELL_END
from ..contract.failure_record import (
    EVIDENCE_ERROR,
    EVIDENCE_EXIT_CODE,
    EVIDENCE_STOPPED,
    EVIDENCE_TIMEOUT,
    TYPE_LIMIT,
    Failure,
    RankEnd,
    order_causes,
)
from ..contract.failure_table import (
    CATEGORIES,
    CUDA,
    EXIT_CODES,
    HANG,
    KILLED,
    NETWORK,
    NODE_FAULT,
    OOM,
    SIGNIFICANT_SECONDS,
    UNKNOWN,
    USER_ERROR,
    Outcome,
)
from ..contract.names import EXIT_HANG, EXIT_OK, EXIT_PEER_LOST, EXIT_PREEMPTED, EXIT_RETRYABLE, EXIT_USER_ERROR
from ..contract.processes import STOP_SIGNALS, count_oom_kills
from ..progress.output_ends import SECONDS_TO_KEEP, read_end, read_last_lines
from ..rank.end_notes import OwnEnd, note_path, read_own_ends, read_shell_end
from .collective_places import find_main_stack, find_place, find_timed_stack, is_wait
from .crashes import (
    CRASH_REMEDY,
    RECURSION_REMEDY,
    SIGNALS,
    BusError,
    CrashReport,
    explain_bus_error,
    is_complete,
    read_crash,
)
from .crashes import SHARED_MEMORY as SHARED_MEMORY_FOLDER
from .kinds import (
    FATAL,
    FULL_VOLUME,
    HELPER,
    MISMATCH,
    OTHER_SIZES,
    SCRIPT_ERROR,
    SHARED_MEMORY,
    UNKNOWN_KIND,
    FailureKind,
)
from .mistakes import recurs
from .rank_ends import PrintedTraceback, find_dead_helper
from .rules import Judgement, WorkerEnd, complete_facts, find_kind, judge, list_exceptions
from .text import (
    EARLY_EXIT_REMEDY,
    OWN_LIMIT_REMEDY,
    SHELL_END_REMEDY,
    advise,
    advise_on_output,
    advise_on_own_end,
    describe_early_exit,
    describe_exit,
    describe_own_end,
    describe_worker_failure,
    find_refusal,
    find_signal,
    is_native_crash,
    is_setup_mistake,
)

_CALL: Final = re.compile(
    r"Rank (\d+) is running collective: CollectiveFingerPrint\(.*?OpType=(\w+)(?:, TensorShape=(\[[^\]]*\]))?"
)
# torch copies the traceback of a helper process into the message of another exception.
_HELPER: Final = re.compile(
    r"Caught \S+ in (?P<helper>.*?)\.?\nOriginal Traceback"
    r"|-- (?P<process>Process \d+) terminated with the following error:\nTraceback"
    r"|Traceback \(most recent call last\): \((?P<rank>RANK \d+)\)"
)
HELPER_ENDED: Final = "the end of a helper process"
"""The signature of what a rank notices some steps later, by different exceptions and at whatever line it is."""
_CAUSE_LIMIT: Final = 300  # characters of another exception of the chain in the message
_CHAIN_LIMIT: Final = 16
_MOUNTS: Final = "/proc/self/mounts"
_MOST_MOUNTS: Final = 1000
_SECONDS_FOR_REPORT: Final = 3.0
_SECONDS_TO_BEGIN: Final = SECONDS_TO_KEEP + 0.5  # until the first line of a report is in the file
_MIB: Final = 1 << 20
_TRACEBACK_START: Final = "Traceback (most recent call last):"


class FullVolume(NamedTuple):
    """A mounted file system without space."""

    path: str
    description: str


class EndedPeers(NamedTuple):
    """Peers that had ended with exit code 0 when a worker failed: ranks of this pod, or whole other pods.

    ``first``: the one that ended first; None: none had ended. ``pods``: how many other pods had; ``total``: all.
    """

    first: RankEnd | None = None
    pods: int = 0
    total: int = 0


_NO_PEERS: Final = EndedPeers()


def examine_worker(pod: Pod, reported: WorkerEnd, ended_peers: EndedPeers = _NO_PEERS) -> Failure:
    """Return the classified failure of a worker, from torchrun's report and the worker's error file."""
    path = _error_file(pod, reported.local_rank)
    return _build_failure(pod, complete_worker_end(reported, read_json(path)), ended_peers)


def complete_worker_end(reported: WorkerEnd, error: Mapping[str, Any]) -> WorkerEnd:
    """Return torchrun's report completed by the content of the worker's error file, which may be anything."""
    end = reported
    if isinstance(error.get("type"), str):
        end = end._replace(exception_type=error["type"])
    if isinstance(error.get("message"), str):
        end = end._replace(message=error["message"])
    if isinstance(error.get("traceback"), str):
        end = end._replace(traceback=error["traceback"])
    if isinstance(error.get("time"), (int, float)) and math.isfinite(error["time"]):
        end = end._replace(time=error["time"])
    if isinstance(error.get("place"), str):
        end = end._replace(place=error["place"])
    if isinstance(error.get("remedy"), str):
        end = end._replace(remedy=error["remedy"])
    if not end.exception_type and ": " in end.message:  # a script under @record: "ValueError: text"
        exception_type, _, message = end.message.partition(": ")
        end = end._replace(exception_type=exception_type, message=message)
    is_stopped = end.exit_code in (-signal.SIGTERM, -signal.SIGKILL)
    if is_stopped and error.get("type") and isinstance(error.get("exitCode"), int):
        end = end._replace(exit_code=error["exitCode"])  # it had failed before the agent stopped it

    exception_type, message = unwrap_helper_error(end.exception_type, end.message)
    chain = _add_remote_places(_read_chain(error.get("chain")))
    if message != end.message:
        chain = _build_helper_chain(end.message, chain)
    return end._replace(
        exception_type=exception_type,
        message=shorten_mismatch(message),
        chain=chain,
        hang_is_secondary=exception_type == HANG.name and error.get("secondary") is True,
        child=_read_child(error.get("child")),
    )


def _build_helper_chain(message: str, recorded: Sequence[ExceptionFacts]) -> list[ExceptionFacts]:
    """Return the exceptions of a helper from the message that contains them. ``recorded``: the rank's own chain."""
    chain = parse_chain(message.splitlines())
    helper = _HELPER.search(message)
    if recorded:
        chain = [facts._replace(content=recorded[0].content) for facts in chain]
    if recorded and chain and helper is not None and not helper["rank"]:  # it has sent the code that failed
        chain[0] = chain[0]._replace(failing=recorded[0].failing)
    return chain


def _add_remote_places(recorded: Sequence[ExceptionFacts]) -> list[ExceptionFacts]:
    """Return exceptions of a rank, those of a pool's process with their places and causes there, from their texts."""
    chain: list[ExceptionFacts] = []
    for facts in recorded:
        parsed = parse_chain(facts.message.splitlines()) if facts.is_remote else []
        for number, known in enumerate(chain):
            if parsed and known.types[0].endswith(parsed[0].types[0]):
                code = "" if LIBRARY.search(parsed[0].place) else parsed[0].line
                failing = known.failing if known.failing.is_known else FailingCode(code)
                chain[number] = known._replace(place=parsed[0].place, line=parsed[0].line, failing=failing)
        chain += parsed[1:] if facts.is_remote else [facts]
    return chain


def _read_child(record: Any) -> EndedChild | None:
    """Return the ended child in a worker's error file; None if there is none, or if it is malformed."""
    is_valid = isinstance(record, list) and list(map(type, record)) == [str, int]
    return EndedChild(*record) if is_valid else None


def _read_chain(records: Any) -> Sequence[ExceptionFacts]:
    """Return the chain in a worker's error file; empty if it is malformed."""
    try:
        chain = [_read_facts(record) for record in records[:_CHAIN_LIMIT]]
    except (TypeError, KeyError, AttributeError):
        return ()
    texts = [
        text
        for facts in chain
        for text in (*facts.types, *facts.hides, *facts.failing, facts.message, facts.path, facts.place, facts.line)
    ]
    return chain if all(facts.types for facts in chain) and all(isinstance(text, str) for text in texts) else ()


def _read_facts(record: Mapping[str, Any]) -> ExceptionFacts:
    """Return an exception of a chain. Raises: TypeError, KeyError, AttributeError."""
    facts = ExceptionFacts(**record)
    failing = FailingCode(*record.get("failing", ()))
    return facts._replace(types=tuple(record["types"]), hides=tuple(facts.hides), failing=failing)


def unwrap_helper_error(exception_type: str, message: str) -> tuple[str, str]:
    """Return type and message of the error in a helper process; those of any other error unchanged.

    A script that exits with such a message keeps the type SystemExit.
    """
    helper = _HELPER.search(message)
    if helper is None:
        return exception_type, message

    lines = message[helper.end() :].rstrip().splitlines()
    frames = [number for number, line in enumerate(lines) if line.startswith("  File ")]
    error_lines = lines[frames[-1] + 1 :] if frames else lines[-1:]
    while error_lines and error_lines[0].startswith("    "):
        error_lines.pop(0)

    helper_type, _, text = "\n".join(error_lines).partition(": ")
    text = f"{text} (in {helper['helper'] or helper['process'] or helper['rank']})".lstrip()
    if exception_type == "SystemExit":
        return exception_type, f"{helper_type}: {text}" if helper_type else text
    return helper_type, text


def shorten_mismatch(message: str) -> str:
    """Return torch's message about ranks in different collectives as those ranks and collectives; others unchanged."""
    calls = _CALL.findall(message)
    if not MISMATCH.search(message) or len(calls) < 2:
        return message

    descriptions = []
    for rank, operation, shape in calls:
        of_shape = f" of shape {shape}" if shape else ""
        descriptions.append(f"rank {rank} is in {operation}{of_shape}")
    return f"mismatch between collectives: {', '.join(descriptions)}"


def _build_failure(pod: Pod, end: WorkerEnd, ended_peers: EndedPeers = _NO_PEERS) -> Failure:
    oom_killed = count_oom_kills() > pod.oom_kills
    judgement = judge(end, oom_killed=oom_killed, non_retryable=pod.non_retryable_exit_codes)
    is_killed = end.child is not None and end.child.number > 0
    helper = _await_helper_error(pod, end.local_rank) if judgement.kind is HELPER and not is_killed else None
    if helper is not None:
        judgement = _judge_by_helper(judgement, helper)
    own_end = _find_own_end(pod, end, judgement) if helper is None else None
    outcome = judgement.outcome if own_end is None else _judge_own_end(pod, end, judgement.outcome, own_end)
    chain = list_exceptions(end) if helper is None else [judgement.cause]
    kind = UNKNOWN_KIND if helper is not None and judgement.kind is HELPER else judgement.kind
    if outcome == SCRIPT_ERROR and _recurs(pod, end, kind, chain):
        outcome = FATAL
    if outcome.category == HANG.name and pod.watchdog is not None and pod.watchdog.action == "Fail":
        outcome = outcome._replace(exit_code=EXIT_USER_ERROR)
    if end.hang_is_secondary:
        outcome = outcome._replace(secondary=True)

    evidence = _find_evidence(end, judgement)
    message = describe_worker_failure(end.exit_code, end.exception_type, end.message, end.traceback)
    volume = _find_full_volume(judgement)
    if volume is not None and volume.path == SHARED_MEMORY_FOLDER:
        judgement = judgement._replace(kind=SHARED_MEMORY)
    cause = judgement.cause if judgement.cause.types[0] else _find_innermost(end.chain)
    message = shorten_message(message) + _describe_cause(cause, message, volume)
    bus = explain_bus_error(pod, end.local_rank) if _find_killer(end, judgement) == signal.SIGBUS else None
    message += _describe_end(end, judgement, bus, own_end)
    left = ended_peers.first if outcome.secondary else None
    if left is not None:
        outcome = _judge_early_exit(pod, end, left)
        message = f"{describe_early_exit(left, ended_peers.total, f'rank {end.rank}')}: {message}"
        remedy = EARLY_EXIT_REMEDY
    elif bus is not None:
        remedy = bus.remedy
    elif own_end is not None:
        remedy = advise_on_own_end(own_end)
    else:
        only_exit_code = evidence == EVIDENCE_EXIT_CODE
        remedy = end.remedy or advise(judgement, end, only_exit_code=only_exit_code, code=pod.code)
    failure = Failure(
        category=outcome.category,
        container_exit_code=outcome.exit_code,
        secondary=outcome.secondary,
        rank=end.rank,
        local_rank=end.local_rank,
        pod_index=pod.node,
        exit_code=to_shell_exit_code(end.exit_code),
        exception_type=end.exception_type[:TYPE_LIMIT],
        message=message,
        traceback=end.traceback,
        remedy=remedy,
        time=end.time,
        signature=_sign(end, outcome, judgement.kind, own_end),
        evidence=evidence,
    )
    return failure if left is None else _attribute_to(left, pod, failure)


def _find_own_end(pod: Pod, end: WorkerEnd, judgement: Judgement) -> OwnEnd | None:
    """Return the call of the script that has ended a rank, or its helper, or that set the timer which did."""
    ends = read_own_ends(note_path(pod.runtime, end.local_rank, OWN_END))
    worker = read_worker(pod, end.local_rank) if ends else None
    if worker is None:
        return None
    if judgement.kind is HELPER:
        codes = [to_shell_exit_code(end.child.exit_code)] if end.child is not None else list(ends)
        others = [own for code, own in ends.items() if code in codes and own.pid != worker.pid]
        return others[0] if len(others) == 1 else None
    own = None if end.exception_type else ends.get(to_shell_exit_code(end.exit_code))
    # A shell ends with the code of a process that it has started.
    return own if own is not None and (own.pid == worker.pid or worker.kind == "program") else None


def _judge_own_end(pod: Pod, end: WorkerEnd, outcome: Outcome, own: OwnEnd) -> Outcome:
    """Return what follows from an end by the script itself.

    A timer that counts CPU time runs out again within minutes; an alarm may guard what takes its time outside. A
    signal that it sends is judged like one from elsewhere: tests of a recovery kill a rank so.
    """
    is_vague = outcome.exit_code == EXIT_RETRYABLE and outcome.category in (UNKNOWN.name, KILLED.name, USER_ERROR.name)
    sends_signal = end.exit_code < 0 and not own.is_timer
    if end.stopped or not is_vague or sends_signal or end.exit_code in EXIT_CODES:
        return outcome
    counts_cpu = own.is_timer and end.exit_code != -signal.SIGALRM
    return FATAL if counts_cpu and _measure_run(pod, end) < SIGNIFICANT_SECONDS else SCRIPT_ERROR


def _sign(end: WorkerEnd, outcome: Outcome, kind: FailureKind, own: OwnEnd | None) -> str:
    if own is None or kind is HELPER or outcome.category != USER_ERROR.name:
        return build_signature(end, outcome, kind)
    return f"{own.call} at {own.place}"[:TYPE_LIMIT]


def _judge_early_exit(pod: Pod, end: WorkerEnd, left: RankEnd) -> Outcome:
    """Return what follows from a rank that left its peers. After hours, leaving the loop may depend on times."""
    is_young = _measure_run(pod, end) < SIGNIFICANT_SECONDS
    return FATAL if is_young and not left.exception else SCRIPT_ERROR


def build_early_exit(pod: Pod, left: RankEnd, victim: str) -> Failure:
    """Return the failure of a rank of this pod that exited with 0, whereupon the ranks of other pods lost a peer.

    ``victim``: such a pod, as ``pod 0``.
    """
    local_rank = left.rank - pod.node * pod.nproc_per_node
    end = WorkerEnd(EXIT_OK, time=time.time(), rank=left.rank, local_rank=local_rank)
    outcome = _judge_early_exit(pod, end, left)
    return Failure(
        category=outcome.category,
        container_exit_code=outcome.exit_code,
        rank=left.rank,
        local_rank=local_rank,
        pod_index=pod.node,
        exit_code=EXIT_OK,
        message=describe_early_exit(left, 1, victim),
        remedy=EARLY_EXIT_REMEDY,
        time=end.time,
        evidence=EVIDENCE_ERROR,
    )


def _await_helper_error(pod: Pod, local_rank: int) -> PrintedTraceback | None:
    """Return the exception that ended a helper process of a rank, whose lines may just arrive; None: none is known."""
    deadline = time.monotonic() + _SECONDS_TO_BEGIN
    while True:
        output = read_end(pod, local_rank)
        helper = find_dead_helper(output)
        if helper is not None or not output or time.monotonic() > deadline:
            return helper
        time.sleep(0.05)


def _judge_by_helper(judgement: Judgement, helper: PrintedTraceback) -> Judgement:
    """Return the kind of failure by the exception that ended a helper process."""
    facts = complete_facts(ExceptionFacts((helper.exception_type,), helper.message))
    return find_kind([facts]) or judgement._replace(cause=facts)


def _find_killer(end: WorkerEnd, judgement: Judgement) -> int:
    """Return the signal that killed a rank, or the helper process for which it waited; 0 if none did."""
    if judgement.kind is HELPER and end.child is not None:
        return end.child.number
    return 0 if end.exception_type else find_signal(end.exit_code)


def _describe_end(end: WorkerEnd, judgement: Judgement, bus: BusError | None, own: OwnEnd | None) -> str:
    """Describe the end of a helper process of a rank, or the bus error or the call of the script that ended a rank."""
    note = f": {bus.note}" if bus is not None else f": {describe_own_end(own)}" if own is not None else ""
    if judgement.kind is not HELPER or end.child is None:
        return note
    verb = "was " if end.child.number else ""
    return f" (its process {end.child.name} {verb}{describe_exit(end.child.exit_code)}{note})"


def _recurs(pod: Pod, end: WorkerEnd, kind: FailureKind, chain: Sequence[ExceptionFacts]) -> bool:
    """Return whether each attempt would end in the same way. ``chain``: of the rank, or of the helper that ended."""
    if not end.exception_type:
        return False
    return recurs(kind, chain, lasted=_measure_run(pod, end), elastic=pod.elastic)


def _measure_run(pod: Pod, end: WorkerEnd) -> float:
    """Return for how many seconds a rank has run; infinite if that is unknown."""
    try:
        started = [worker.started for worker in list_workers(pod) if worker.local_rank == end.local_rank]
    except OSError:
        return math.inf
    return (end.time or time.time()) - started[0] if started else math.inf


def _attribute_to(left: RankEnd, pod: Pod, failure: Failure) -> Failure:
    """Return a rank's failure as that of the peer which had left it. The victim's traceback would mislead."""
    node = pod.node if left.pod is None else left.pod
    is_own = node == pod.node
    local_rank = left.rank - pod.node * pod.nproc_per_node if is_own else None
    return replace(failure, rank=left.rank, local_rank=local_rank, pod_index=node, exit_code=EXIT_OK, traceback="")


def _find_full_volume(judgement: Judgement) -> FullVolume | None:
    """Return the full volume: the error of a write often names no path, and PyTorch's not even the reason."""
    if judgement.kind is SHARED_MEMORY:
        return _find_volume(SHARED_MEMORY_FOLDER)
    # Without a path and a number, the write may be on another volume, or exceed a limit.
    is_known = judgement.cause.path or judgement.cause.errno == errno.ENOSPC
    return _find_volume(judgement.cause.path) if judgement.kind is FULL_VOLUME and is_known else None


def _find_volume(path: str) -> FullVolume | None:
    """Return the full volume that contains a path, or any one if the path is empty."""
    below = os.path.realpath(path) if path else ""
    try:
        with open(_MOUNTS, encoding="utf-8", errors="replace") as file:
            mounts = [line.split() for line in itertools.islice(file, _MOST_MOUNTS)]
        for _, mount, kind, options, *_ in reversed(mounts):  # the innermost is mounted last
            is_elsewhere = below and os.path.commonpath((below, mount)) != mount
            if is_elsewhere or kind not in LOCAL_TYPES or "ro" in options.split(","):
                continue
            space = os.statvfs(mount)
            if space.f_files and not space.f_favail:
                return FullVolume(mount, f"the volume at {mount} has too many files: no inode is free")
            if space.f_blocks and space.f_bavail * space.f_frsize < _MIB:
                size = space.f_blocks * space.f_frsize
                text = f"{size / _MIB:.0f} MiB" if size >= _MIB else f"{size >> 10} KiB"
                return FullVolume(mount, f"the volume at {mount} is full: {kind} of {text}")
    except (OSError, ValueError):
        pass
    return None


def _describe_cause(cause: ExceptionFacts, message: str, volume: FullVolume | None) -> str:
    """Return the exception that decides, unless the message contains it, and the full volume; empty without both."""
    line = cause.message.partition("\n")[0][:_CAUSE_LIMIT]
    link = "after" if cause.handled else "caused by"
    details = [f"{link} {cause.types[0].rpartition('.')[2]}: {line}"] if line not in message else []
    if volume is not None:
        details.append(volume.description)
    return f" ({'; '.join(details)})" if details else ""


def _find_innermost(chain: Sequence[ExceptionFacts]) -> ExceptionFacts:
    """Return the first exception of several, which those after it only pass on; empty without one.

    Causes that an exception names come before those that were only handled when it was raised.
    """
    causes = [facts for facts in chain[1:] if not facts.handled] or list(chain[1:])
    return causes[-1] if causes else ExceptionFacts()


def _find_evidence(end: WorkerEnd, judgement: Judgement) -> str:
    if judgement.timed_out:
        return EVIDENCE_TIMEOUT
    if end.stopped and not end.exception_type:
        return EVIDENCE_STOPPED
    has_reason = end.exception_type not in ("", "SystemExit") or end.message not in ("", str(end.exit_code))
    return EVIDENCE_ERROR if has_reason or find_signal(end.exit_code) else EVIDENCE_EXIT_CODE


def build_signature(end: WorkerEnd, outcome: Outcome, kind: FailureKind = UNKNOWN_KIND) -> str:
    """Return the signature of a script's failure, equal for its repetitions; empty for failures of another origin.

    It is the exception, or the hang, and its innermost place in the script's own code; or the exit code, or the signal.
    """
    code = end.exit_code
    exception_type = end.exception_type
    if exception_type == HANG.name and end.place and not outcome.secondary:
        return f"{HANG.name} in {end.place}"[:TYPE_LIMIT]
    number = -code if code < 0 else code - 128
    is_signal = number in (*SIGNALS, signal.SIGTERM, signal.SIGINT) and not end.stopped
    is_unknown = find_signal(code) > 0 and outcome.category == UNKNOWN.name
    if not exception_type and (is_signal or is_unknown) and not outcome.secondary:
        # Whoever sends it: nobody from outside hits the same step twice.
        return describe_exit(code).removeprefix("killed by ")
    if outcome.secondary or not CATEGORIES[outcome.category].own or code in EXIT_CODES:
        return ""  # the script chose the reaction by one of the launcher's exit codes
    if not exception_type and number > 0:
        return ""
    if not exception_type:
        return f"exit code {code}"

    if kind is HELPER:
        return HELPER_ENDED
    name = exception_type.rpartition(".")[2]
    frames = PLACE.findall(end.traceback.rpartition(_TRACEBACK_START)[2])
    own_frames = [frame for frame in frames if not LIBRARY.search(frame[0])] or frames
    if not own_frames:
        return name[:TYPE_LIMIT]
    path, line = own_frames[-1]
    return f"{name} at {os.path.basename(path)}:{line}"[:TYPE_LIMIT]


def to_shell_exit_code(exit_code: int) -> int:
    """Return an exit code as a shell reports it: 128 + the number of the signal that killed a process."""
    return exit_code if exit_code >= 0 else 128 - exit_code


def is_unexplained(pod: Pod, failure: Failure) -> bool:
    """Return whether only the signal by which native code ended a rank is known, or the exit code of a shell.

    The latter counts if an exception has ended a Python process that it had started.
    """
    if failure.exception_type or failure.exit_code is None or failure.local_rank is None:
        return False
    if is_native_crash(failure.exit_code) or _find_timed_stack(pod, failure):
        return True
    if failure.evidence != EVIDENCE_EXIT_CODE:
        return False
    last_lines = read_last_lines(pod, failure.local_rank)
    return bool(_read_child_error(pod, failure.local_rank)) or is_setup_mistake(last_lines)


def _find_timed_stack(pod: Pod, failure: Failure) -> str:
    """Return where a rank was that has ended by a time limit of its own; empty: it has not."""
    if failure.exit_code != 1 or failure.evidence != EVIDENCE_EXIT_CODE:
        return ""
    stack = find_timed_stack(read_end(pod, failure.local_rank or 0))
    # The lines may just arrive: those of all ranks meanwhile.
    while not stack and 0 <= time.time() - (failure.time or 0.0) < _SECONDS_TO_BEGIN:
        time.sleep(0.05)
        stack = find_timed_stack(read_end(pod, failure.local_rank or 0))
    return stack


def _add_time_limit(failure: Failure, stack: str) -> Failure:
    """Return the failure of a rank that has ended by a limit of its own: a hang, or the wait for a peer that hangs."""
    outcome = EXIT_CODES[EXIT_HANG]
    waits = is_wait(stack)
    place = find_place(stack)
    return replace(
        failure,
        category=outcome.category,
        container_exit_code=outcome.exit_code,
        secondary=waits,
        message=f"{failure.message}: the limit of faulthandler.dump_traceback_later() was over, in {place}",
        traceback=stack,
        remedy=OWN_LIMIT_REMEDY,
        signature="" if waits else f"{HANG.name} in {place}"[:TYPE_LIMIT],
        evidence=EVIDENCE_TIMEOUT if waits else EVIDENCE_ERROR,
    )


def _read_child_error(pod: Pod, local_rank: int) -> dict[str, Any]:
    """Return what ended the last Python process that a rank's program had started; empty: nothing is known."""
    return read_json(os.path.join(pod.runtime, "output", f"{local_rank}.{CHILD_ERROR}"))


def add_last_lines(pod: Pod, failure: Failure) -> Failure:
    """Return a failure without an exception, completed by the last lines that the rank wrote to its output.

    A traceback in them classifies it: if a shell runs Python, there is no other evidence.
    """
    local_rank = failure.local_rank
    exit_code = failure.exit_code
    assert local_rank is not None
    assert exit_code is not None
    stack = _find_timed_stack(pod, failure)
    if stack:
        return _add_time_limit(failure, stack)
    crash = _read_crash(pod, local_rank) if is_native_crash(exit_code) else None
    child_error = _read_child_error(pod, local_rank)
    last_lines = _await_exception(pod, local_rank) if child_error else read_last_lines(pod, local_rank)
    traceback = last_lines or failure.traceback
    if crash is not None:
        traceback = crash.text
        message = ": ".join(filter(None, (failure.message, crash.note)))
        is_vague = failure.remedy == CRASH_REMEDY or crash.remedy == RECURSION_REMEDY
        failure = replace(
            failure, message=message, remedy=crash.remedy if is_vague and crash.remedy else failure.remedy
        )
    exceptions = [] if failure.exception_type else _find_printed_exceptions(pod, local_rank, last_lines, exit_code)
    exceptions = exceptions or _find_dead_helper(failure, last_lines)
    if not exceptions:
        remedy = advise_on_output(last_lines, exit_code, pod.nproc_per_node)
        message = failure.message
        if failure.evidence == EVIDENCE_EXIT_CODE and last_lines.strip():
            line = find_refusal(last_lines, exit_code) or last_lines.strip().splitlines()[-1]
            message += f"; its last line: {line[:_CAUSE_LIMIT]!r}"
        shell_end = read_shell_end(note_path(pod.runtime, local_rank, SHELL_END), exit_code)
        if shell_end:
            message += f"; {shell_end}"
            remedy = remedy or SHELL_END_REMEDY
        failure = replace(failure, message=message, traceback=traceback, remedy=remedy or failure.remedy)
        if failure.evidence == EVIDENCE_EXIT_CODE and is_setup_mistake(last_lines):
            failure = replace(failure, evidence=EVIDENCE_ERROR)  # it is explained
            return replace(failure, category=FATAL.category, container_exit_code=FATAL.exit_code)
        return failure

    reported = WorkerEnd(
        exit_code, traceback=traceback, time=failure.time or 0.0, rank=failure.rank or 0, local_rank=local_rank
    )
    candidates = []
    for chain in exceptions:
        if OTHER_SIZES.search(chain[0].message):  # in a thread of gloo
            reported = reported._replace(traceback=find_main_stack(read_end(pod, local_rank)) or traceback)
        end = reported._replace(exception_type=chain[0].types[0], message=chain[0].message)
        completed = complete_worker_end(end, {})._replace(chain=chain)
        candidates.append(_build_failure(pod, _add_child_error(completed, child_error)))
    return min(candidates, key=lambda candidate: candidate.secondary)


def _await_exception(pod: Pod, local_rank: int) -> str:
    """Return the last lines of a rank that has printed an exception, which may just arrive."""
    deadline = time.monotonic() + _SECONDS_TO_BEGIN
    while True:
        last_lines = read_last_lines(pod, local_rank)
        if find_exceptions(last_lines) or time.monotonic() > deadline:
            return last_lines
        time.sleep(0.05)


def _add_child_error(printed: WorkerEnd, error: Mapping[str, Any]) -> WorkerEnd:
    """Return the end of a process by an exception that it has printed, completed by its record of the same one."""
    recorded = complete_worker_end(printed, error)
    message = printed.message.partition("\n")[0]
    is_same = recorded.exception_type == printed.exception_type and recorded.message.startswith(message)
    return recorded if is_same and error else printed


def _read_crash(pod: Pod, local_rank: int) -> CrashReport | None:
    """Return faulthandler's report of a rank, whose lines may arrive after its end."""
    began = time.monotonic()
    while True:
        output = read_end(pod, local_rank)
        report = read_crash(output)
        # Without any line of it, the script may have switched faulthandler off.
        limit = _SECONDS_FOR_REPORT if report is not None else _SECONDS_TO_BEGIN
        if (report is not None and is_complete(output)) or time.monotonic() - began >= limit:
            return report
        time.sleep(0.05)


def _find_printed_exceptions(pod: Pod, local_rank: int, last_lines: str, exit_code: int) -> list[list[ExceptionFacts]]:
    """Return the exceptions that ended a process, each as a chain, from its output.

    The stacks of a crash follow its exception: they may take more than the last lines.
    """
    if exit_code == 1:
        return find_exceptions(last_lines)
    if not is_native_crash(exit_code):
        return []
    native = find_native_exception(read_end(pod, local_rank))
    return [[ExceptionFacts((native[0],), native[1])]] if native is not None else []


def _find_dead_helper(failure: Failure, output: str) -> list[list[ExceptionFacts]]:
    """Return the exception that has ended a thread or a child of a program, which has then exited with 1; empty: none.

    Other exit codes are the program's own choice.
    """
    is_plain = failure.evidence == EVIDENCE_EXIT_CODE and failure.exit_code == 1
    dead = find_dead_helper(output) if is_plain else None
    return [[ExceptionFacts((dead.exception_type,), dead.message)]] if dead is not None and dead.is_last else []


def attribute_to_interruption(failure: Failure, reason: str) -> Failure:
    """Return the end of a rank as the consequence of a stop request: the ranks of all pods may agree to end.

    A lack of memory and a fault of the GPU are the pod's own, and may need another pod.
    """
    if failure.secondary or failure.category in (OOM.name, CUDA.name, NODE_FAULT.name):
        return failure
    return _build_consequence(failure, EXIT_PREEMPTED, reason)


def attribute_to_lost_master(failure: Failure) -> Failure:
    """Return the end of a rank without an exception as a consequence of the loss of pod 0 and its store.

    Nobody can say then whether pod 0 was asked to stop.
    """
    if failure.secondary or not is_bare_exit(failure):
        return failure
    return _build_consequence(failure, EXIT_PEER_LOST, "pod 0 was lost", NETWORK.remedy)


def _build_consequence(failure: Failure, exit_code: int, reason: str, remedy: str = "") -> Failure:
    """Return a failure as a consequence of what happened in another pod. ``exit_code``: of this pod for it."""
    outcome = EXIT_CODES[exit_code]
    return replace(
        failure,
        category=outcome.category,
        container_exit_code=outcome.exit_code,
        secondary=True,
        signature="",
        remedy=remedy,
        message=f"{reason}: {failure.message}",
    )


def is_bare_exit(failure: Failure) -> bool:
    """Return whether a rank has ended by itself with an exit code alone, or by a signal that requests a stop."""
    number = (failure.exit_code or 0) - 128
    return failure.exception_type in ("", "SystemExit") and (number <= 0 or number in STOP_SIGNALS)


def build_interrupted_end(pod: Pod, rank: int, reason: str) -> Failure:
    """Return the end of a pod whose ranks, the first of which is ``rank``, have exited with 0 before the training."""
    message = "all ranks of the pod exited with 0"
    end = Failure(pod_index=pod.node, rank=rank, local_rank=0, exit_code=EXIT_OK, time=time.time(), message=message)
    return attribute_to_interruption(end, reason)


def find_root_cause(failures: Sequence[Failure]) -> Failure:
    """Return the root cause among the failures of this pod's ranks."""
    return min(failures, key=order_causes)


def read_recorded_failures(pod: Pod) -> list[Failure]:
    """Return the failures of workers that have written an error file, also before torchrun reports them."""
    failures = []
    for local_rank in list_error_files(pod):
        error = read_json(_error_file(pod, local_rank))
        numbers = [error.get(key) for key in ("exitCode", "rank", "localRank")]
        if all(isinstance(number, int) for number in numbers):
            failures.append(examine_error(pod, error))
    return failures


def examine_error(pod: Pod, error: Mapping[str, Any]) -> Failure:
    """Return the classified failure of a worker from the content of its error file."""
    end = WorkerEnd(error["exitCode"], time=time.time(), rank=error["rank"], local_rank=error["localRank"])
    return _build_failure(pod, complete_worker_end(end, error))


def list_error_files(pod: Pod) -> set[int]:
    """Return the local ranks with an error file: each has failed, but its process may still be ending."""
    try:
        names = os.listdir(os.path.join(pod.runtime, "errors"))
    except OSError:
        return set()
    stems = [name[: -len(".json")] for name in names if name.endswith(".json")]
    return {int(stem) for stem in stems if stem.isdecimal()}


def remove_error_files(pod: Pod) -> None:
    """Remove the error files of former ranks, before new ones start."""
    for local_rank in list_error_files(pod):
        with suppress(OSError):
            os.unlink(_error_file(pod, local_rank))


def _error_file(pod: Pod, local_rank: int) -> str:
    return os.path.join(pod.runtime, "errors", f"{local_rank}.json")

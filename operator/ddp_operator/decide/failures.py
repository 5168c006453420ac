"""Read the failure of a pod from its termination message, and describe failures (docs/pod-contract.md).

The text comes from a training pod and is not trusted: a message of a wrong shape counts as plain text, strings are cut,
and numbers that the API server would refuse are dropped.
"""

import dataclasses
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, Literal, NamedTuple

import msgspec

from ddp_operator.api import constants
from ddp_operator.api.status import CheckpointStatus, Condition, LastFailure
from ddp_operator.api.texts import INVISIBLE
from ddp_pod.contract.credentials import hide_credentials
from ddp_pod.contract.failure_record import EVIDENCE, EVIDENCE_ERROR, JSON_NAMES, TYPE_LIMIT, Failure
from ddp_pod.contract.failure_table import CATEGORIES, KILLED, OOM, PREEMPTED, UNKNOWN, USER_ERROR, judge_exit_code
from ddp_pod.contract.failure_text import (
    DISK_REMEDY,
    EMPTY_DIR_REMEDY,
    INIT_CONTAINER_REMEDY,
    PROBE_REMEDY,
    PROGRAM_REMEDY,
    SENDER_REMEDY,
    SHARED_MEMORY_REMEDY,
    format_failure,
    format_place,
)
from ddp_pod.contract.group_facts import TEXT_LIMIT, GroupFacts, parse_group_facts
from ddp_pod.contract.rank_end import MOST_RANK_ENDS, RANK_END_TEXT, RankEnd

_MAX_LINE: Final = 300
# Escape sequences; invisible characters; pictures, and characters that are not assigned.
_NOT_PLAIN: Final = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?"
    rf"|[{INVISIBLE}\u2600-\u27bf\u2b00-\u2bff\ue000-\uf8ff\U0001f000-\U0001ffff\U000e1000-\U0010ffff]"
)
# The kubelet's reasons for a container that the runtime could not start, and the runtime's message about the program.
_START_ERRORS: Final = ("StartError", "ContainerCannotRun")
_NO_PROGRAM: Final = re.compile(
    r'exec: \\?"([^"\\]+)\\?": [^"]*(?:not found|no such file or directory|permission denied)'
)
# The kubelet's message when it evicts a pod for the size of a volume.
_FULL_VOLUME: Final = re.compile(
    r'Usage of EmptyDir volume "(?P<name>[a-z0-9-]{1,63})" exceeds the limit "(?P<limit>[0-9a-zA-Z.]{1,32})"'
)
_OOM_KILLED: Final = "OOMKilled"
_OUT_OF_MEMORY: Final = "the container was killed because it used more memory than its limit"
_MAX_TEXT: Final = 2048
_MAX_STEP: Final = 2**53
_MAX_MESSAGE: Final = 65536  # characters; a kubelet cuts at 4,096 bytes
_MAX_INT: Final = 2**31 - 1
_MAX_INPUTS: Final = 16
_MAX_TIME: Final = 4e9  # the year 2096
_CLOCK_TOLERANCE: Final = 3600.0  # seconds by which the clocks of launcher and kubelet may differ


def describe_failure(failure: LastFailure, *, whole: bool = False) -> str:
    """Return a failure in one line: its category, its place and its message's first line, or the ``whole`` message."""
    message = describe_detail(failure)
    line = " ".join(message.split()) if whole else _shorten(message.partition("\n")[0])
    return format_failure(failure.category, _places(failure), line)


def describe_restart(which: str, cause: LastFailure | None, checkpoint: CheckpointStatus | None) -> str:
    """Return a restart in one line, such as ``restart 2 of 3: Network (rank 1): connection lost; from step 400``.

    ``which``: its number, and the limit if there is one. The step is that of the newest known checkpoint.
    """
    text = which
    if cause is not None:
        places = _places(cause)
        known_places = places[:1] if cause.rank is not None else places[1:4]
        line = _shorten(describe_detail(cause).partition("\n")[0])
        text += f": {format_failure(cause.category, known_places, line)}"
    if checkpoint is not None:
        text += f"; from step {checkpoint.step}"
    return text


def _shorten(line: str) -> str:
    return line if len(line) <= _MAX_LINE else f"{line[: _MAX_LINE - 2].rstrip()} …"


def sanitize_text(text: str, limit: int) -> str:
    """Return at most ``limit`` characters of a pod's text as the status stores it.

    Removes credentials of URLs and control sequences, as ``terminal.make_printable`` does for output. It also removes
    pictures, and bounds the length.
    """
    encodable = text[: 2 * limit].encode("utf-8", "replace").decode("utf-8")
    return hide_credentials(_NOT_PLAIN.sub("", encodable))[:limit]


def describe_place(failure: LastFailure) -> str:
    """Return where the failure happened; unknown parts are omitted."""
    return format_place(_places(failure))


def _places(failure: LastFailure) -> tuple[tuple[str, object], ...]:
    return (
        ("rank", failure.rank),
        ("pod", failure.pod),
        ("init container", failure.container),
        ("node", failure.node_name),
        ("exit code", failure.exit_code),
    )


def describe_detail(failure: LastFailure) -> str:
    """Return the message, without the category in front of it."""
    return failure.message.strip().removeprefix(f"{failure.category}: ")


def describe_end(failed: Condition, failure: LastFailure | None) -> str:
    """Return why the job ended, without the failure itself; empty if the failure is the only reason."""
    if failure is None or not (failure.conclusion or failed.reason == failure.category):
        return failed.message  # such as a deadline
    return failure.conclusion


def sentence(text: str) -> str:
    """Return a text as one line that ends like a sentence."""
    line = " ".join(text.split())
    return line if not line or line.endswith((".", "!", "?")) else f"{line}."


class InputReport(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """The launcher's report on one of spec.inputs."""

    name: str
    phase: Literal["Pending", "Fetching", "Fetched", "Failed"]
    bytes: int = 0
    total_bytes: int | None = None
    etag: str = ""
    reason: str = ""
    message: str = ""


class _Message(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    rename={**JSON_NAMES, "last_failure": "lastFailure"},
):
    """A termination message. The container's exit code is not among its members: the kubelet reports it."""

    category: str = ""
    secondary: bool = False
    rank: int | None = None
    local_rank: int | None = None
    pod_index: int | None = None
    exit_code: int | None = None
    exception_type: str = ""
    message: str = ""
    traceback: str = ""
    remedy: str = ""
    time: float | None = None
    restarts: int = 0
    signature: str = ""
    step: float | None = None
    repeated: bool = False
    progress: dict[str, float] = {}
    evidence: str = EVIDENCE_ERROR
    groups: Any = None
    inputs: tuple[InputReport, ...] = ()
    last_failure: str = ""
    awaited: str = ""
    ends: tuple[RankEnd, ...] = ()


@dataclass(frozen=True)
class Termination(Failure):
    """The end of one pod: the failure, and further reports of the pod and the kubelet; values are checked."""

    container: str = ""
    """The init container that failed; empty: the training container."""
    permanent: bool = False
    """Whether another attempt would fail as well."""
    ended_by_probe: bool = False
    """Whether the kubelet killed the training container for a probe or a hook."""
    groups: GroupFacts | None = None
    """Only of a pod that succeeded: whether the ranks formed one process group."""
    inputs: tuple[InputReport, ...] = ()
    """Only of a pod that fetches inputs."""
    last_failure: str = ""
    """Only of a pod that succeeded: the failure before the last restart of its workers, as on its page."""
    awaited: str = ""
    """The failure of a rank that was outside of collectives while its peers may have waited for it."""
    ends: tuple[RankEnd, ...] = ()
    """Only of a pod that succeeded: ranks that may not have completed their training."""


class ContainerKill(NamedTuple):
    """The kubelet killed a container. ``field``: the probe or hook that failed, as in the container's spec."""

    container: str
    field: str
    message: str = ""


@dataclass(frozen=True, slots=True)
class KubeletEvidence:
    """The kubelet's reports on a failed pod, except the end of its training container."""

    pod: str = ""
    init_container: str = ""
    """The init container that failed."""
    eviction: str = ""
    """The kubelet's message if it evicted the pod because of the pod's own use of resources."""
    has_container: bool = True
    """Whether the kubelet reports the end of any container."""
    kill: ContainerKill | None = None
    pod_remains: bool = False
    """Whether nobody deleted, evicted or preempted the pod."""


_NO_EVIDENCE: Final = KubeletEvidence()


def parse_termination(
    exit_code: int,
    reason: str = "",
    text: str = "",
    finished_at: datetime | None = None,
    evidence: KubeletEvidence = _NO_EVIDENCE,
) -> Termination:
    """Return the end of a pod from the exit code and reason of its container, its termination message and evidence."""
    message = _decode(text)
    has_message = message is not None
    if message is None:
        by_code = judge_exit_code(exit_code)
        tail = sanitize_text(text[-2 * _MAX_TEXT :].strip()[-_MAX_TEXT:], _MAX_TEXT)
        message = _Message(
            category=by_code.category,
            exit_code=exit_code,
            message=tail.rpartition("\n")[2].strip() or _describe_exit(exit_code, reason),
            traceback=tail if "\n" in tail else "",  # the kubelet's fallback for a message: the end of the log
            remedy=CATEGORIES[by_code.category].remedy,
        )
    end = _sanitize(message, exit_code, finished_at)
    return _add_kubelet_evidence(end, evidence, reason, "" if has_message else text, has_message=has_message)


def _add_kubelet_evidence(
    end: Termination, evidence: KubeletEvidence, reason: str, text: str, *, has_message: bool
) -> Termination:
    """Return an end with the kubelet's evidence, which overrides the launcher's; later rules override earlier ones."""
    if reason == _OOM_KILLED:
        end = _set_out_of_memory(end, has_message=has_message)
    if evidence.kill is not None:
        end = _set_killed_by_kubelet(end, evidence.kill)
    elif evidence.pod_remains and end.category == PREEMPTED.name and end.rank is None:
        message = "the training container got a signal to stop, although the pod was neither deleted nor evicted"
        end = dataclasses.replace(end, category=KILLED.name, message=message, remedy=SENDER_REMEDY)
    program = _NO_PROGRAM.search(text) if reason in _START_ERRORS else None
    if program:
        remedy = sanitize_text(PROGRAM_REMEDY.format(program=program[1]), _MAX_TEXT)
        end = dataclasses.replace(end, category=USER_ERROR.name, permanent=True, remedy=remedy)
    if evidence.init_container:
        # The Job has no backoffLimit, so the Job controller would restart the pod forever.
        permanent = end.permanent and end.container_exit_code != constants.EXIT_USER_ERROR
        remedy = INIT_CONTAINER_REMEDY.format(pod=evidence.pod, container=evidence.init_container)
        end = dataclasses.replace(end, container=evidence.init_container, permanent=permanent, remedy=remedy)
    if evidence.eviction and end.container_exit_code != constants.EXIT_OK:
        remedy = _advise_on_eviction(evidence.eviction)
        end = dataclasses.replace(end, category=UNKNOWN.name, message=evidence.eviction, remedy=remedy)
    if not evidence.has_container:
        end = dataclasses.replace(end, category=UNKNOWN.name, remedy=_advise_on_eviction(text))
    return end


def _set_killed_by_kubelet(end: Termination, kill: ContainerKill) -> Termination:
    """Return the end of a container that the kubelet killed. The signature ends a job that the probe always fails."""
    because = f": {kill.message}" if kill.message else ""
    message = f"the kubelet killed container {kill.container}, because its {kill.field} failed{because}"
    return dataclasses.replace(
        end,
        category=KILLED.name,
        secondary=False,
        ended_by_probe=True,
        message=sanitize_text(message, _MAX_TEXT),
        remedy=PROBE_REMEDY.format(field=kill.field, container=kill.container),
        signature=f"failed {kill.field} of container {kill.container}",
    )


def _set_out_of_memory(end: Termination, *, has_message: bool) -> Termination:
    """Return the end of a container in which the kernel has killed a process for memory.

    The launcher's message names the rank. Secondary failures and requested stops do not change.
    """
    if not has_message:
        return dataclasses.replace(
            end, category=OOM.name, secondary=False, permanent=False, remedy=OOM.remedy, message=_OUT_OF_MEMORY
        )
    if end.secondary or end.container_exit_code == constants.EXIT_PREEMPTED:
        return end
    return dataclasses.replace(end, category=OOM.name, remedy=end.remedy if end.category == OOM.name else OOM.remedy)


def _advise_on_eviction(message: str) -> str:
    volume = _FULL_VOLUME.search(message)
    if volume is None:
        return DISK_REMEDY if "ephemeral" in message else ""
    if volume["name"] == constants.SHM_VOLUME:
        return SHARED_MEMORY_REMEDY.format(limit=volume["limit"])
    return EMPTY_DIR_REMEDY.format(volume=volume["name"], limit=volume["limit"])


def _sanitize(message: _Message, exit_code: int, finished_at: datetime | None) -> Termination:
    by_code = judge_exit_code(exit_code)
    category = CATEGORIES.get(message.category) or CATEGORIES[by_code.category]
    return Termination(
        category=category.name,
        container_exit_code=exit_code,
        secondary=message.secondary or by_code.secondary,
        rank=_sane_int(message.rank),
        local_rank=_sane_int(message.local_rank),
        pod_index=_sane_int(message.pod_index),
        exit_code=_sane_int(message.exit_code),
        exception_type=sanitize_text(message.exception_type, TYPE_LIMIT),
        message=sanitize_text(message.message, _MAX_TEXT),
        traceback=sanitize_text(message.traceback[-_MAX_TEXT:], _MAX_TEXT),
        remedy=sanitize_text(message.remedy, _MAX_TEXT),
        time=_sane_time(message.time, finished_at),
        restarts=min(max(0, message.restarts), _MAX_INT),
        signature=sanitize_text(message.signature, TYPE_LIMIT),
        step=_sane_step(message.step),
        repeated=message.repeated,
        progress=_sane_progress(message.progress),
        evidence=message.evidence if message.evidence in EVIDENCE else EVIDENCE_ERROR,
        permanent=exit_code == constants.EXIT_USER_ERROR,
        groups=sanitize_groups(message.groups),
        inputs=_sane_inputs(message.inputs),
        last_failure=message.last_failure,
        awaited=message.awaited,
        ends=tuple(_sane_end(end) for end in message.ends[:MOST_RANK_ENDS]),
    )


def _sane_progress(reported: Mapping[str, float]) -> dict[str, float]:
    """Return the finite values, and the loss that is not finite, which JSON cannot have."""
    progress = {name: value for name, value in reported.items() if math.isfinite(value)}
    if constants.METRIC_LOST_LOSS in progress:
        progress[constants.METRIC_LOSS] = math.nan
    return progress


def _sane_end(end: RankEnd) -> RankEnd:
    processes = tuple(sanitize_text(command, RANK_END_TEXT) for command in end.processes[:MOST_RANK_ENDS])
    exception = sanitize_text(end.exception, RANK_END_TEXT)
    return RankEnd(
        _sane_int(end.rank) or 0, _sane_step(end.step), _sane_step(end.total), exception, end.secondary, processes
    )


def _sane_step(step: float | None) -> float | None:
    return step if step is not None and 0 <= step <= _MAX_STEP else None


def sanitize_groups(members: object) -> GroupFacts | None:
    """Return a pod's record of its process groups; None if it has none."""
    facts = parse_group_facts(members)
    if facts is None:
        return None
    return facts._replace(
        message=sanitize_text(facts.message, TEXT_LIMIT), remedy=sanitize_text(facts.remedy, TEXT_LIMIT)
    )


def parse_inputs(text: str) -> tuple[InputReport, ...]:
    """Return the reports on inputs in a pod's page; empty if they are malformed."""
    try:
        return _sane_inputs(msgspec.json.decode(text, type=tuple[InputReport, ...]))
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return ()


def _decode(text: str) -> _Message | None:
    if len(text) > _MAX_MESSAGE:
        return None
    try:
        return msgspec.json.decode(text, type=_Message)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return None


def _describe_exit(exit_code: int, reason: str) -> str:
    if exit_code > 128:
        return f"the pod was killed by signal {exit_code - 128}"
    return f"the container ended with exit code {exit_code}" + (f" ({reason})" if reason else "")


def _sane_inputs(inputs: tuple[InputReport, ...]) -> tuple[InputReport, ...]:
    return tuple(_sane_input(report) for report in inputs[:_MAX_INPUTS])


def _sane_input(report: InputReport) -> InputReport:
    total_bytes = None if report.total_bytes is None else _sane_size(report.total_bytes)
    return msgspec.structs.replace(
        report,
        bytes=_sane_size(report.bytes),
        total_bytes=total_bytes,
        etag=sanitize_text(report.etag, _MAX_LINE),
        message=sanitize_text(report.message, _MAX_LINE),
    )


def _sane_size(value: int) -> int:
    return min(max(0, value), _MAX_STEP)


def _sane_int(value: int | None) -> int | None:
    return value if value is not None and abs(value) <= _MAX_INT else None


def _sane_time(reported: float | None, finished_at: datetime | None) -> float | None:
    """Return the launcher's time if it differs from the kubelet's by at most an hour, else the kubelet's."""
    finished = finished_at.timestamp() if finished_at else None
    if finished is not None and not 0 < finished < _MAX_TIME:
        finished = None
    if reported is None or not 0 < reported < _MAX_TIME:
        return finished
    if finished is not None and abs(finished - reported) > _CLOCK_TOLERANCE:
        return finished
    return reported

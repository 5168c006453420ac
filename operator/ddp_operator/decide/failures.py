"""Read the failure of a pod from its termination message, and describe failures (docs/pod-contract.md).

The text comes from a training pod and is not trusted: a message of a wrong shape counts as plain text, strings are cut,
and numbers that the API server would refuse are dropped.
"""

import dataclasses
import re
import signal
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, NamedTuple

import msgspec

from ddp_operator.api import constants
from ddp_operator.api.status import CheckpointStatus, Condition, LastFailure
from ddp_operator.api.texts import INVISIBLE
from ddp_pod.contract.credentials import hide_credentials
from ddp_pod.contract.failure_record import Failure, PodEnd
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
from ddp_pod.contract.records import read_record

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
_MAX_MESSAGE: Final = 65536  # characters; a kubelet cuts at 4,096 bytes
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


@dataclass(frozen=True)
class Termination(PodEnd):
    """The end of one pod: its last report, and those of the kubelet; values are checked."""

    container: str = ""
    """The init container that failed; empty: the training container."""
    permanent: bool = False
    """Whether another attempt would fail as well."""
    ended_by_probe: bool = False
    """Whether the kubelet killed the training container for a probe or a hook."""


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
    message = decode_object(text, _MAX_MESSAGE)
    has_message = message is not None and "version" in message
    report = read_record(PodEnd, message, sanitize_text) if has_message else _read_plain_text(exit_code, reason, text)
    end = complete_end(report, exit_code, finished_at)
    return _add_kubelet_evidence(end, evidence, reason, "" if has_message else text, has_message=has_message)


def _read_plain_text(exit_code: int, reason: str, text: str) -> PodEnd:
    """Return the end of a pod whose message is plain text: the kubelet's fallback is the end of the log."""
    by_code = judge_exit_code(exit_code)
    tail = sanitize_text(text[-2 * _MAX_TEXT :].strip()[-_MAX_TEXT:], _MAX_TEXT)
    return PodEnd(
        category=by_code.category,
        exit_code=exit_code,
        message=tail.rpartition("\n")[2].strip() or _describe_exit(exit_code, reason),
        traceback=tail if "\n" in tail else "",
        remedy=CATEGORIES[by_code.category].remedy,
    )


def complete_end(
    failure: Failure, exit_code: int = constants.EXIT_RETRYABLE, finished_at: datetime | None = None
) -> Termination:
    """Return a pod's failure with what the kubelet reports: the exit code and the end of the container."""
    by_code = judge_exit_code(exit_code)
    changes = {
        "category": failure.category or by_code.category,
        "container_exit_code": exit_code,
        "secondary": failure.secondary or by_code.secondary,
        "time": _choose_time(failure.time, finished_at),
        "permanent": exit_code == constants.EXIT_USER_ERROR,
    }
    return Termination(**{**vars(failure), **changes})


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

    The launcher's message names the rank. Secondary failures, requested stops and mistakes of the script do not change:
    the process may have been killed before, and its rank restarted in the same pod, or run again by `ddp rerun`.
    """
    if not has_message:
        return dataclasses.replace(
            end, category=OOM.name, secondary=False, permanent=False, remedy=OOM.remedy, message=_OUT_OF_MEMORY
        )
    if end.secondary or end.container_exit_code in (constants.EXIT_PREEMPTED, constants.EXIT_USER_ERROR):
        return end
    return dataclasses.replace(end, category=OOM.name, remedy=end.remedy if end.category == OOM.name else OOM.remedy)


def _advise_on_eviction(message: str) -> str:
    volume = _FULL_VOLUME.search(message)
    if volume is None:
        return DISK_REMEDY if "ephemeral" in message else ""
    if volume["name"] == constants.SHM_VOLUME:
        return SHARED_MEMORY_REMEDY.format(limit=volume["limit"])
    return EMPTY_DIR_REMEDY.format(volume=volume["name"], limit=volume["limit"])


def decode_object(data: str | bytes, limit: int) -> dict[str, Any] | None:
    """Return the JSON object that a pod has written; None: it is none, or it is longer than ``limit``."""
    if len(data) > limit:
        return None
    try:
        value = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _describe_exit(exit_code: int, reason: str) -> str:
    if 128 < exit_code <= 128 + signal.NSIG:
        return f"the pod was killed by signal {exit_code - 128}"
    return f"the container ended with exit code {exit_code}" + (f" ({reason})" if reason else "")


def _choose_time(reported: float | None, finished_at: datetime | None) -> float | None:
    """Return the launcher's time if it differs from the kubelet's by at most an hour, else the kubelet's."""
    finished = finished_at.timestamp() if finished_at else None
    if finished is not None and not 0 < finished < _MAX_TIME:
        finished = None
    if reported is None or not 0 < reported < _MAX_TIME:
        return finished
    if finished is not None and abs(finished - reported) > _CLOCK_TOLERANCE:
        return finished
    return reported

"""Read the end of a pod: its launcher's termination message (docs/pod-contract.md), and the kubelet's evidence. Pure.

The text comes from a training pod and is not trusted: a message of a wrong shape counts as plain text, strings are cut,
and numbers that the API server would refuse are dropped.
"""

import dataclasses
import re
import signal
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

import msgspec

from ddp_operator.api import constants
from ddp_operator.api.texts import INVISIBLE
from ddp_operator.decide.failures import Termination, complete_end
from ddp_pod.contract.credentials import hide_credentials
from ddp_pod.contract.failure_record import RunEnd
from ddp_pod.contract.failure_table import (
    CATEGORIES,
    EXIT_CODES,
    KILLED,
    OOM,
    PREEMPTED,
    UNKNOWN,
    USER_ERROR,
    judge_exit_code,
)
from ddp_pod.contract.failure_text import BROKEN_PYTHON, BROKEN_PYTHON_REMEDY, SENDER_REMEDY
from ddp_pod.contract.records import read_record

_PROGRAM_REMEDY: Final = (
    "{program} is not in the image, or is not executable: use an image with Python and PyTorch, or correct command in "
    "spec.template (an image without python may have python3)"
)
_DISK_REMEDY: Final = (
    "raise ephemeral-storage in resources, or write to a volume: files in the container and its log count"
)
_EMPTY_DIR_REMEDY: Final = (
    "raise sizeLimit of the emptyDir {volume} in spec.template (it is {limit}), write less to it, or use a claim"
)
_SHARED_MEMORY_REMEDY: Final = (
    "raise spec.sharedMemory (it is {limit}) and the container memory limit, or use fewer DataLoader workers"
)
_INIT_CONTAINER_REMEDY: Final = "see its log: kubectl logs {pod} -c {container}"
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
_KILLED: Final = (128 + signal.SIGTERM, 128 + signal.SIGKILL)
_OUT_OF_MEMORY: Final = "the container was killed because it used more memory than its limit"
_MAX_TEXT: Final = 2048
_MAX_MESSAGE: Final = 65536  # characters; a kubelet cuts at 4,096 bytes


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
    report = (
        read_record(RunEnd, message, sanitize_text)
        if has_message
        else _read_plain_text(exit_code, reason, text, is_log=evidence.has_container)
    )
    decided = report.container_exit_code
    if has_message and exit_code in _KILLED and reason != _OOM_KILLED and decided in EXIT_CODES:
        exit_code = decided  # the launcher was about to exit with it when the pod was deleted
    end = complete_end(report, exit_code, finished_at)
    if message is not None and has_message:
        end = dataclasses.replace(end, members=message)
    return _add_kubelet_evidence(end, evidence, reason, "" if has_message else text, has_message=has_message)


def _read_plain_text(exit_code: int, reason: str, text: str, *, is_log: bool) -> RunEnd:
    """Return the end of a pod whose message is plain text: the kubelet's fallback is the end of the log."""
    by_code = judge_exit_code(exit_code)
    tail = sanitize_text(text[-2 * _MAX_TEXT :].strip()[-_MAX_TEXT:], _MAX_TEXT)
    is_killed = is_log and 128 < exit_code <= 128 + signal.NSIG  # then the log has no reason
    return RunEnd(
        category=by_code.category,
        exit_code=exit_code,
        message=(not is_killed and tail.rpartition("\n")[2].strip()) or _describe_exit(exit_code, reason),
        traceback=tail if "\n" in tail else "",
        remedy=CATEGORIES[by_code.category].remedy,
    )


def _add_kubelet_evidence(
    end: Termination, evidence: KubeletEvidence, reason: str, text: str, *, has_message: bool
) -> Termination:
    """Return an end with the kubelet's evidence, which overrides the launcher's; later rules override earlier ones."""
    if reason == _OOM_KILLED:
        end = _set_out_of_memory(end, has_message=has_message)
    if evidence.pod_remains and end.category == PREEMPTED.name and end.rank is None:
        message = "the training container got a signal to stop, although the pod was neither deleted nor evicted"
        end = dataclasses.replace(end, category=KILLED.name, message=message, remedy=SENDER_REMEDY)
    program = _NO_PROGRAM.search(text) if reason in _START_ERRORS else None
    if program:
        remedy = sanitize_text(_PROGRAM_REMEDY.format(program=program[1]), _MAX_TEXT)
        end = dataclasses.replace(end, category=USER_ERROR.name, permanent=True, remedy=remedy)
    is_launcher = not evidence.init_container and end.container_exit_code < 128
    broken = BROKEN_PYTHON.search(text) if is_launcher else None
    if broken:
        end = dataclasses.replace(
            end,
            category=USER_ERROR.name,
            permanent=True,
            message=sanitize_text(broken[0], _MAX_TEXT),
            remedy=BROKEN_PYTHON_REMEDY,
        )
    if evidence.init_container:
        # The Job has no backoffLimit, so the Job controller would restart the pod forever.
        permanent = end.permanent and end.container_exit_code != constants.EXIT_USER_ERROR
        remedy = _INIT_CONTAINER_REMEDY.format(pod=evidence.pod, container=evidence.init_container)
        end = dataclasses.replace(end, container=evidence.init_container, permanent=permanent, remedy=remedy)
    if evidence.eviction and end.container_exit_code != constants.EXIT_OK:
        remedy = _advise_on_eviction(evidence.eviction)
        end = dataclasses.replace(end, category=UNKNOWN.name, message=evidence.eviction, remedy=remedy)
    if not evidence.has_container:
        end = dataclasses.replace(end, category=UNKNOWN.name, remedy=_advise_on_eviction(text))
    return end


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
        return _DISK_REMEDY if "ephemeral" in message else ""
    if volume["name"] == constants.SHM_VOLUME:
        return _SHARED_MEMORY_REMEDY.format(limit=volume["limit"])
    return _EMPTY_DIR_REMEDY.format(volume=volume["name"], limit=volume["limit"])


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


def sanitize_text(text: str, limit: int) -> str:
    """Return at most ``limit`` characters of a pod's text as the status stores it.

    Removes credentials of URLs and control sequences, as ``terminal.make_printable`` does for output. It also removes
    pictures, and bounds the length.
    """
    encodable = text[: 2 * limit].encode("utf-8", "replace").decode("utf-8")
    return hide_credentials(_NOT_PLAIN.sub("", encodable))[:limit]

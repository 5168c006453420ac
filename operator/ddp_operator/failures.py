"""A failure as a pod reports it in its termination message (docs/pod-contract.md), and its one wording for people.

The text comes from inside a training pod, so nothing in it is trusted: a message of a wrong shape counts as mere text,
strings are cut, and numbers that no API server would store are dropped.
"""

import math
import re
from datetime import datetime
from typing import Final, Literal

import msgspec

from ddp_operator import constants
from ddp_operator.api.status import CheckpointStatus, Condition, LastFailure
from ddp_operator.launcher.failure_table import (
    CATEGORIES,
    OOM,
    USER_ERROR,
    format_failure,
    format_place,
    judge_exit_code,
)

_MAX_LINE: Final = 300
# Escape sequences, then single control characters but tab and newline, and those that turn the direction of writing;
# then what joins or varies characters, pictures, and what no standard has assigned.
_NOT_PLAIN: Final = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?"
    r"|[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u2069]"
    r"|[\u2600-\u27bf\u2b00-\u2bff\ue000-\uf8ff\ufe00-\ufe0f\ufeff\U0001f000-\U0001ffff\U000e0000-\U0010ffff]"
)


def describe_failure(failure: LastFailure, *, whole: bool = False) -> str:
    """Return a failure in one line: its category, its place and its message's first line, or the ``whole`` message."""
    message = describe_detail(failure)
    line = " ".join(message.split()) if whole else _shorten(message.partition("\n")[0])
    return format_failure(failure.category, _places(failure), line)


def describe_restart(which: str, cause: LastFailure | None, checkpoint: CheckpointStatus | None) -> str:
    """Return a restart in one line, such as ``restart 2 of 3: Network (rank 1): connection lost; from step 400``.

    ``which``: its number, and the limit where there is one. The step is that of the newest checkpoint, if one is known.
    """
    why = ""
    if cause is not None:
        places = _places(cause)
        told = places[:1] if cause.rank is not None else places[1:4]
        line = _shorten(describe_detail(cause).partition("\n")[0])
        why = f": {format_failure(cause.category, told, line)}"
    return f"{which}{why}" + (f"; from step {checkpoint.step}" if checkpoint is not None else "")


def _shorten(line: str) -> str:
    return line if len(line) <= _MAX_LINE else f"{line[: _MAX_LINE - 2].rstrip()} …"


def quote(text: str, limit: int) -> str:
    """Return what a program said as so many characters of plain text: without what UTF-8 cannot hold, and without
    what a terminal would obey or draw: colours, movements, directions, pictures."""
    return _NOT_PLAIN.sub("", text[:limit].encode("utf-8", "replace").decode("utf-8"))


def describe_place(failure: LastFailure) -> str:
    """Return where it happened, as far as that is known."""
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
    """Return the message; an exception of ours that is called as the category does not repeat it."""
    return failure.message.strip().removeprefix(f"{failure.category}: ")


def describe_end(failed: Condition, failure: LastFailure | None) -> str:
    """Return why the job ended, but for the failure itself, which is told apart; empty where that alone is why."""
    if failure is None or not (failure.conclusion or failed.reason == failure.category):
        return failed.message  # a deadline; or an older operator's, which wrote both into one
    return failure.conclusion


def sentence(text: str) -> str:
    """Return a text as one line that begins and ends like a sentence."""
    line = " ".join(text.split())
    return line if not line or line.endswith((".", "!", "?")) else f"{line}."


# The kubelet's reasons for a container that its runtime could not start, and what the runtime says of the image.
_START_ERRORS = ("StartError", "ContainerCannotRun")
_NO_PROGRAM = re.compile(r'exec: \\?"([^"\\]+)\\?": [^"]*(?:not found|no such file or directory|permission denied)')
_NO_PROGRAM_HINT = (
    "{program} is not in the image, or is not executable: use an image with Python and PyTorch, or correct command in "
    "spec.template (where there is no python, there may be python3)"
)
_MAX_TEXT = 2048
_MAX_SIGNATURE = 200
_MAX_STEP = 2**53
# The kubelet cuts at 4,096 bytes; whoever hands over much more is not one.
_MAX_MESSAGE = 65536
_MAX_INT = 2**31 - 1
_MAX_INPUTS = 16
_MAX_TIME = 4e9  # the year 2096


class InputReport(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """What the launcher says of one of spec.inputs."""

    name: str
    phase: Literal["Pending", "Fetching", "Fetched", "Failed"]
    bytes: int = 0
    total_bytes: int | None = None
    etag: str = ""
    reason: str = ""
    message: str = ""


class _Fields(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    category: str = ""
    exit_code: int | None = None
    rank: int | None = None
    node: int | None = None
    message: str = ""
    traceback: str = ""
    hint: str = ""
    time: float | None = None
    restarts: int = 0
    secondary: bool = False
    """Whether it is the consequence of another pod's failure, as a lost peer is."""
    signature: str = ""
    step: float | None = None
    repeated: bool = False
    """Whether the pod had failed like this before, and made no progress in between."""
    world_size: int | None = None
    group_size: int | None = None
    progress: dict[str, float] = {}
    inputs: tuple[InputReport, ...] = ()
    """Of a pod that fetches them."""
    last_failure: str = ""
    """Of a pod that has succeeded: the failure after which its workers were last restarted in it, as on its page."""


class _Message(_Fields, frozen=True, kw_only=True, rename="camel"):
    victim: bool = False
    """What older launchers call ``secondary``."""


class Termination(_Fields, frozen=True, kw_only=True, rename="camel"):
    """One pod's end. ``exit_code`` is the failing worker's."""

    container_exit_code: int
    """The launcher's own, on which the Job's podFailurePolicy acts."""
    container: str = ""
    """The init container that failed; empty where it was the training container."""
    permanent: bool = False
    """Whether another attempt would fail as well."""


def parse_termination(
    exit_code: int, reason: str = "", text: str = "", finished_at: datetime | None = None
) -> Termination:
    """Return what ended a container, from its exit code, the kubelet's reason and the termination message."""
    finished = finished_at.timestamp() if finished_at else None
    if finished is not None and not 0 < finished < _MAX_TIME:
        finished = None
    decoded = _decode(text)
    found = decoded or _Message(exit_code=exit_code, message=_describe(exit_code, reason, text))
    by_code = judge_exit_code(exit_code)
    category = CATEGORIES.get(found.category) or CATEGORIES[by_code.category]
    secondary = found.secondary or found.victim or by_code.secondary
    hint = found.hint if decoded else category.remedy
    message, permanent = found.message, exit_code == constants.EXIT_USER_ERROR
    if reason == "OOMKilled" and decoded is None:
        category, secondary, permanent, hint = OOM, False, False, OOM.remedy
        message = "the container was killed because it used more memory than its limit"
    elif reason == "OOMKilled" and not secondary and exit_code != constants.EXIT_PREEMPTED:
        # The kernel has killed one of its processes, and the launcher knows which rank that has ended, and how.
        hint = hint if category is OOM else OOM.remedy
        category = OOM
    missing = _NO_PROGRAM.search(text) if decoded is None and reason in _START_ERRORS else None
    if missing:
        category, permanent, hint = USER_ERROR, True, _NO_PROGRAM_HINT.format(program=missing[1])
    return Termination(
        container_exit_code=exit_code,
        category=category.name,
        exit_code=_sane_int(found.exit_code),
        rank=_sane_int(found.rank),
        node=_sane_int(found.node),
        message=quote(message, _MAX_TEXT),
        traceback=quote(found.traceback[-_MAX_TEXT:], _MAX_TEXT),
        hint=quote(hint, _MAX_TEXT),
        time=_sane_time(found.time, finished),
        world_size=_sane_int(found.world_size),
        group_size=_sane_int(found.group_size),
        restarts=min(max(0, found.restarts), _MAX_INT),
        secondary=secondary,
        signature=quote(found.signature, _MAX_SIGNATURE),
        step=found.step if found.step is not None and 0 <= found.step <= _MAX_STEP else None,
        repeated=found.repeated,
        permanent=permanent,
        last_failure=found.last_failure,
        inputs=_sane_inputs(found.inputs),
        progress={k: v for k, v in found.progress.items() if math.isfinite(v)},
    )


def parse_inputs(text: str) -> tuple[InputReport, ...]:
    """Return what a pod's page says of the inputs that it fetches; garbage is nothing."""
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


def _describe(exit_code: int, reason: str, text: str) -> str:
    tail = quote(text[-2 * _MAX_TEXT :].strip()[-_MAX_TEXT:], _MAX_TEXT)
    if tail:
        return tail
    if exit_code > 128:
        return f"the pod was killed by signal {exit_code - 128}"
    return f"the container ended with exit code {exit_code}" + (f" ({reason})" if reason else "")


def _sane_inputs(inputs: tuple[InputReport, ...]) -> tuple[InputReport, ...]:
    def size(value: int) -> int:
        return min(max(0, value), _MAX_STEP)

    return tuple(
        msgspec.structs.replace(
            one,
            bytes=size(one.bytes),
            total_bytes=None if one.total_bytes is None else size(one.total_bytes),
            etag=quote(one.etag, _MAX_LINE),
            message=quote(one.message, _MAX_LINE),
        )
        for one in inputs[:_MAX_INPUTS]
    )


def _sane_int(value: int | None) -> int | None:
    return value if value is not None and abs(value) <= _MAX_INT else None


def _sane_time(said: float | None, finished: float | None) -> float | None:
    """Trust the launcher's clock only where it agrees with the kubelet's to within an hour."""
    if said is None or not 0 < said < _MAX_TIME:
        return finished
    if finished is not None and not -3600 <= finished - said <= 3600:
        return finished
    return said

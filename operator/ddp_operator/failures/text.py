"""A failure for people: the one wording of conditions, Events, ``ddp why``, ``ddp run``'s summary and the report."""

import re
from typing import Final

from ddp_operator.api.status import CheckpointStatus, Condition, LastFailure
from ddp_operator.launcher.failure_table import format_failure, format_place

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

"""Tracebacks as text, read from a log or written of a rank's uncaught exception, which leaves an error file.

Loaded before the program starts: a rank that has run out of file descriptors cannot open a module any more.
"""

import itertools
import os
import re
import sys
import time
from typing import Any, Optional

from .files import is_own_file, write_json

PLACE = re.compile(r'  File "([^"]*)", line (\d+)')
LIBRARY = re.compile(r"[/\\](site|dist)-packages[/\\]|[/\\]lib(64)?[/\\]python3[^/\\]*[/\\]|^<frozen ")
_SHORT_TRACEBACK = 15  # lines
_LIBRARY_CALLS_KEPT = 2
_RANK_IN_FRONT = re.compile(r"^\[rank\d+\]: ?")
_EXCEPTION = re.compile(r"([A-Za-z_][\w.]*)(?:: (.*))?$")
_MESSAGE_PART = 4096  # characters kept of a long message's beginning, and of its end


def fold_libraries(text: str) -> str:
    """Return a long traceback without most calls inside libraries: what is kept of it is a tail, which shall hold the
    script's own lines. The log has the whole."""
    blocks: list[tuple[Optional[bool], str]] = []  # a library's call, the script's own, or None for any other line
    for line in text.splitlines(True):
        place = PLACE.match(line)
        if place:
            blocks.append((bool(LIBRARY.search(place[1])), line))
        elif blocks and blocks[-1][0] is not None and line.startswith("  "):
            blocks[-1] = (blocks[-1][0], blocks[-1][1] + line)
        else:
            blocks.append((None, line))
    runs = [(kind, [block for _, block in run]) for kind, run in itertools.groupby(blocks, lambda block: block[0])]
    if text.count("\n") <= _SHORT_TRACEBACK or all(kind is not False for kind, _ in runs):
        return text
    shown = []
    for number, (kind, run) in enumerate(runs):
        last = number + 1 == len(runs) or runs[number + 1][0] is None
        kept = _LIBRARY_CALLS_KEPT if last else 0
        if kind and len(run) > kept + 1:
            shown.append(f"  ... {len(run) - kept} calls inside libraries ...\n")
            run = run[len(run) - kept :]
        shown += run
    return "".join(shown)


def describe(error: BaseException) -> dict[str, str]:
    """Return an exception as JSON."""
    import traceback

    trace = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    return {"type": type(error).__name__, "message": str(error), "traceback": trace[-8192:]}


def find_exceptions(lines: str) -> list[tuple[str, str]]:
    """Return type and message of the exceptions whose tracebacks a program wrote at last, one of each rank in it."""
    texts: dict[str, list[str]] = {}
    for line in lines.splitlines():
        front = _RANK_IN_FRONT.match(line)
        texts.setdefault(front[0].strip() if front else "", []).append(line[front.end() :] if front else line)
    found = []
    for lines_ in texts.values():
        frames = [number for number, line in enumerate(lines_) if PLACE.match(line)]
        after = itertools.dropwhile(lambda line: line.startswith("    "), lines_[frames[-1] + 1 :] if frames else [])
        last = _EXCEPTION.match(next(after, ""))
        if last:
            found.append((last[1], last[2] or ""))
    return found


def without_own_frames(error: BaseException, trace: Any) -> Any:
    """Return the part of a traceback that is the program's own; all of it where there is none."""
    users = trace
    while users is not None and is_own_file(users.tb_frame.f_code.co_filename):
        users = users.tb_next
    return users if users is not None or isinstance(error, SyntaxError) else trace


def hide_own_frames() -> None:
    """Let the interpreter show the traceback as if the launcher were not there."""
    hook = sys.excepthook

    def show(kind: Any, value: Any, trace: Any) -> None:
        trace = without_own_frames(value, trace)
        hook(kind, value.with_traceback(trace), trace)

    sys.excepthook = show


def record_exception(error: BaseException, path: str, about: dict[str, Any]) -> None:
    """Write the error file, unless the script wrote one itself or ends well."""
    code: Any = 1
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else 0 if error.code is None else 1
        if code == 0:
            return
    if os.path.exists(path):
        return
    import traceback

    kind, message = _name_exception(error)
    shown = error
    if isinstance(error, SystemExit) and not isinstance(error.code, str):
        message, shown = _explain_exit(error)
    if isinstance(shown, PermissionError):
        message += explain_permission(shown)
    trace = traceback.format_exception(type(shown), shown, without_own_frames(shown, shown.__traceback__))
    text = fold_libraries("".join(trace))[-16384:]
    record = {"type": kind, "message": message, "traceback": text, "exitCode": code & 255}
    record.update(rank=about["rank"], localRank=about["localRank"], restart=about["restart"], time=time.time())
    try:
        write_json(path, record)
    except OSError:
        pass  # a full disk must not hide the exception itself


def _name_exception(error: BaseException) -> tuple[str, str]:
    """Return an exception's type, with its module unless that is known to all, and its message."""
    kind = type(error)
    place = "" if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}."
    try:
        message = str(error)
    except Exception:
        message = "<the exception cannot be shown>"
    if len(message) > 2 * _MESSAGE_PART:  # a helper's whole traceback says at its end what went wrong
        message = f"{message[:_MESSAGE_PART]}\n...\n{message[-_MESSAGE_PART:]}"
    return place + kind.__qualname__, message


def _explain_exit(error: SystemExit) -> tuple[str, BaseException]:
    """Return why a script ended itself with a mere number, and whose traceback shows it.

    Many wrappers (hydra's is one) write what went wrong to the log, and then exit: the exception they had caught is
    the cause, and tells a secondary failure from a root cause.
    """
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is not None and trace.tb_frame.f_globals.get("__name__") == "argparse":
        message = trace.tb_frame.f_locals.get("message")
        if isinstance(message, str):
            return message.strip(), error
    caught = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if isinstance(caught, Exception):
        return ": ".join(filter(None, _name_exception(caught))), caught
    return str(error), error


def explain_permission(error: PermissionError) -> str:
    """Return who was denied what: the process's user and groups, and the owner and mode of the path."""
    groups = ",".join(map(str, sorted({os.getegid(), *os.getgroups()})))
    process = f"process of uid {os.geteuid()}, groups {groups}"
    place = os.path.abspath(error.filename) if isinstance(error.filename, str) else "/"
    while place != "/":
        try:
            found = os.stat(place)
        except OSError:
            place = os.path.dirname(place)  # what was to be made is not there; its folder is
            continue
        mode = f"mode {found.st_mode & 0o7777:04o}"
        return f" ({process}; {place} is owned by uid {found.st_uid}, group {found.st_gid}, {mode})"
    return f" ({process})"

"""Uncaught exceptions of a rank, as its error file has them.

This module is loaded before the program starts: a rank without free file descriptors cannot import one later.
"""

import errno
import itertools
import linecache
import os
import resource
import signal
import stat
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from types import CodeType, FrameType
from typing import Any, NamedTuple

from ..base.exceptions import (
    CHAIN_LIMIT,
    CHAIN_PART,
    FILE,
    LIBRARY,
    LINE_LIMIT,
    NOT_EXECUTABLE,
    PLACE,
    ExceptionFacts,
    FailingCode,
    format_exception,
    is_remote_text,
    shorten,
    shorten_entry,
)
from ..base.files import is_own_file, write_json
from .circumstances import find_circumstance
from .ended_children import find_ended_child
from .failing_code import find_failing_code
from .helper_errors import find_helper_code
from .lasting_files import is_lasting_error, is_lasting_file
from .read_files import ReadFile, find_named_file, find_read_file, is_parser_error
from .script_objects import is_instance

_SHORT_TRACEBACK = 15  # lines
_LIBRARY_CALLS_KEPT = 2
_RECORDED_LIMIT = 16384  # characters of a traceback in an error file
_GROUP_LIMIT = 8  # of a group
_PLACE_LIMIT = 120
_SOURCE_LIMIT = 1 << 20
_FAILED_STATUSES = range(400, 600)  # of HTTP, RFC 9110
_SERIALIZATION = os.path.join("torch", "serialization.py")
_PACKAGES = "-packages"  # in the paths of those that Python itself does not have
_CUT_TEXT = "unexpected end of data"  # of codecs that decode several bytes
_OF_QUERIES = (1, 19, 20, 21, 25)  # of SQLite: error, constraint, mismatch, misuse, range
# OSErrors whose number is not the system's.
_OWN_NUMBERS = ("ssl.SSLError", "socket.gaierror", "socket.herror")


class ScriptCall(NamedTuple):
    """The line of the script that calls a function of a library."""

    path: str
    line: int

    @property
    def place(self) -> str:
        """The line as people write it: ``train.py:12``."""
        return f"{os.path.basename(self.path)}:{self.line}"[:_PLACE_LIMIT]


def find_call(frame: Any = None) -> ScriptCall:
    """Return the innermost line of the program that is not in a library. ``frame``: the first one; None: the caller."""
    frame = frame or sys._getframe(1)
    call = ScriptCall("", 0)
    while frame is not None:
        path = frame.f_code.co_filename
        if not is_own_file(path):
            call = ScriptCall(path, frame.f_lineno)
            if not LIBRARY.search(path):
                break
        frame = frame.f_back
    return call


def read_source(path: str) -> str:
    """Return the text of a source file; empty if it cannot be read."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read(_SOURCE_LIMIT)
    except (OSError, ValueError):
        return ""


class _Block(NamedTuple):
    """Lines of a traceback. ``in_library``: of a call in a library or in the script; None for any other line."""

    in_library: bool | None
    text: str


def fold_libraries(text: str) -> str:
    """Replace most library calls of a long traceback by their number.

    The termination message keeps only the tail, which should contain the script's own lines. The log has everything.
    """
    blocks = _split_calls(text)
    if text.count("\n") <= _SHORT_TRACEBACK or all(block.in_library is not False for block in blocks):
        return text

    runs = [
        (in_library, [block.text for block in run])
        for in_library, run in itertools.groupby(blocks, lambda block: block.in_library)
    ]
    lines: list[str] = []
    for index, (in_library, calls) in enumerate(runs):
        is_innermost = index + 1 == len(runs) or runs[index + 1][0] is None
        kept = _LIBRARY_CALLS_KEPT if is_innermost else 0
        folded = len(calls) - kept
        if in_library and folded > 1:
            lines.append(f"  ... {folded} calls inside libraries ...\n")
            calls = calls[folded:]
        lines += calls
    return "".join(lines)


def _split_calls(text: str) -> list[_Block]:
    """Split a traceback into calls, each with its source lines, and other lines."""
    blocks: list[_Block] = []
    for line in text.splitlines(True):
        place = PLACE.match(line)
        if place:
            blocks.append(_Block(bool(LIBRARY.search(place[1])), line))
        elif blocks and blocks[-1].in_library is not None and line.startswith("  "):
            blocks[-1] = blocks[-1]._replace(text=blocks[-1].text + line)
        else:
            blocks.append(_Block(None, line))
    return blocks


def without_own_frames(error: BaseException, trace: Any) -> Any:
    """Return a traceback without the launcher's frames; all of it if the program has no frame.

    They are below the program, and between it and PyTorch where the launcher wraps a method.
    """
    users = _skip_own_frames(trace)
    if users is None and not isinstance(error, SyntaxError):
        return trace
    frame = users
    while frame is not None:
        frame.tb_next = _skip_own_frames(frame.tb_next)
        frame = frame.tb_next
    return users


def _skip_own_frames(trace: Any) -> Any:
    while trace is not None and is_own_file(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    return trace


def hide_own_frames() -> None:
    """Make the interpreter print tracebacks without the launcher's frames."""
    hook = sys.excepthook

    def show(kind: Any, value: Any, trace: Any) -> None:
        trace = without_own_frames(value, trace)
        hook(kind, value.with_traceback(trace), trace)

    sys.excepthook = show


def record_exception(error: BaseException, path: str, about: Mapping[str, Any], *, ends: bool = True) -> None:
    """Write a rank's error file, unless the script wrote one or exits with code 0.

    ``about``: the rank, its local rank, its start and the number of restarts, as in the worker's own record; ``ends``:
    whether the process certainly ends.
    """
    code = find_exit_code(error)
    if code == 0 or os.path.exists(path):
        return

    if ends:
        _drop_child_handler()
        _free_descriptor()
    kind, message = _describe_exception(error)
    explained = error
    if isinstance(error, SystemExit) and not is_instance(error.code, str):
        message, explained = _explain_exit(error)
    links = list(_walk_chain(explained))
    for link in links:
        if isinstance(link.error, PermissionError) and not link.handled:
            message += explain_permission(link.error)
            break
    since = about["started"]
    facts = [_build_facts(link, since) for link in links]
    message, facts = _add_circumstance(links, message, facts)
    read = next(filter(None, map(_find_file, links)), None) or find_named_file(message)
    if read is not None and not any(item.content for item in facts):
        message += read.describe()
        is_kept = is_lasting_file(read.path, since)
        facts = [_add_file(item, link.error, read, is_kept=is_kept) for item, link in zip(facts, links, strict=True)]
    frames = without_own_frames(explained, explained.__traceback__)
    child = find_ended_child(explained)
    record = {
        "type": kind,
        "message": message,
        "chain": [item._asdict() for item in facts],
        "child": child,
        "traceback": fold_libraries(format_exception(explained, frames))[-_RECORDED_LIMIT:],
        "exitCode": code & 255,
        "rank": about["rank"],
        "localRank": about["localRank"],
        "restart": about["restart"],
        "time": time.time(),
    }
    try:
        write_json(path, record)
    except OSError:
        pass  # a full disk must not hide the exception itself


def _add_file(facts: ExceptionFacts, error: BaseException, read: ReadFile, *, is_kept: bool) -> ExceptionFacts:
    """Add the file that an exception is about. ``is_kept``: whether the next attempt finds it as it is."""
    is_of_package = _PACKAGES in facts.place
    is_parsed = is_parser_error(error) or (isinstance(error, OSError) and error.errno is None and is_of_package)
    failing = facts.failing
    if is_parsed and not is_kept:
        failing = failing._replace(sources=f"{failing.sources} {FILE}".strip())
    return facts._replace(content=read.content, lasting=facts.lasting or (is_kept and is_parsed), failing=failing)


def _drop_child_handler() -> None:
    """Remove the handler for ended children: the DataLoader's raises again for each of its workers that is killed."""
    for _ in range(CHAIN_LIMIT):
        try:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            return
        except ValueError:
            return  # not the main thread, which alone runs handlers
        except BaseException:  # by the handler of a signal that arrived before
            continue


def _free_descriptor() -> None:
    """Close stdin if no file descriptor is free: source lines and the error file need one."""
    try:
        os.close(os.open(os.devnull, os.O_RDONLY))
    except OSError:
        os.close(0)


class _Link(NamedTuple):
    """An exception of a chain; ``handled`` as in ExceptionFacts."""

    error: BaseException
    handled: bool


def _walk_chain(error: BaseException) -> Iterator[_Link]:
    """Yield an exception and those that it names: causes, members of a group, arguments, and the handled ones."""
    waiting = [_Link(error, handled=False)]
    seen: set[int] = set()
    while waiting and len(seen) < CHAIN_LIMIT:
        waiting.sort(key=lambda link: link.handled)
        link = waiting.pop(0)
        if id(link.error) in seen:
            continue
        seen.add(id(link.error))
        yield link

        error = link.error
        members = reversed(getattr(error, "exceptions", ())[:_GROUP_LIMIT])  # the first one decides, as the innermost
        named = (error.__cause__, *members, *error.args[:CHAIN_LIMIT])
        waiting += [_Link(cause, link.handled) for cause in named if is_instance(cause, BaseException)]
        if error.__context__ is not None and not error.__suppress_context__:
            waiting.append(_Link(error.__context__, handled=True))


def _add_circumstance(
    links: list[_Link], message: str, facts: list[ExceptionFacts]
) -> tuple[str, list[ExceptionFacts]]:
    """Add what the process shows about the first exception of a chain about which it shows anything."""
    for number, link in enumerate(links):
        found = None
        if not link.handled:
            with suppress(Exception):  # of the script's own classes; what is known without it is recorded
                found = find_circumstance(link.error, facts[number])
        if found is not None:
            facts[number] = facts[number]._replace(content=found.content)
            return message + found.note, facts
    return message, facts


def _find_file(link: _Link) -> ReadFile | None:
    """Return the file that an exception is about but does not name."""
    names_file = isinstance(link.error, (SyntaxError, ImportError)) or getattr(link.error, "filename", None)
    if link.handled or names_file:
        return None
    trace = link.error.__traceback__
    while trace is not None:
        if _is_save(trace.tb_frame.f_code):
            return None  # its unfinished file is a consequence
        trace = trace.tb_next
    return find_read_file(link.error, LIBRARY)


def _is_save(code: CodeType) -> bool:
    """Return whether a function is torch.save."""
    return code.co_name == "save" and code.co_filename.endswith(_SERIALIZATION)


def _find_status(error: BaseException) -> int | None:
    """Return the HTTP status of a library's exception: of itself, or of its response (requests, httpx, botocore)."""
    if type(error).__module__ in ("builtins", "__main__"):
        return None
    response: Any = getattr(error, "response", None)
    metadata: Any = response.get("ResponseMetadata") if is_instance(response, dict) else None
    values = [getattr(holder, name, None) for holder in (error, response) for name in ("status_code", "status", "code")]
    values.append(metadata.get("HTTPStatusCode") if is_instance(metadata, dict) else None)
    return next((value for value in values if type(value) is int and value in _FAILED_STATUSES), None)


def _build_facts(link: _Link, since: float) -> ExceptionFacts:
    """Return the facts about an exception. ``since``: when the rank started."""
    error = link.error
    types = _name_types(error)
    is_numbered = isinstance(error, OSError) and isinstance(error.errno, int) and not set(types) & set(_OWN_NUMBERS)
    facts = ExceptionFacts(
        types,
        shorten(_describe_exception(error)[1], CHAIN_PART),
        error.errno if is_numbered else None,  # type: ignore[attr-defined]
        _find_path(error),
        handled=link.handled,
        status=_find_status(error),
        hides=_name_types(error.__context__) if error.__suppress_context__ and not error.__cause__ else (),
        content=NOT_EXECUTABLE if _is_not_executable(error) else "",
    )
    trace = error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        if not is_own_file(code.co_filename):
            line = linecache.getline(code.co_filename, trace.tb_lineno, trace.tb_frame.f_globals)
            facts = facts._replace(place=code.co_filename, line=line.strip()[:LINE_LIMIT])
        if _is_save(code):  # its errors have no path
            file = trace.tb_frame.f_locals.get("f")
            facts = facts._replace(path=file if type(file) is str else facts.path)
        trace = trace.tb_next
    if isinstance(error, RuntimeError) and facts.path and not os.path.isdir(os.path.dirname(facts.path) or "."):
        facts = facts._replace(errno=errno.ENOENT)  # of torch.save, whose errors have no number
    failing = FailingCode()
    if not link.handled:
        with suppress(Exception):  # what is known without it is recorded
            helper = find_helper_code(error)
            is_remote = error.__cause__ is not None and is_remote_text(_name_type(type(error.__cause__)))
            failing = helper or (failing if is_remote else find_failing_code(error, since))
    return facts._replace(lasting=_is_lasting(error, facts, since), failing=failing)


def _is_lasting(error: BaseException, facts: ExceptionFacts, since: float) -> bool:
    """Return whether the next attempt would find what an exception is about as this one did."""
    if isinstance(error, UnicodeDecodeError):
        return error.reason != _CUT_TEXT  # a file that is still written ends within a character
    if getattr(error, "sqlite_errorcode", None) in _OF_QUERIES:
        return True
    if facts.errno == errno.EFBIG:
        return resource.getrlimit(resource.RLIMIT_FSIZE)[0] != resource.RLIM_INFINITY
    return bool(facts.path) and facts.errno is not None and is_lasting_error(facts.errno, facts.path, since)


def find_exit_code(error: BaseException) -> int:
    """Return the exit code with which the interpreter ends for an uncaught exception."""
    if not isinstance(error, SystemExit):
        return 1
    if error.code is None:
        return 0
    return int.__int__(error.code) if is_instance(error.code, int) else 1  # type: ignore[arg-type]


def _describe_exception(error: BaseException) -> tuple[str, str]:
    """Return an exception's type, with its module unless that is builtins or the script, and its message."""
    try:
        message = str(error)
    except Exception:  # the script's own __str__ may raise anything
        message = "<the exception cannot be shown>"
    return _name_type(type(error)), shorten_entry(message, CHAIN_PART)


def _name_types(error: BaseException | None) -> tuple[str, ...]:
    """Return the names of an exception's class and its bases; empty without an exception."""
    if error is None:
        return ()
    bases = [base for base in type(error).__mro__ if base not in (object, BaseException, Exception)]
    return tuple(_name_type(base) for base in bases[:CHAIN_LIMIT]) or ("Exception",)


def _name_type(kind: type) -> str:
    module = "" if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}."
    return module + kind.__qualname__


def _explain_exit(error: SystemExit) -> tuple[str, BaseException]:
    """Return why a script exited with a mere number, and the exception whose traceback shows it.

    Many wrappers, such as hydra's, log an exception and then exit. The caught exception is the cause, and
    distinguishes a secondary failure from a root cause.
    """
    frame = _find_innermost(error)
    if frame is not None and frame.f_globals.get("__name__") == "argparse":
        message = frame.f_locals.get("message")
        if isinstance(message, str):
            return message.strip(), error
    caught = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if isinstance(caught, Exception):
        return ": ".join(filter(None, _describe_exception(caught))), caught
    return _describe_exception(error)[1], error


def _find_innermost(error: BaseException) -> FrameType | None:
    """Return the frame that raised an exception; None: it was not raised."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return None if trace is None else trace.tb_frame


def _find_path(error: BaseException) -> str:
    """Return the path that an error of the system is about; empty: it has none."""
    path = getattr(error, "filename", None) if isinstance(error, OSError) else None
    return os.fsdecode(path) if isinstance(path, (str, bytes, os.PathLike)) else ""


def _is_not_executable(error: BaseException) -> bool:
    """Return whether subprocess could not start a program because nobody may execute its file."""
    frame = _find_innermost(error)
    if frame is None or frame.f_globals.get("__name__") != "subprocess":
        return False
    try:
        mode = os.stat(_find_path(error)).st_mode
    except OSError:
        return False
    return stat.S_ISREG(mode) and not mode & 0o111


def explain_permission(error: PermissionError) -> str:
    """Return which access was denied: the process's user and groups, and the owner and mode of the path."""
    groups = ",".join(map(str, sorted({os.getegid(), *os.getgroups()})))
    process = f"process of uid {os.geteuid()}, groups {groups}"
    path = _find_path(error)
    path = os.path.abspath(path) if path else "/"
    while path != "/":
        try:
            status = os.stat(path)
        except OSError:
            path = os.path.dirname(path)  # a path that could not be created: its folder decides
            continue
        mode = f"mode {status.st_mode & 0o7777:04o}"
        return f" ({process}; {path} is owned by uid {status.st_uid}, group {status.st_gid}, {mode})"
    return f" ({process})"

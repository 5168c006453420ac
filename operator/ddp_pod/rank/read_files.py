"""The file that failing code was reading: errors of parsers, unlike those of the system, do not name it.

It is found in the frames of the exception: an argument of the library function that the script called, or an open file
of the script itself. This module is loaded before the program starts, like ``tracebacks``.
"""

import io
import os
import re
import stat
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from ..base.exceptions import CUT_ARCHIVE, EMPTY, HTML_PAGE, LFS_POINTER
from ..base.files import is_own_file
from .script_objects import is_instance

_PAGE: Final = re.compile(rb"\s*<(!doctype html|html)\b", re.I)
_LFS: Final = b"version https://git-lfs.github.com/spec/"
_ZIP: Final = b"PK\x03\x04"
_ZIP_END: Final = b"PK\x05\x06"  # of the record at an archive's end, before a comment of at most 65,535 bytes
_ZIP_TAIL: Final = 65_557
_QUOTED: Final = re.compile(r"'([^'\n]{1,300})'")
_MESSAGE_END: Final = 1000  # characters
_FIRST_BYTES: Final = 256
_MOST_VALUES: Final = 64  # of a frame
_PATH_LIMIT: Final = 300  # characters
# Of parsers. Those in C have no frame: the script's own open file is what they read.
_PARSERS: Final = {
    "UnpicklingError",
    "EOFError",
    "UnicodeDecodeError",
    "JSONDecodeError",
    "TOMLDecodeError",
    "YAMLError",
    "Error",
    "error",
    "BadGzipFile",
    "BadZipFile",
    "LZMAError",
    "SafetensorError",
}


class ReadFile(NamedTuple):
    """A file with its size in bytes. ``content``: what it is instead of what was expected; empty: that is unknown."""

    path: str
    size: int
    content: str = ""

    def describe(self) -> str:
        """Return the file in words, for the end of a message."""
        content = f", {self.content}" if self.content else ""
        return f" (file {self.path}: {self.size} bytes{content})"


def find_read_file(error: BaseException, library: "re.Pattern[str]") -> ReadFile | None:
    """Return the file that the code which raised an exception was reading; None if its frames show none.

    ``library``: matches paths of code that is not the script's.
    """
    call, own = _find_frames(error, library)
    if call is not None:
        return next(_examine(_list_arguments(call)), None)
    if own is not None and is_parser_error(error):
        return next(_examine(value for value in _list_values(own) if not is_instance(value, str)), None)
    return None


def list_read_files(error: BaseException, library: "re.Pattern[str]") -> Iterator[ReadFile]:
    """Yield the files that the code which raised an exception may have read. ``library``: see ``find_read_file``."""
    call, own = _find_frames(error, library)
    if call is not None:
        yield from _examine(_list_arguments(call))
    if own is not None:
        yield from _examine(_list_values(own))


def _find_frames(error: BaseException, library: "re.Pattern[str]") -> tuple[Any, Any]:
    """Return the library function that the script called last, and the script's innermost frame; None without one."""
    call: Any = None
    own: Any = None
    trace = error.__traceback__
    while trace is not None:
        path = trace.tb_frame.f_code.co_filename
        if is_own_file(path):
            pass
        elif not library.search(path):
            own = trace.tb_frame
            call = None
        elif call is None:
            call = trace.tb_frame
        trace = trace.tb_next
    return call, own


def _list_arguments(call: Any) -> Iterator[Any]:
    names = call.f_code.co_varnames[: call.f_code.co_argcount]
    return (call.f_locals.get(name) for name in names)


def find_named_file(message: str) -> ReadFile | None:
    """Return the file that the end of a message names, if it is not what its reader expected; None for any other.

    The exception of a DataLoader worker has no frames here, but many libraries quote the path.
    """
    paths = _QUOTED.findall(message[-_MESSAGE_END:])
    files = filter(None, map(examine_file, paths))
    return next((file for file in files if file.content not in ("", EMPTY)), None)


def is_parser_error(error: BaseException) -> bool:
    """Return whether an exception is about the content of a file."""
    is_of_torch = type(error) is RuntimeError and "PytorchStreamReader" in str(error)
    names = {kind.__name__ for kind in type(error).__mro__}
    names -= {"Error"} if isinstance(error, OSError) else set()  # of shutil, about paths
    return is_of_torch or not names.isdisjoint(_PARSERS)


def _list_values(frame: Any) -> Iterator[Any]:
    """Yield the last values of a frame: module code has many, and the file is opened shortly before it is read."""
    yield from reversed(list(frame.f_locals.values())[-_MOST_VALUES:])


def _examine(values: Iterator[Any]) -> Iterator[ReadFile]:
    for value in values:
        path = _find_path(value)
        found = examine_file(path) if path else None
        if found is not None:
            yield found


def _find_path(value: Any) -> str:
    """Return the path of a value that is one, or a file that is open for reading; empty for any other."""
    if is_instance(value, io.IOBase):  # it may be closed by now
        name = getattr(value, "name", "")
        mode = getattr(value, "mode", "")
        return name if type(name) is str and type(mode) is str and mode.startswith("r") else ""
    if type(value).__module__ == "pathlib":
        return str(value)
    return value if type(value) is str and len(value) <= _PATH_LIMIT else ""


def examine_file(path: str) -> ReadFile | None:
    """Return what a regular file is; None if there is none at the path, or it cannot be read."""
    try:
        status = os.stat(path)
        if not stat.S_ISREG(status.st_mode):
            return None
        with open(path, "rb") as file:
            first = file.read(_FIRST_BYTES)
    except (OSError, ValueError):
        return None
    return ReadFile(path, status.st_size, _name_content(path, first, status.st_size))


def _name_content(path: str, first: bytes, size: int) -> str:
    if not size:
        return EMPTY
    if first.startswith(_LFS):
        return LFS_POINTER
    if _PAGE.match(first):
        return HTML_PAGE
    if first.startswith(_ZIP) and not _is_archive(path, size):
        return CUT_ARCHIVE
    return ""


def _is_archive(path: str, size: int) -> bool:
    """Return whether a zip archive has its end (APPNOTE.TXT 4.3.16)."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, size - _ZIP_TAIL))
            return _ZIP_END in file.read(_ZIP_TAIL)
    except OSError:
        return True

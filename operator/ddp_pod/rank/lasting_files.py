"""Whether the next attempt would find a file or folder as a failing rank did.

It would if the path is on a disk of its own, which no other machine writes, and nothing has changed there since the
rank started. This module is loaded before the program starts, like ``tracebacks``.
"""

import errno
import itertools
import os
from typing import Final, NamedTuple

from ..base.exceptions import LIBRARY
from ..base.files import LOCAL_TYPES

_MOUNTS: Final = "/proc/self/mountinfo"
_MOST_MOUNTS: Final = 1000
# Errors that the path decides, or the innermost folder of it that exists.
_BY_PATH: Final = (
    errno.EACCES, errno.EPERM, errno.EEXIST, errno.EISDIR, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP,
)  # fmt: skip


class _Mount(NamedTuple):
    """A mounted file system. ``is_read_only``: the mount is, although its file system can be written."""

    point: str
    kind: str
    is_read_only: bool


def is_lasting_error(number: int, path: str, since: float) -> bool:
    """Return whether an error of the system about a path would occur again. ``since``: when the rank started.

    A peer may yet create a missing path, except in the root folder or on a volume that is mounted read-only. A folder
    that is empty may be one in which a volume is not mounted yet.
    """
    path = os.path.abspath(path)
    mount = _find_mount(path)
    if mount is None:
        return False
    if number == errno.EROFS:
        return mount.is_read_only
    if number == errno.ENOENT and LIBRARY.search(path):
        return True
    if mount.kind not in LOCAL_TYPES:
        return False
    try:
        if number == errno.ENOENT:
            folder = _find_existing(path)
            is_fixed = folder != path and (folder == "/" or mount.is_read_only)
            return is_fixed and os.stat(folder).st_mtime < since and not _is_empty(folder)
        return number in _BY_PATH and os.lstat(_find_existing(path)).st_ctime < since
    except OSError:
        return False


def is_lasting_file(path: str, since: float) -> bool:
    """Return whether the content of a file is that of before the rank's start, and stays."""
    mount = _find_mount(os.path.abspath(path))
    try:
        return mount is not None and mount.kind in LOCAL_TYPES and os.stat(path).st_mtime < since
    except OSError:
        return False


def _is_empty(folder: str) -> bool:
    with os.scandir(folder) as entries:
        return not any(entries)


def _find_existing(path: str) -> str:
    """Return the path, or the innermost folder above it that exists."""
    while path != "/" and not os.path.lexists(path):
        path = os.path.dirname(path)
    return path


def _find_mount(path: str) -> _Mount | None:
    """Return the file system that has an absolute path; None on systems without /proc."""
    try:
        with open(_MOUNTS, encoding="utf-8", errors="replace") as file:
            mounts = [_parse_mount(line) for line in itertools.islice(file, _MOST_MOUNTS)]
    except (OSError, ValueError):
        return None
    holders = [mount for mount in mounts if path.startswith(mount.point.rstrip("/") + "/") or path == mount.point]
    return max(reversed(holders), key=lambda mount: len(mount.point), default=None)


def _parse_mount(line: str) -> _Mount:
    """Parse a line of mountinfo (proc(5)). Raises: ValueError."""
    place, _, system = line.partition(" - ")
    fields = place.split()
    kind, _, options = system.split(maxsplit=2)
    if len(fields) < 6:
        raise ValueError(line)
    is_read_only = "ro" in fields[5].split(",") and "ro" not in options.strip().split(",")
    return _Mount(fields[4].replace("\\040", " "), kind, is_read_only)

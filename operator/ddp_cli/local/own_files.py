"""Open files that somebody else may have planted: without following a link, and without waiting for a pipe.

A run folder may come from a cloned repository, or stand in a folder where others write. A planted link would make a
command read or overwrite any file of its user, a planted pipe would make it wait for ever.
"""

import os
from pathlib import Path
from typing import Final

from ddp_pod.contract.plain_files import NEVER_WAIT, open_plain

_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | NEVER_WAIT


def open_below(root: Path, path: str, flags: int = os.O_RDONLY) -> int:
    """Return the descriptor of a regular file below a folder; no part of the path is a link. Raises: OSError."""
    *folders, name = Path(os.path.relpath(path, root)).parts
    if ".." in folders:
        raise OSError(f"{path} is outside of {root}")
    folder = open_own_folder(root)
    try:
        for part in folders:
            inner = os.open(part, _FOLDER, dir_fd=folder)
            os.close(folder)
            folder = inner
        return open_plain(name, flags, folder=folder)
    finally:
        os.close(folder)


def open_own_folder(path: str | Path) -> int:
    """Return the descriptor of a real folder of this user. Raises: OSError."""
    descriptor = os.open(path, _FOLDER)
    owner = os.fstat(descriptor).st_uid
    if owner == os.geteuid():
        return descriptor
    os.close(descriptor)
    raise PermissionError(f"{path} belongs to another user (uid {owner})")


def make_own_folder(path: Path) -> None:
    """Create a folder for this user alone, unless the user has it. Raises: OSError."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    os.close(open_own_folder(path))


def is_own_folder(path: Path) -> bool:
    """Return whether a path is a real folder of this user."""
    try:
        os.close(open_own_folder(path))
    except OSError:
        return False
    return True

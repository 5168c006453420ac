"""Open files in folders where others can plant links and pipes."""

import os
import stat

NEVER_WAIT = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def open_plain(name: str | os.PathLike[str], flags: int, mode: int = 0o600, *, folder: int | None = None) -> int:
    """Return the descriptor of a regular file, without following a link and without waiting for a pipe.

    ``folder``: the descriptor of its folder. Raises: OSError.
    """
    descriptor = os.open(name, flags | NEVER_WAIT, mode, dir_fd=folder)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise OSError(f"{name} is no regular file")

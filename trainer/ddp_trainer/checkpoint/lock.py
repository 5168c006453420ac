"""The lock of a checkpoint folder: without an operator that counts attempts, only one run at a time may write there.

It is a POSIX record lock: the kernel releases it when the process exits or is killed, forked data readers do not
inherit it, and network file systems support it.
"""

import errno
import fcntl
import json
import os
import socket
import time
from pathlib import Path

from ddp_sdk.errors import UserError
from ddp_trainer.errors import warn

FILE = ".lock"
# A rank 0 of the same run on another node may still be writing its last checkpoint.
_MAX_WAIT_SECONDS = 30.0
_POLL_SECONDS = 0.1
_HELD = (errno.EACCES, errno.EAGAIN)
_UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
_MAX_BYTES = 4096


class FolderLock:
    """The lock of one folder, held by this process from :meth:`acquire` to :meth:`release`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._path = folder / FILE
        self._descriptor: int | None = None

    def acquire(self) -> None:
        """Take the lock; wait up to half a minute for another run to end.

        Raises :class:`UserError` if another run still holds it, OSError if the folder is not writable.
        """
        deadline = time.monotonic() + _MAX_WAIT_SECONDS
        warned = False
        while not self._try_acquire():
            holder = _read_owner(self._path)
            if time.monotonic() >= deadline:
                raise UserError(
                    "checkpoint.dir",
                    f"{self._folder} is in use by {holder}",
                    "stop that run, wait for its end, or give another --checkpoint-dir",
                )
            if not warned:
                warn(f"{self._folder} is in use by {holder}; waiting up to {_MAX_WAIT_SECONDS:g} s for its end")
                warned = True
            time.sleep(_POLL_SECONDS)

    def release(self) -> None:
        """Remove the file and release the lock; a second call does nothing."""
        if self._descriptor is None:
            return
        descriptor = self._descriptor
        self._descriptor = None
        # Removed while locked: a waiting run then sees that its file is no longer in the folder, and opens a new one.
        if _is_file_at(descriptor, self._path):
            self._path.unlink(missing_ok=True)
        os.close(descriptor)

    def _try_acquire(self) -> bool:
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(descriptor)
            if error.errno in _UNSUPPORTED:
                self._path.unlink(missing_ok=True)
                warn(f"the file system of {self._folder} does not support locks: run only one run at a time with it")
                return True
            if error.errno in _HELD:
                return False
            raise
        if not _is_file_at(descriptor, self._path):
            os.close(descriptor)
            return False
        owner = {"host": socket.gethostname(), "pid": os.getpid(), "started": time.time()}
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(owner).encode(), 0)
        self._descriptor = descriptor
        return True


def _is_file_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _read_owner(path: Path) -> str:
    try:
        with open(path, "rb") as file:
            owner = json.loads(file.read(_MAX_BYTES))
        started = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(float(owner["started"])))
        return f"process {int(owner['pid'])} on {owner['host']}, which started there at {started}"
    except (OSError, ValueError, LookupError, TypeError, OverflowError):
        return "another run"

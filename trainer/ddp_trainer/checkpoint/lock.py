"""The lock of a checkpoint folder: where no attempts are counted, one run at a time writes there.

It is a POSIX record lock: the kernel releases it when the process ends, however it ends, forked readers of data do not
inherit it, and network file systems have it too.
"""

import errno
import fcntl
import json
import os
import socket
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from ddp_trainer.errors import UserError, warn

FILE = ".lock"
# A rank 0 of the same run on another node may still be writing its last checkpoint.
_PATIENCE_SECONDS = 30.0
_POLL_SECONDS = 0.1
_HELD = (errno.EACCES, errno.EAGAIN)
_UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
_MOST_BYTES = 4096


@dataclass(frozen=True)
class Owner:
    """The process that holds a folder."""

    host: str
    pid: int
    started: float

    def describe(self) -> str:
        """Name the process in a message."""
        started = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.started))
        return f"process {self.pid} on {self.host}, which started there at {started}"


class FolderLock:
    """The lock of one folder, held by this process from :meth:`acquire` to :meth:`release`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._path = folder / FILE
        self._descriptor: int | None = None

    def acquire(self) -> None:
        """Take the lock, after waiting half a minute for the end of another run.

        Raises :class:`UserError` where another run keeps it, OSError where the folder can't be written to.
        """
        deadline = time.monotonic() + _PATIENCE_SECONDS
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
                warn(f"{self._folder} is in use by {holder}; waiting up to {_PATIENCE_SECONDS:g} s for its end")
                warned = True
            time.sleep(_POLL_SECONDS)

    def release(self) -> None:
        """Remove the file and release the lock. Twice is once."""
        if self._descriptor is None:
            return
        descriptor = self._descriptor
        self._descriptor = None
        # While it is locked: whoever waits sees that its file is no longer the folder's, and opens the next one.
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
                warn(f"the file system of {self._folder} has no locks: start one run at a time with this folder")
                return True
            if error.errno in _HELD:
                return False
            raise
        if not _is_file_at(descriptor, self._path):
            os.close(descriptor)
            return False
        owner = Owner(socket.gethostname(), os.getpid(), time.time())
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(asdict(owner)).encode(), 0)
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
            values = json.loads(file.read(_MOST_BYTES))
        return Owner(str(values["host"]), int(values["pid"]), float(values["started"])).describe()
    except (OSError, ValueError, LookupError, TypeError, OverflowError):
        return "another run"

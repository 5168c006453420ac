"""Memory of pods on this machine, which ends with the pod as in a cluster: folders in /dev/shm."""

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Final

from ddp_cli.local.own_files import open_own_folder

_ROOT: Final = Path("/dev/shm")
_PREFIX: Final = "ddp-run-"


class SharedMemory:
    """One folder for each pod of a run, below a folder that belongs to this process.

    The process holds a lock on its folder: a run removes the folders of others that were killed.
    """

    def __init__(self, root: Path = _ROOT) -> None:
        self._root = root
        self._folder: Path | None = None
        self._descriptor = -1

    def create_folder(self, pod_uid: str) -> Path | None:
        """Return the folder of a pod; None if this machine has no shared memory."""
        with suppress(OSError):
            if self._folder is None:
                _remove_abandoned(self._root)
                self._create()
            assert self._folder is not None
            folder = self._folder / pod_uid
            folder.mkdir(mode=0o700, exist_ok=True)
            return folder
        return None

    def remove_folder(self, pod_uid: str) -> None:
        """Delete the memory of a pod that has ended."""
        if self._folder is not None:
            shutil.rmtree(self._folder / pod_uid, ignore_errors=True)

    def close(self) -> None:
        """Delete the memory of all pods."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            os.close(self._descriptor)
            self._folder = None

    def _create(self) -> None:
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=self._root))
        self._descriptor = os.open(folder, os.O_RDONLY)
        fcntl.flock(self._descriptor, fcntl.LOCK_EX)
        self._folder = folder


def _remove_abandoned(root: Path) -> None:
    """Delete the folders of this user whose process was killed."""
    for folder in root.glob(f"{_PREFIX}*"):
        try:
            descriptor = open_own_folder(folder)
        except OSError:
            continue  # another user's, or no folder
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        except OSError:
            pass  # its process runs
        finally:
            os.close(descriptor)

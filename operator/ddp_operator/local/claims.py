"""A lock for each claim: two runs at a time would overwrite each other's checkpoints."""

from __future__ import annotations

import fcntl
import os
import weakref
from contextlib import suppress
from pathlib import Path


class ClaimInUse(Exception):
    """Another `ddp run` writes to the claim. The text names it, if known."""


class ClaimLock:
    """The exclusive use of a claim until the process ends, however it ends."""

    def __init__(self, claims: Path, claim: str) -> None:
        """Take the lock. Raises: ClaimInUse, OSError."""
        claims.mkdir(parents=True, exist_ok=True)
        # Beside the claim's folder, which belongs to the training script. No claim's name begins with a dot.
        self._descriptor = os.open(claims / f".{claim}.lock", os.O_RDWR | os.O_CREAT, 0o666)
        self.release = weakref.finalize(self, os.close, self._descriptor)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(self._descriptor, 4096).decode("utf-8", "replace").strip()
            self.release()
            raise ClaimInUse(holder or "another `ddp run`") from None
        except OSError:
            pass  # a file system without locks

    def sign(self, holder: str) -> None:
        """Write who holds it, for the message to others."""
        with suppress(OSError):  # a full disk
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, holder.encode(), 0)

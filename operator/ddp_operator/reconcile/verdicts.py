"""Refusals of a job's spec, by a digest of what the check read, so that an unchanged spec is not checked again.

A pass over a refused job then costs next to nothing, however often its owner touches it. The memory of a job keeps the
digest and the start of the refusal, never the spec.
"""

import hashlib
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final

import msgspec

from ddp_operator.api.errors import FieldError, InvalidManifest
from ddp_operator.api.size import OversizeSpec

MAX_TEXT: Final = 2048
"""Kept characters of a refusal, more than a condition has."""
LIFETIME: Final = timedelta(seconds=240)
"""Time until a refused spec is checked again: a new CRD may change it, or the machine may have been too slow."""


def compute_digest(*read: Any) -> bytes:
    """Return the digest of what a check reads."""
    return hashlib.sha256(msgspec.json.encode(read)).digest()


@dataclass(slots=True)
class LastRefusal:
    """The last refusal by one check."""

    digest: bytes = b""
    text: str = ""
    is_oversize: bool = False
    since: datetime | None = None

    def holds(self, digest: bytes, now: datetime) -> bool:
        """Return whether the check has refused the same before."""
        return self.since is not None and self.digest == digest and abs(now - self.since) < LIFETIME

    def repeat_refusal(self, digest: bytes, now: datetime) -> None:
        """Raise the refusal again if it holds. Raises: InvalidManifest."""
        if self.holds(digest, now):
            kind = OversizeSpec if self.is_oversize else InvalidManifest
            raise kind([FieldError("", self.text)])

    def refuse(self, digest: bytes, error: InvalidManifest, now: datetime) -> None:
        """Note why a spec was refused."""
        self.digest = digest
        self.text = str(error)[:MAX_TEXT]
        self.is_oversize = isinstance(error, OversizeSpec)
        self.since = now

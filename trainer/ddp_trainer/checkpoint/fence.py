"""The fence of a checkpoint folder: of several attempts at one job, only the one that began last may write.

A node that lost its network still trains and still sees the shared disk, while the operator has long begun the next
attempt elsewhere. So every attempt (``DDP_ATTEMPT``, ``DDP_RUN_ID``) claims the folder when it begins, by a file in
``fence/`` with the next free number. A file is made with its content and only if the name is free, so of two attempts
that claim at once one is first and the other looks again. The claim with the highest number holds the folder. Nothing
is ever rewritten, which is what makes it safe on a network file system.

A check and the rename after it are two operations. What slips between them does no harm, because an attempt's files
carry its number: it can neither replace nor remove those of a later one (see :mod:`ddp_trainer.checkpoint.store`).
"""

import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from ddp_trainer import contract
from ddp_trainer.errors import Superseded, UserError

FOLDER = "fence"
# How long a claim may be there without its content, where the file system has no hard links.
_SECONDS_TO_WRITE = 2.0


@dataclass(frozen=True)
class Claim:
    """One attempt's place in the order of those that have begun."""

    number: int
    attempt: int
    run_id: str


@dataclass(frozen=True)
class Fence:
    """This attempt's side of the fence around ``folder``."""

    folder: Path
    attempt: int
    run_id: str

    @classmethod
    def from_environ(cls, folder: Path, environ: Mapping[str, str] = os.environ) -> Self | None:
        """The fence for this process; None where nobody counts attempts.

        Raises :class:`UserError` where DDP_ATTEMPT is not a number.
        """
        text = environ.get(contract.ENV_ATTEMPT)
        if not text:
            return None
        if not text.isdecimal():
            raise UserError(contract.ENV_ATTEMPT, f"is {text!r} in the environment", "unset it, or give 1, 2, ...")
        return cls(folder, int(text), environ.get(contract.ENV_RUN_ID, ""))

    def claim(self) -> None:
        """Claim the folder for this attempt; a restart within the attempt finds its claim and keeps it.

        Raises :class:`Superseded` where a later attempt has begun, OSError where the folder can't be written to.
        """
        self._home.mkdir(parents=True, exist_ok=True)
        while True:
            claims = self._claims()
            if claims:
                newest = claims[-1]
                if self._is_mine(newest):
                    return
                # Another job (its resource was deleted and made anew) counts from 1 again: the later comer wins.
                behind = (
                    _job(newest.run_id, newest.attempt) == _job(self.run_id, self.attempt)
                    and newest.attempt > self.attempt
                )
                if behind or any(self._is_mine(claim) for claim in claims):
                    raise self._superseded(newest)
            if self._create(claims[-1].number + 1 if claims else 1):
                return

    def check(self) -> None:
        """Raise :class:`Superseded` unless this attempt still holds the folder."""
        claims = self._claims()
        # An emptied folder is the user's doing and nobody else's claim.
        if claims and not self._is_mine(claims[-1]):
            raise self._superseded(claims[-1])

    @property
    def _home(self) -> Path:
        return self.folder / FOLDER

    def _is_mine(self, claim: Claim) -> bool:
        return (claim.attempt, claim.run_id) == (self.attempt, self.run_id)

    def _superseded(self, newest: Claim) -> Superseded:
        by = f"attempt {newest.attempt}" + (f" (run {newest.run_id})" if newest.run_id else "")
        return Superseded(f"{by} has taken over {self.folder}: this one, attempt {self.attempt}, writes no more")

    def _claims(self) -> list[Claim]:
        """All claims by their number; one whose writer died over it is left out."""
        try:
            paths = sorted(path for path in self._home.iterdir() if path.stem.isdecimal())
        except FileNotFoundError:
            return []
        claims = []
        for path in paths:
            claim = _read(path, patient=path is paths[-1])
            if claim is not None:
                claims.append(claim)
            elif path is paths[-1]:
                # Nobody's, but its number is taken.
                claims.append(Claim(int(path.stem), 0, "?"))
        return claims

    def _create(self, number: int) -> bool:
        """Make the claim ``number`` with its content at once; returns False where that number is taken by now."""
        path = self._home / f"{number:09d}.json"
        content = json.dumps({"attempt": self.attempt, "runId": self.run_id, "time": time.time()}).encode()
        temporary = self._home / f".{path.name}.{os.getpid()}.{id(self)}.tmp"
        try:
            temporary.write_bytes(content)
            os.link(temporary, path)
        except FileExistsError:
            return False
        except OSError:
            # No hard links here: the name is still taken by one process only, its content follows.
            try:
                with open(path, "xb") as file:
                    file.write(content)
            except FileExistsError:
                return False
        finally:
            temporary.unlink(missing_ok=True)
        return True


def _job(run_id: str, attempt: int) -> str:
    """The job in a run id, which is ``<job>-<attempt>`` (docs/pod-contract.md)."""
    return run_id.removesuffix(f"-{attempt}")


def _read(path: Path, *, patient: bool) -> Claim | None:
    """The claim in ``path``; None where it is not one, after waiting for its content if ``patient``."""
    deadline = time.monotonic() + _SECONDS_TO_WRITE
    while True:
        try:
            content = json.loads(path.read_bytes())
            return Claim(int(path.stem), int(content["attempt"]), str(content["runId"]))
        except (OSError, ValueError, KeyError, TypeError):
            if not patient or time.monotonic() > deadline:
                return None
            time.sleep(0.02)

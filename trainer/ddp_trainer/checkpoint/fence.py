"""The fence of a checkpoint folder: of several attempts at a job, only the one that started last may write.

A node without network may continue to train and to write to a shared disk after the operator has started the next
attempt elsewhere. Therefore every attempt (``DDP_ATTEMPT``, ``DDP_RUN_ID``) claims the folder at its start, by a file
in ``fence/`` with the next free number. The file is created atomically with its content if the name is free: of two
concurrent attempts one succeeds, and the other one retries. The claim with the highest number holds the folder. Claims
are never rewritten, which makes the fence safe on a network file system.

The check and the rename after it are two operations. A late write between them is harmless: an attempt's files contain
its number, so it can't replace or remove files of a later attempt (see :mod:`ddp_trainer.checkpoint.store`).
"""

import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from ddp_sdk import contract
from ddp_sdk.errors import UserError
from ddp_trainer.errors import Superseded

FOLDER = "fence"
# How long a claim may exist without its content, on a file system without hard links.
_SECONDS_TO_WRITE = 2.0


@dataclass(frozen=True)
class Claim:
    """An attempt and its number in the order of claims."""

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
        """Create the fence for this process; None without DDP_ATTEMPT.

        Raises :class:`UserError` if DDP_ATTEMPT is not a number.
        """
        text = environ.get(contract.ENV_ATTEMPT)
        if not text:
            return None
        if not text.isdecimal():
            raise UserError(contract.ENV_ATTEMPT, f"is {text!r} in the environment", "unset it, or set 1, 2, ...")
        return cls(folder, int(text), environ.get(contract.ENV_RUN_ID, ""))

    def claim(self) -> None:
        """Claim the folder for this attempt; a restart within the attempt reuses its claim.

        Raises :class:`Superseded` if a later attempt has started, OSError if the folder is not writable.
        """
        self._home.mkdir(parents=True, exist_ok=True)
        while True:
            claims = self._claims()
            if claims:
                newest = claims[-1]
                if self._is_mine(newest):
                    return
                # A job that was deleted and created again counts attempts from 1: the later claim wins then.
                same_job = _job(newest.run_id, newest.attempt) == _job(self.run_id, self.attempt)
                is_later = same_job and newest.attempt > self.attempt
                if is_later or any(self._is_mine(claim) for claim in claims):
                    raise self._superseded(newest)
            if self._create(claims[-1].number + 1 if claims else 1):
                return

    def check(self) -> None:
        """Raise :class:`Superseded` unless this attempt still holds the folder."""
        claims = self._claims()
        # A folder without claims was emptied by the user.
        if claims and not self._is_mine(claims[-1]):
            raise self._superseded(claims[-1])

    @property
    def _home(self) -> Path:
        return self.folder / FOLDER

    def _is_mine(self, claim: Claim) -> bool:
        return (claim.attempt, claim.run_id) == (self.attempt, self.run_id)

    def _superseded(self, newest: Claim) -> Superseded:
        holder = f"attempt {newest.attempt}" + (f" (run {newest.run_id})" if newest.run_id else "")
        return Superseded(f"{holder} has taken over {self.folder}; attempt {self.attempt} stops writing and exits")

    def _claims(self) -> list[Claim]:
        """Read all claims, ordered by number; skip those whose writer died before writing the content."""
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
                # Without content it has no owner, but its number is used.
                claims.append(Claim(int(path.stem), 0, "?"))
        return claims

    def _create(self, number: int) -> bool:
        """Create the claim ``number`` atomically with its content; return False if that number exists."""
        path = self._home / f"{number:09d}.json"
        content = json.dumps({"attempt": self.attempt, "runId": self.run_id, "time": time.time()}).encode()
        temporary = self._home / f".{path.name}.{os.getpid()}.{id(self)}.tmp"
        try:
            temporary.write_bytes(content)
            os.link(temporary, path)
        except FileExistsError:
            return False
        except OSError:
            # No hard links: only one process can create the name, but the content follows later.
            try:
                with open(path, "xb") as file:
                    file.write(content)
            except FileExistsError:
                return False
        finally:
            temporary.unlink(missing_ok=True)
        return True


def _job(run_id: str, attempt: int) -> str:
    """Return the job of a run id, which is ``<job>-<attempt>`` (docs/pod-contract.md)."""
    return run_id.removesuffix(f"-{attempt}")


def _read(path: Path, *, patient: bool) -> Claim | None:
    """Read the claim in ``path``; None if it is not valid. If ``patient``, wait for its content."""
    deadline = time.monotonic() + _SECONDS_TO_WRITE
    while True:
        try:
            content = json.loads(path.read_bytes())
            return Claim(int(path.stem), int(content["attempt"]), str(content["runId"]))
        except (OSError, ValueError, KeyError, TypeError):
            if not patient or time.monotonic() > deadline:
                return None
            time.sleep(0.02)

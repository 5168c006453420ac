"""Jobs on this machine: every run is a folder, and its state is what is written there."""

import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from ddp_operator.client.backend import Object
from ddp_operator.client.errors import ClientError
from ddp_operator.client.logs import RunLogs
from ddp_operator.client.runs import list_runs, open_run, read_job
from ddp_operator.kubeobjects import utc_now
from ddp_operator.local.folder import RunFolder
from ddp_operator.why import Why, explain_why

_POLL_SECONDS: Final = 0.2


class LocalBackend:
    """Fulfils ``Backend`` for the runs in a folder."""

    def __init__(self, runs: Path) -> None:
        self.runs = runs

    def folder(self, name: str | None) -> RunFolder:
        """Return the folder of a run, by its path, its name or its job's; None: the newest. Raises: ClientError."""
        return open_run(name, self.runs)

    def find(self, name: str | None) -> tuple[str, Object]:
        """Return a run by its path, its name or its job's, or the newest. Raises: ClientError."""
        folder = self.folder(name)
        own = folder.path.name if folder.path.parent == self.runs else str(folder.path)
        return own, read_job(folder)

    def list(self, *, everywhere: bool = False) -> Object:
        """Return the jobs of all runs, oldest first, each under the name of its run. Raises: ClientError."""
        return {"items": list_runs(self.runs)}

    def change(self, name: str, spec: Mapping[str, Any]) -> Object:
        """Raises: ClientError."""
        raise ClientError(f"{name} runs on this machine and cannot be changed")

    def delete(self, name: str) -> None:
        """Raises: ClientError."""
        raise ClientError(f"{name} runs on this machine and cannot be deleted")

    def is_gone(self, name: str) -> bool:
        """Tell whether the run has ended. Raises: ClientError."""
        return not self.folder(name).in_use

    def follow(self, name: str, until: float) -> Iterator[Object]:
        """Yield the resource whenever it was written anew. Raises: ClientError."""
        seen: Object = {}
        while True:
            job = read_job(self.folder(name))
            if job != seen:
                seen = job
                yield job
            if time.monotonic() >= until:
                return
            time.sleep(_POLL_SECONDS)

    def logs(self, name: str, *, node: int | None, attempt: int | None, tail: int | None) -> RunLogs:
        """Return the logs in the run's folder. Raises: ClientError."""
        return RunLogs(self.folder(name), node, attempt, tail)

    def why(self, name: str) -> Why:
        """Return the explanation: the summary of an ended run, which has the remedies for this machine."""
        folder = self.folder(name)
        why = explain_why(read_job(folder), (), utc_now())
        summary = folder.summary
        words = summary.read_text(encoding="utf-8").rstrip() if summary.exists() else f"{folder.path}: {why.what}"
        return replace(why, what=words, todo="")

    def argument(self, name: str) -> str:
        """Return the path of the run's folder."""
        return str(self.folder(name).path)

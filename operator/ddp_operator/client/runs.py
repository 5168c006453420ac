"""The folders of the runs on this machine: which one is meant, and what is in it."""

import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from ddp_operator.client.errors import ClientError, NotFound
from ddp_operator.local.ending import close_record
from ddp_operator.local.folder import RunFolder


def open_run(name: str | None, runs: Path) -> RunFolder:
    """Return the folder of a run by its path, its name or its job's, by default of the newest. Raises: ClientError.

    The record of a run that was killed is closed.
    """
    for path in (Path(name), runs / name) if name is not None else ():
        if path.is_dir():
            return _closed(path)
    found = [path for path in _list_runs(runs) if name is None or re.fullmatch(rf"{re.escape(name)}-[\d-]+", path.name)]
    if not found and name is not None:
        raise NotFound(f"there is no run {name}: no such folder here or in {runs}")
    if not found:
        raise NotFound(f"no runs in {runs}; start one with `ddp run job.yaml`, or use --runs-dir")
    return _closed(found[-1])


def read_job(folder: RunFolder) -> dict[str, Any]:
    """Return the resource in a run's status.yaml. Raises: ClientError."""
    try:
        return dict(yaml.load(folder.status.read_text(encoding="utf-8"), getattr(yaml, "CSafeLoader", yaml.SafeLoader)))
    except (OSError, yaml.YAMLError, TypeError, ValueError):
        raise ClientError(f"{folder.path}: not a run folder of `ddp run`: there is no status.yaml") from None


def list_runs(runs: Path) -> list[dict[str, Any]]:
    """Return the jobs of all runs, oldest first, each under the name of its run."""
    jobs = []
    for path in _list_runs(runs):
        job = read_job(_closed(path))
        jobs.append({**job, "metadata": {**job["metadata"], "name": path.name}})
    return jobs


def _closed(path: Path) -> RunFolder:
    folder = RunFolder(path)
    with suppress(OSError):  # no permission to write
        close_record(folder)
    return folder


def _list_runs(runs: Path) -> list[Path]:
    return [status.parent for status in sorted(runs.glob("*/status.yaml"), key=lambda path: path.stat().st_mtime)]

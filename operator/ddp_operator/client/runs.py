"""Find and read the folders of the runs on this machine."""

import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from ddp_operator.client.errors import ClientError, NotFound
from ddp_operator.local.ending import close_record
from ddp_operator.local.folder import RunFolder


def open_run(name: str | None, runs: Path) -> RunFolder:
    """Return the folder of a run by its path, its name or its job's name; None: the newest. Raises: ClientError.

    If the run was killed, its record is closed.
    """
    if name is None:
        paths = _list_runs(runs)
        if not paths:
            raise NotFound(f"no runs in {runs}; start one with `ddp run job.yaml`, or use --runs-dir")
        return _open(paths[-1])
    for path in (Path(name), runs / name):
        if path.is_dir():
            return _open(path)
    paths = [path for path in _list_runs(runs) if re.fullmatch(rf"{re.escape(name)}-[\d-]+", path.name)]
    if not paths:
        raise NotFound(f"run {name} does not exist, neither as a folder nor in {runs}; `ddp list --local` lists all")
    return _open(paths[-1])


def read_job(folder: RunFolder) -> dict[str, Any]:
    """Return the resource in a run's status.yaml. Raises: ClientError."""
    try:
        return dict(yaml.load(folder.status.read_text(encoding="utf-8"), getattr(yaml, "CSafeLoader", yaml.SafeLoader)))
    except (OSError, yaml.YAMLError, TypeError, ValueError):
        raise ClientError(f"{folder.path}: not a run folder of `ddp run`: status.yaml is missing or invalid") from None


def list_runs(runs: Path) -> list[dict[str, Any]]:
    """Return the jobs of all runs, oldest first, each with the name of its run."""
    jobs = []
    for path in _list_runs(runs):
        job = read_job(_open(path))
        jobs.append({**job, "metadata": {**job["metadata"], "name": path.name}})
    return jobs


def _open(path: Path) -> RunFolder:
    """Return a run's folder after closing the record of a killed run."""
    folder = RunFolder(path)
    with suppress(OSError):  # no permission to write
        close_record(folder)
    return folder


def _list_runs(runs: Path) -> list[Path]:
    return [status.parent for status in sorted(runs.glob("*/status.yaml"), key=lambda path: path.stat().st_mtime)]

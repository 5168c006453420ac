"""Find and read the folders of the runs on this machine."""

import os
import re
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from ddp_cli.client.errors import ClientError, NotFound, warn_of_left_out
from ddp_cli.local.ending import read_record
from ddp_cli.local.folder import RunFolder
from ddp_cli.local.own_files import is_own_folder, open_own_folder

_LIST_SECONDS: Final = 10.0
"""Time to read the folders of runs, which may be many and large."""


def open_run(name: str | None, runs: Path) -> RunFolder:
    """Return the folder of a run by its path, its name or its job's name; None: the newest. Raises: ClientError."""
    if name is None:
        paths = _list_runs(runs)
        if not paths:
            raise NotFound(f"no runs in {runs}; start one with `ddp run job.yaml`, or use --runs-dir")
        return RunFolder(paths[-1])
    if Path(name).is_dir():
        return _open_own(Path(name))
    listed = _list_runs(runs)
    if (runs / name).is_dir():
        return _open_own(runs / name)
    paths = [path for path in listed if re.fullmatch(rf"{re.escape(name)}-[\d-]+", path.name)]
    if not paths:
        raise NotFound(f"run {name} does not exist, neither as a folder nor in {runs}; `ddp list --local` lists all")
    return RunFolder(paths[-1])


def _open_own(path: Path) -> RunFolder:
    """Return the folder of a path that the user has named. Raises: ClientError."""
    try:
        os.close(open_own_folder(path))
    except OSError as error:
        problem = error.strerror or str(error)
        raise ClientError(f"{path}: {problem}; name a run folder of your own, and no link to one") from None
    return RunFolder(path)


def read_job(folder: RunFolder) -> dict[str, Any]:
    """Return the resource of a run without fields that cannot be read, of which it warns. Raises: ClientError."""
    try:
        resource = read_record(folder)
    except ValueError as error:
        problem = f"status.yaml is missing or invalid ({error})"
        raise ClientError(f"{folder.path}: not a run folder of `ddp run`: {problem}") from None
    warn_of_left_out(str(folder.status), folder.left_out)
    return resource


def list_runs(runs: Path) -> dict[str, Any]:
    """Return the list object of all runs' jobs, oldest first, each with the name of its run. Raises: ClientError.

    Folders with another content are no runs. ``remainingItemCount``: older runs for which the time did not suffice.
    """
    jobs: list[dict[str, Any]] = []
    paths = _list_runs(runs)
    until = time.monotonic() + _LIST_SECONDS
    while paths and time.monotonic() < until:
        path = paths.pop()
        with suppress(ClientError):
            job = read_job(RunFolder(path))
            jobs.insert(0, {**job, "metadata": {**job["metadata"], "name": path.name}})
    return {"items": jobs, "metadata": {"remainingItemCount": len(paths)} if paths else {}}


def _list_runs(runs: Path) -> list[Path]:
    """Return this user's run folders in the order of their last change, without links. Raises: ClientError."""
    if runs.is_symlink():
        raise ClientError(f"{runs}: this folder of runs is a link; name its target with --runs-dir")
    paths = [path for path in runs.glob("*/status.yaml") if is_own_folder(path.parent)]
    return [path.parent for path in sorted(paths, key=lambda path: path.lstat().st_mtime)]

"""Runs of `ddp run` on this machine, for the commands that know the jobs of a cluster as well."""

import argparse
import os
import re
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from ddp_operator.cli.io import CommandError, ExitCode
from ddp_operator.local.ending import close_record
from ddp_operator.local.folder import RunFolder


def add_local_arguments(parser: argparse.ArgumentParser, *, named: bool = True) -> None:
    """Declare the arguments; ``named``: also the job's name, which a run on this machine needs not."""
    if named:
        parser.add_argument(
            "name", metavar="NAME", nargs="?", help="the job; or a run on this machine, the newest by default"
        )
    group = parser.add_argument_group("this machine")
    group.add_argument("--local", action="store_true", help="runs on this machine, as where no cluster is configured")
    add_runs_argument(group)


def add_runs_argument(parser: argparse._ActionsContainer) -> None:
    """Declare the folder of all runs."""
    parser.add_argument("--runs-dir", type=Path, default=Path("ddp-runs"), metavar="DIR", help="default: ./ddp-runs")


def is_local(arguments: argparse.Namespace) -> bool:
    """Tell whether this machine's runs are meant; say so where that is not asked for. Raises: CommandError."""
    name = getattr(arguments, "name", None)
    if arguments.local or (name is not None and Path(name, "status.yaml").is_file()):
        return True
    given = {"KUBECONFIG", "KUBERNETES_SERVICE_HOST"} & {name for name, value in os.environ.items() if value}
    login = given or arguments.kubeconfig or arguments.context or arguments.namespace
    if not login and not Path("~/.kube/config").expanduser().exists():
        print(
            f"no cluster is configured: looking at the runs on this machine, in {arguments.runs_dir}", file=sys.stderr
        )
        return True
    if "name" in arguments and name is None:
        raise CommandError("name the job; or --local, for the newest run on this machine")
    return False


def open_run(name: str | None, runs: Path) -> RunFolder:
    """Return the folder of a run by its path, its name or its job's, by default of the newest. Raises: CommandError.

    The record of a run that was killed is closed.
    """
    for path in (Path(name), runs / name) if name is not None else ():
        if path.is_dir():
            return _closed(path)
    found = [path for path in _list_runs(runs) if name is None or re.fullmatch(rf"{re.escape(name)}-[\d-]+", path.name)]
    if not found and name is not None:
        raise CommandError(f"there is no run {name}: no such folder here or in {runs}", ExitCode.NOT_FOUND)
    if not found:
        raise CommandError(
            f"no runs in {runs}; start one with `ddp run job.yaml`, or use --runs-dir", ExitCode.NOT_FOUND
        )
    return _closed(found[-1])


def read_job(folder: RunFolder) -> dict[str, Any]:
    """Return the resource in a run's status.yaml. Raises: CommandError."""
    try:
        return dict(yaml.load(folder.status.read_text(encoding="utf-8"), getattr(yaml, "CSafeLoader", yaml.SafeLoader)))
    except (OSError, yaml.YAMLError, TypeError, ValueError):
        raise CommandError(f"{folder.path}: not a run folder of `ddp run`: there is no status.yaml") from None


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

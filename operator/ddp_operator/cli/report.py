"""`ddp report`: write the report on a run, one HTML file that needs no network."""

from __future__ import annotations

import argparse
from contextlib import suppress
from pathlib import Path

from ddp_operator.cli.errors import CommandError, ExitCode


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "run", metavar="RUN", nargs="?", help="run folder, or its name in --runs-dir; default: the newest"
    )
    parser.add_argument("--runs-dir", type=Path, default=Path("ddp-runs"), metavar="DIR", help="default: ./ddp-runs")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="default: report.html in the run's folder")


def run(arguments: argparse.Namespace) -> int:
    """Write the report and print its path. Raises: CommandError."""
    from ddp_operator.local.folder import RunFolder, replace_file
    from ddp_operator.local.orphan import close_record
    from ddp_operator.report import build_report

    folder = find_run(arguments.run, arguments.runs_dir)
    with suppress(OSError):  # no permission to write: the report says it nevertheless
        close_record(RunFolder(folder))
    try:
        page = build_report(folder)
    except ValueError as error:
        raise CommandError(str(error)) from None
    target = arguments.output or RunFolder(folder).report
    try:
        replace_file(target, page)
    except OSError as error:
        raise CommandError(f"{target}: {error.strerror}; choose another --output") from None
    print(target)
    return ExitCode.OK


def find_run(name: str | None, runs: Path) -> Path:
    """Return the folder of a run, by default of the newest. Raises: CommandError."""
    if name is not None:
        for path in (Path(name), runs / name):
            if path.is_dir():
                return path
        raise CommandError(f"there is no run {name}: no such folder here or in {runs}", ExitCode.NOT_FOUND)
    found = sorted(runs.glob("*/status.yaml"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise CommandError(
            f"no runs in {runs}; start one with `ddp run job.yaml`, or use --runs-dir", ExitCode.NOT_FOUND
        )
    return found[-1].parent

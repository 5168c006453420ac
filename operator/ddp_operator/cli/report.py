"""`ddp report`: a page with the charts of a run, one file that a browser shows without a network."""

from __future__ import annotations

import argparse
from contextlib import suppress
from pathlib import Path

from ddp_operator.cli.errors import CommandError, ExitCode


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "run", metavar="RUN", nargs="?", help="a run's folder, or its name in --runs-dir; default: newest"
    )
    parser.add_argument("--runs-dir", type=Path, default=Path("ddp-runs"), metavar="DIR", help="default: ./ddp-runs")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="default: report.html in the run's folder")


def run(arguments: argparse.Namespace) -> int:
    """Write the page and say where it is. Raises: CommandError."""
    from ddp_operator.local.folder import RunFolder, replace_file
    from ddp_operator.local.orphan import close_record
    from ddp_operator.report import build_report

    folder = find_run(arguments.run, arguments.runs_dir)
    with suppress(OSError):  # somebody else's folder: the page says so nevertheless
        close_record(RunFolder(folder))
    try:
        page = build_report(folder)
    except ValueError as error:
        raise CommandError(str(error)) from None
    target = arguments.output or RunFolder(folder).report
    try:
        replace_file(target, page)
    except OSError as error:
        raise CommandError(f"{target}: {error.strerror}; give another --output") from None
    print(target)
    return ExitCode.OK


def find_run(name: str | None, runs: Path) -> Path:
    """Return the folder of a run, of the newest one where none is named. Raises: CommandError."""
    if name is not None:
        for path in (Path(name), runs / name):
            if path.is_dir():
                return path
        raise CommandError(f"there is no run {name}, neither as a folder nor in {runs}", ExitCode.NOT_FOUND)
    found = sorted(runs.glob("*/status.yaml"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise CommandError(
            f"{runs} holds no run; make one with `ddp run job.yaml`, or give its folder", ExitCode.NOT_FOUND
        )
    return found[-1].parent

"""`ddp report`: write the report on a run, one HTML file that needs no network."""

import argparse
from pathlib import Path

from ddp_operator.cli.arguments import add_runs_argument
from ddp_operator.cli.io import CommandError, ExitCode
from ddp_operator.client.runs import open_run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "run", metavar="RUN", nargs="?", help="run folder, or its name or its job's; default: the newest run"
    )
    add_runs_argument(parser)
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="default: report.html in the run's folder")


def run(arguments: argparse.Namespace) -> int:
    """Write the report and print its path. Raises: CommandError."""
    from ddp_operator.local.folder import replace_file
    from ddp_operator.report import build_report

    folder = open_run(arguments.run, arguments.runs_dir)
    try:
        page = build_report(folder.path)
    except ValueError as error:
        raise CommandError(str(error)) from None
    target = arguments.output or folder.report
    try:
        replace_file(target, page)
    except OSError as error:
        raise CommandError(f"{target}: {error.strerror}; choose another --output") from None
    print(target)
    return ExitCode.OK

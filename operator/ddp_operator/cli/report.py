"""`ddp report`: write the report on a job or a run, one HTML file that needs no network."""

import argparse
from pathlib import Path

from ddp_operator.cli.arguments import add_cluster_arguments, add_local_arguments, is_local, open_client
from ddp_operator.cli.io import CommandError, ExitCode
from ddp_operator.client.errors import NotFound
from ddp_operator.client.runs import open_run
from ddp_operator.terminal import print_text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "name",
        metavar="NAME",
        nargs="?",
        help="a run on this machine, by its folder, its name or its job's, the newest by default; else a job",
    )
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="FILE",
        help="default: report.html in the run's folder, or NAME-report.html",
    )
    parser.add_argument(
        "--prometheus",
        metavar="URL",
        help="a job's figures from this Prometheus, every 15 s or so, instead of the 60 in its status",
    )
    add_local_arguments(parser, named=False)
    add_cluster_arguments(parser)


def prefers_local(arguments: argparse.Namespace) -> bool:
    """Tell whether a run on this machine is meant: one that is there comes before a job. Raises: CommandError."""
    named = arguments.namespace or arguments.context or arguments.kubeconfig
    if arguments.local or (arguments.name is None and not named):
        return True
    if not named:
        try:
            open_run(arguments.name, arguments.runs_dir)
        except NotFound:
            pass
        else:
            return True
    return is_local(arguments)


def run(arguments: argparse.Namespace) -> int:
    """Write the report and print its path. Raises: CommandError."""
    from ddp_operator.local.folder import replace_file

    local = prefers_local(arguments)
    job = open_client(arguments, local=local).get(arguments.name)
    page = job.report(arguments.prometheus)
    default = open_run(arguments.name, arguments.runs_dir).report if local else Path(f"{job.name}-report.html")
    target = arguments.output or default
    try:
        replace_file(target, page)
    except OSError as error:
        raise CommandError(f"{target}: {error.strerror}; choose another --output") from None
    print_text(target)
    return ExitCode.OK

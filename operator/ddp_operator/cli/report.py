"""`ddp report`: write the report on a job or a run as one HTML file without external resources."""

import argparse
from pathlib import Path

from ddp_operator.cli.arguments import add_cluster_arguments, add_local_arguments, is_local, open_client
from ddp_operator.cli.io import CommandError, ExitCode
from ddp_operator.client.errors import NotFound
from ddp_operator.client.runs import open_run
from ddp_operator.view.terminal import print_text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "name",
        metavar="NAME",
        nargs="?",
        help="a run on this machine (its folder, its name or its job's name) or a job; default: the newest run",
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
        help="read a job's metrics from this Prometheus (every 15 s) instead of its status (60 points)",
    )
    add_local_arguments(parser, named=False)
    add_cluster_arguments(parser)


def prefers_local(arguments: argparse.Namespace) -> bool:
    """Return whether the arguments select a run on this machine; a run takes precedence. Raises: CommandError."""
    names_cluster = arguments.namespace or arguments.context or arguments.kubeconfig
    if arguments.local or (arguments.name is None and not names_cluster):
        return True
    if not names_cluster:
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

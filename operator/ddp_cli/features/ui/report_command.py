"""`ddp report`: write the report on a job or a run as one HTML file without external resources."""

import argparse
from pathlib import Path

from ddp_cli.client.cluster_backend import ClusterBackend
from ddp_cli.client.runs import open_run
from ddp_cli.commands.arguments import add_cluster_arguments, add_history_argument, add_local_arguments, open_job
from ddp_cli.commands.io import CommandError, ExitCode
from ddp_cli.view.terminal import print_text


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
        help="default: report.html in the run's folder, or ddp-runs/NAME-report.html",
    )
    parser.add_argument(
        "--prometheus",
        metavar="URL",
        help="read a job's metrics from this Prometheus (every 15 s) instead of its status (60 points)",
    )
    parser.add_argument("--run", type=int, metavar="N", help="one run of a job with spec.dev; default: the newest run")
    add_local_arguments(parser, named=False)
    add_history_argument(parser)
    add_cluster_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Write the report and print its path. Raises: CommandError."""
    from ddp_cli.local.folder import make_runs_folder, replace_file

    job = open_job(arguments)
    page = job.report(arguments.prometheus, run=arguments.run)
    if isinstance(job.backend, ClusterBackend):
        default = arguments.runs_dir / f"{job.name}-report.html"
    else:
        default = open_run(job.name, arguments.runs_dir).report
    if arguments.run is not None:
        default = default.with_stem(f"{default.stem}-{arguments.run}")
    target = arguments.output or default
    try:
        if arguments.output is None:
            make_runs_folder(target.parent)
        else:
            target.parent.mkdir(parents=True, exist_ok=True)
        replace_file(target, page)
    except OSError as error:
        raise CommandError(f"{target}: {error.strerror}; choose another --output") from None
    print_text(target)
    return ExitCode.OK

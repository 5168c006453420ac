"""`ddp logs`: print the logs of all pods of a job, or of a run on this machine, in one stream with ranks."""

import argparse
import sys

from ddp_cli.client.cluster_backend import ClusterBackend
from ddp_cli.commands.arguments import add_cluster_arguments, add_history_argument, add_local_arguments, open_job
from ddp_cli.commands.io import CommandError, ExitCode
from ddp_cli.view.terminal import make_printable, print_text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_local_arguments(parser)
    parser.add_argument("-f", "--follow", action="store_true", help="follow the job until it ends, across restarts")
    parser.add_argument("--node", type=int, metavar="INDEX", help="only this pod (completion index)")
    parser.add_argument("--attempt", type=int, metavar="N", help="only this attempt; default: the newest, all with -f")
    parser.add_argument("--tail", type=int, metavar="N", help="only the last N lines of each pod")
    parser.add_argument("--timestamps", action="store_true", help="start each line with the kubelet's timestamp")
    add_history_argument(parser)
    add_cluster_arguments(parser)
    parser.epilog = (
        "Every line starts with the rank that wrote it, or with all ranks of the pod if the rank is unknown "
        "(DDP_LOG_PREFIX=0)."
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the lines. With ``--follow`` return once the job has ended and everything is printed."""
    job = open_job(arguments)
    local = not isinstance(job.backend, ClusterBackend)
    if local and arguments.timestamps:
        raise CommandError("--timestamps: logs on this machine have no timestamps; leave the option out")
    if local:
        print_text(f"run folder {job.backend.argument(job.name)}", file=sys.stderr)
    chosen = {"node": arguments.node, "attempt": arguments.attempt, "tail": arguments.tail}
    for line in job.lines(follow=arguments.follow, **chosen):
        text = (f"{line.time} " if arguments.timestamps else "") + str(line)
        sys.stdout.write(make_printable(text, colours=True) + "\n")
        sys.stdout.flush()
    return ExitCode.OK

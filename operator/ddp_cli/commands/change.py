"""`ddp scale`, `suspend`, `resume` and `delete`: small changes of jobs."""

import argparse
import json
import sys

from ddp_cli.client.errors import ClientError
from ddp_cli.client.job import Job
from ddp_cli.commands.arguments import (
    add_cluster_arguments,
    add_local_arguments,
    add_output_argument,
    is_local,
    is_run_folder,
    open_client,
)
from ddp_cli.commands.io import ExitCode, exit_code, integer
from ddp_cli.view.terminal import print_text
from ddp_operator.api.constants import KUEUE_QUEUE_LABEL


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command that ``parser`` is for."""
    command = parser.prog.rpartition(" ")[2]
    if command == "delete":
        parser.add_argument("names", metavar="NAME", nargs="+", help="a job, or a run on this machine")
    else:
        parser.add_argument("name", metavar="NAME", help="the job, or a run on this machine")
    if command == "scale":
        nodes = integer(1, hint="to stop all pods, use ddp suspend NAME")
        parser.add_argument("nodes", type=nodes, metavar="NODES", help="new number of pods (spec.nodes)")
    if command == "delete":
        parser.add_argument("--wait", action="store_true", help="wait until the last pod has ended")
        parser.epilog = "The pods get SIGTERM and their grace period. Checkpoints on claims are kept."
    else:
        add_output_argument(parser)
    add_local_arguments(parser, named=False)
    add_cluster_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Change the job, or delete jobs."""
    if arguments.command == "delete":
        return _delete_jobs(arguments)
    job = open_client(arguments, local=is_local(arguments)).get(arguments.name)
    before = job.resource["spec"]
    if arguments.command == "scale":
        job.scale(arguments.nodes)
        done = f"scaled from {before.get('nodes', 1)} to {arguments.nodes} nodes"
        if KUEUE_QUEUE_LABEL in (job.resource["metadata"].get("labels") or {}):
            done += f"; new pods may wait for admission to the queue: ddp why {arguments.name}"
    elif arguments.command == "suspend":
        job.suspend()
        done = "suspended; the pods save a checkpoint and exit"
    else:
        job.resume()
        done = "resumed"
    if job.resource["spec"] == before:
        done = "unchanged"
    print_text(json.dumps(job.resource, indent=2) if arguments.output == "json" else f"{arguments.name}: {done}")
    return ExitCode.OK


def _delete_jobs(arguments: argparse.Namespace) -> int:
    """Delete the named jobs; return the exit code of the first one that cannot be deleted."""
    names = list(dict.fromkeys(arguments.names))
    all_local = all(map(is_run_folder, names)) or is_local(arguments)
    deleted: list[Job] = []
    codes: list[ExitCode] = []
    for name in names:
        try:
            job = open_client(arguments, local=all_local or is_run_folder(name)).get(name)
            job.delete()
        except ClientError as error:
            if len(names) == 1:
                raise
            print_text(f"ddp delete: {error}", file=sys.stderr)
            codes.append(exit_code(error))
            continue
        deleted.append(job)
        if not arguments.wait:
            print_text(f"{name}: deleted", flush=True)
    for job in deleted if arguments.wait else ():
        job.wait_until_gone()
        print_text(f"{job.name}: deleted", flush=True)
    return codes[0] if codes else ExitCode.OK

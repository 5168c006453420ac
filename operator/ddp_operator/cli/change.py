"""`ddp scale`, `suspend`, `resume` and `delete`: small changes of one job."""

import argparse
import json

from ddp_operator.cli.arguments import (
    add_cluster_arguments,
    add_local_arguments,
    add_output_argument,
    is_local,
    open_client,
)
from ddp_operator.cli.io import ExitCode, integer
from ddp_operator.constants import KUEUE_QUEUE_LABEL
from ddp_operator.terminal import print_text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command that ``parser`` is for."""
    command = parser.prog.rpartition(" ")[2]
    parser.add_argument("name", metavar="NAME", help="the job, or a run on this machine")
    if command == "scale":
        nodes = integer(1, hint="to stop all pods, use ddp suspend NAME")
        parser.add_argument("nodes", type=nodes, metavar="NODES", help="new number of pods (spec.nodes)")
    if command == "delete":
        parser.add_argument("--wait", action="store_true", help="wait until its last pod is gone")
        parser.epilog = "Its pods get SIGTERM and their grace period; checkpoints on claims are kept."
    else:
        add_output_argument(parser)
    add_local_arguments(parser, named=False)
    add_cluster_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Change or delete the job."""
    job = open_client(arguments, local=is_local(arguments)).get(arguments.name)
    if arguments.command == "delete":
        job.delete(wait=arguments.wait)
        print_text(f"{arguments.name}: deleted", flush=True)
        return ExitCode.OK
    before = job.resource["spec"]
    if arguments.command == "scale":
        job.scale(arguments.nodes)
        done = f"scaled from {before.get('nodes', 1)} to {arguments.nodes} nodes"
        if KUEUE_QUEUE_LABEL in (job.resource["metadata"].get("labels") or {}):
            done += f", which may have to wait for its queue: ddp why {arguments.name}"
    elif arguments.command == "suspend":
        job.suspend()
        done = "suspended; its pods save a checkpoint and exit"
    else:
        job.resume()
        done = "resumed"
    if job.resource["spec"] == before:
        done = "unchanged"
    print_text(json.dumps(job.resource, indent=2) if arguments.output == "json" else f"{arguments.name}: {done}")
    return ExitCode.OK

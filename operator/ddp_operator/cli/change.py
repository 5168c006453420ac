"""`ddp scale`, `suspend`, `resume` and `delete`: small changes of one job, each a single call to the API server."""

import argparse
import json
import time
from typing import Any, Final

from ddp_operator.cli.api import (
    MERGE_PATCH,
    add_cluster_arguments,
    add_output_argument,
    call_job,
    connect,
    get_job,
    list_pods,
)
from ddp_operator.cli.io import CommandError, ExitCode, integer
from ddp_operator.constants import KUEUE_QUEUE_LABEL

_POLL_SECONDS: Final = 0.5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command that ``parser`` is for."""
    command = parser.prog.rpartition(" ")[2]
    parser.add_argument("name", metavar="NAME", help="the job")
    if command == "scale":
        nodes = integer(1, hint="to stop all pods, use ddp suspend NAME")
        parser.add_argument("nodes", type=nodes, metavar="NODES", help="new number of pods (spec.nodes)")
    if command == "delete":
        parser.add_argument("--wait", action="store_true", help="wait until its last pod is gone")
        parser.epilog = "Its pods get SIGTERM and their grace period; checkpoints on claims are kept."
    else:
        add_output_argument(parser)
    add_cluster_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Change or delete the job."""
    api = connect(arguments)
    if arguments.command == "delete":
        options = {"apiVersion": "v1", "kind": "DeleteOptions", "propagationPolicy": "Background"}
        call_job(api, "DELETE", arguments.name, options)
        print(f"{arguments.name}: deleted", flush=True)
        while arguments.wait and list_pods(api, arguments.name):
            time.sleep(_POLL_SECONDS)
        return ExitCode.OK
    job = get_job(api, arguments.name)
    phase = job.get("status", {}).get("phase")
    if phase in ("Succeeded", "Failed"):
        raise CommandError(
            f"{arguments.name} has ended ({phase}) and cannot be changed; delete it and submit it again",
            ExitCode.FAILED,
        )
    change: dict[str, Any]
    if arguments.command == "scale":
        change = {"nodes": arguments.nodes}
        done = f"scaled from {job['spec'].get('nodes', 1)} to {arguments.nodes} nodes"
        if KUEUE_QUEUE_LABEL in (job["metadata"].get("labels") or {}):
            done += f", which may have to wait for its queue: ddp why {arguments.name}"
    else:
        change = {"suspend": arguments.command == "suspend"}
        done = "suspended; its pods save a checkpoint and exit" if change["suspend"] else "resumed"
    if all(job["spec"].get(key, False) == value for key, value in change.items()):
        done = "unchanged"
    else:
        job = call_job(api, "PATCH", arguments.name, {"spec": change}, MERGE_PATCH)
    print(json.dumps(job, indent=2) if arguments.output == "json" else f"{arguments.name}: {done}")
    return ExitCode.OK

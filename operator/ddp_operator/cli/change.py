"""`ddp scale`, `suspend`, `resume` and `delete`: small changes of one job, each a single call to the API server."""

from __future__ import annotations

import argparse
import json
import time
from typing import Any, Final

from ddp_operator.cli.api import (
    MERGE_PATCH,
    Api,
    ApiRefusal,
    Object,
    add_cluster_arguments,
    add_output_argument,
    connect,
    explain_missing,
    get_job,
    job_path,
    list_pods,
    write,
)
from ddp_operator.cli.errors import CommandError, ExitCode

_ENDED: Final = ("Succeeded", "Failed")
_LOOK_SECONDS: Final = 0.5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command that ``parser`` is for."""
    command = parser.prog.rpartition(" ")[2]
    parser.add_argument("name", metavar="NAME", help="the job")
    if command == "scale":
        parser.add_argument("nodes", type=_count, metavar="NODES", help="pods to run with from now on")
    if command == "delete":
        parser.add_argument("--wait", action="store_true", help="return when its last pod is gone")
        parser.epilog = "Its pods get SIGTERM and their grace time; checkpoints on claims stay."
    else:
        add_output_argument(parser)
    add_cluster_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Do what the command says."""
    api = connect(arguments)
    if arguments.command == "delete":
        return _delete(api, arguments.name, wait=arguments.wait)
    job = get_job(api, arguments.name)
    phase = job.get("status", {}).get("phase")
    if phase in _ENDED:
        raise CommandError(
            f"{arguments.name} has ended ({phase}) and cannot be changed; delete it and submit it anew", ExitCode.FAILED
        )
    if arguments.command == "scale":
        change: dict[str, Any] = {"nodes": arguments.nodes}
        words = f"asked for {arguments.nodes} nodes (it had {job['spec'].get('nodes', 1)})"
    else:
        change = {"suspend": arguments.command == "suspend"}
        words = (
            "asked to stop; its pods save and end within their grace time" if change["suspend"] else "asked to go on"
        )
    if all(job["spec"].get(key, False) == value for key, value in change.items()):
        words = "is so already"
    else:
        job = _patch(api, arguments.name, {"spec": change})
    print(json.dumps(job, indent=2) if arguments.output == "json" else f"{arguments.name}: {words}")
    return ExitCode.OK


def _patch(api: Api, name: str, patch: Object) -> Object:
    try:
        return write(api, "PATCH", job_path(api.namespace, name), patch, MERGE_PATCH)
    except ApiRefusal as refusal:
        raise explain_missing(refusal, api, name) from None


def _delete(api: Api, name: str, *, wait: bool) -> int:
    options = {"apiVersion": "v1", "kind": "DeleteOptions", "propagationPolicy": "Background"}
    try:
        api.request("DELETE", job_path(api.namespace, name), None, options)
    except ApiRefusal as refusal:
        raise explain_missing(refusal, api, name) from None
    print(f"{name}: deleted", flush=True)
    while wait and list_pods(api, name):
        time.sleep(_LOOK_SECONDS)
    return ExitCode.OK


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) >= 1):
        raise argparse.ArgumentTypeError(f"{text!r} is no number above 0; to stop all pods: ddp suspend NAME")
    return int(text)

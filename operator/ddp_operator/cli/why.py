"""`ddp why`: one paragraph on what a job waits for or why it failed, and what to do."""

from __future__ import annotations

import argparse
import json

from ddp_operator.cli.api import (
    ApiError,
    add_cluster_arguments,
    add_output_argument,
    connect,
    get_job,
    list_events,
)
from ddp_operator.cli.errors import ExitCode
from ddp_operator.kubeobjects.timestamps import utc_now
from ddp_operator.why import explain_why


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("name", metavar="NAME", help="the job")
    add_output_argument(parser)
    add_cluster_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the paragraph, or its parts as JSON."""
    api = connect(arguments)
    job = get_job(api, arguments.name)
    try:
        events = list_events(api, arguments.name, job["metadata"]["uid"])
    except ApiError:  # without permission to read Events the conditions still say most
        events = []
    why = explain_why(job, events, utc_now(), option=api.option)
    if arguments.output == "json":
        parts = {"name": arguments.name, "phase": why.phase, "reason": why.reason, "what": why.what, "todo": why.todo}
        print(json.dumps(parts, indent=2))
    else:
        print(why)
    return ExitCode.OK

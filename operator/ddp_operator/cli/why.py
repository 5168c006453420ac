"""`ddp why`: one paragraph on what a job waits for or why it failed, and what to do."""

import argparse
import json

from ddp_operator.cli.api import ApiError, add_cluster_arguments, add_output_argument, connect, get_job, list_events
from ddp_operator.cli.io import ExitCode
from ddp_operator.cli.local_runs import add_local_arguments, is_local, open_run, read_job
from ddp_operator.kubeobjects import utc_now
from ddp_operator.why import explain_why


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_local_arguments(parser)
    add_output_argument(parser)
    add_cluster_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the paragraph, or its parts as JSON."""
    words = None
    if is_local(arguments):
        folder = open_run(arguments.name, arguments.runs_dir)
        why = explain_why(read_job(folder), (), utc_now())
        # The remedies are for a cluster; the summary has those for this machine.
        summary = folder.summary
        words = summary.read_text(encoding="utf-8").rstrip() if summary.exists() else f"{folder.path}: {why.what}"
    else:
        api = connect(arguments)
        job = get_job(api, arguments.name)
        try:
            events = list_events(api, arguments.name, job["metadata"]["uid"])
        except ApiError:  # without permission to read Events the conditions still say most
            events = []
        why = explain_why(job, events, utc_now(), option=api.option)
    if arguments.output == "json":
        parts = {"name": why.name, "phase": why.phase, "reason": why.reason, "what": why.what, "todo": why.todo}
        print(json.dumps(parts, indent=2))
    else:
        print(words or why)
    return ExitCode.OK

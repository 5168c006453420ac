"""`ddp why`: explain in one paragraph what a job waits for or why it failed, and what to do."""

import argparse
import json

from ddp_cli.commands.arguments import (
    add_cluster_arguments,
    add_history_argument,
    add_local_arguments,
    add_output_argument,
    open_job,
)
from ddp_cli.commands.io import ExitCode
from ddp_cli.view.terminal import print_text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_local_arguments(parser)
    add_output_argument(parser)
    add_history_argument(parser)
    add_cluster_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the paragraph, or its parts as JSON."""
    job = open_job(arguments)
    why = job.why()
    links = job.links
    if arguments.output == "json":
        parts = {"name": why.name, "phase": why.phase, "reason": why.reason, "what": why.what, "todo": why.todo}
        notes = [{"what": note.what, "todo": note.todo} for note in why.notes]
        print_text(json.dumps({**parts, "notes": notes, "links": links}, indent=2))
    else:
        print_text("\n".join([str(why), *links]))
    return ExitCode.OK

"""Shell completion by argcomplete: its script in the shell starts `ddp` with the typed words in the environment."""

import argparse
import os
import signal
from collections.abc import Sequence
from typing import Any, Final

from ddp_cli.client.hooks import Command
from ddp_cli.commands.arguments import is_local, open_client
from ddp_cli.commands.io import ExitCode

_SECONDS_FOR_CLUSTER: Final = 3


def complete(listed: Sequence[Command]) -> None:
    """Print the candidates for the last word, and end the process."""
    import argcomplete

    from ddp_cli.commands import build_parser

    words = os.environ["COMP_LINE"].split()[1:]
    command = next((word for word in words if not word.startswith("-")), "")
    parser, commands = build_parser(listed, command)
    if command in commands:
        for action in commands[command].parser._actions:
            if action.dest == "name" and not action.option_strings:
                action.completer = list_names  # type: ignore[attr-defined]
    argcomplete.autocomplete(parser, always_complete_options=False)


def list_names(prefix: str, parsed_args: argparse.Namespace, **rest: Any) -> list[str]:
    """Return the names of the jobs that the flags on the command line select; none without a response in seconds."""
    signal.signal(signal.SIGALRM, lambda number, frame: os._exit(ExitCode.OK))
    signal.alarm(_SECONDS_FOR_CLUSTER)
    backend = open_client(parsed_args, local=is_local(parsed_args)).backend
    return [str(item["metadata"]["name"]) for item in backend.list()["items"]]

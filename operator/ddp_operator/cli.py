"""The command `ddp`. Each subcommand lives in a module of its own, which is imported only when it is asked for."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from typing import Final

from ddp_operator import __version__

# Name, module, one line for the list of commands. A module has add_arguments(parser) and run(arguments) -> exit code.
COMMANDS: Final = (
    ("run", "ddp_operator.cli_run", "run a job's YAML on this machine"),
    ("render", "ddp_operator.cli_render", "check a job's YAML and print what the operator would create"),
    ("bench", "ddp_operator.cli_bench", "measure the trainer on this machine against the documents' own loops"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        prog="ddp", description="Distributed PyTorch training from one YAML, in a cluster or on this machine."
    )
    parser.add_argument("--version", action="version", version=f"ddp {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND")
    asked = next((word for word in words if not word.startswith("-")), None)
    modules = {}
    for name, module, help_text in COMMANDS:
        subparser = subparsers.add_parser(name, help=help_text, description=help_text[0].upper() + help_text[1:] + ".")
        if name == asked:
            modules[name] = importlib.import_module(module)
            modules[name].add_arguments(subparser)
    words, extra = _split(words)
    arguments = parser.parse_args(words)
    if arguments.command is None:
        parser.print_help()
        return 2
    arguments.extra = extra
    code: int = modules[arguments.command].run(arguments)
    return code


def _split(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split at ``--``: what follows belongs to the training script."""
    if "--" not in words:
        return list(words), []
    place = list(words).index("--")
    return list(words[:place]), list(words[place + 1 :])

"""The command `ddp`. Each subcommand lives in a module of its own, which is imported only when it is asked for.

Those that talk to a cluster log in and connect through the official `kubernetes` client, which is imported when a
command connects and not before: `ddp --help` and completion stay quick.
"""

from __future__ import annotations

import argparse
import importlib
import os
import shlex
import sys
import traceback
from collections.abc import Sequence
from types import ModuleType
from typing import Final

from ddp_operator import __version__
from ddp_operator.cli.errors import CommandError, ExitCode

# Name, module, one line for the list of commands. A module has add_arguments(parser) and run(arguments) -> exit code.
COMMANDS: Final = (
    ("run", "ddp_operator.cli.run", "run a job's YAML on this machine"),
    ("render", "ddp_operator.cli.render", "check a job's YAML and print what the operator would create"),
    ("report", "ddp_operator.cli.report", "write a page with the charts of a run, for a browser"),
    ("convert", "ddp_operator.cli.convert", "turn a Kubeflow PyTorchJob's YAML into a DDPTrainingJob's"),
    ("bench", "ddp_operator.cli.bench", "measure the trainer on this machine against the documents' own loops"),
    ("submit", "ddp_operator.cli.submit", "check a job's YAML and create the job in the cluster"),
    ("list", "ddp_operator.cli.list_jobs", "list the jobs of a namespace"),
    ("watch", "ddp_operator.cli.watch", "show the progress of one job or of all as it is made"),
    ("logs", "ddp_operator.cli.logs", "print the logs of all ranks of a job in one stream"),
    ("why", "ddp_operator.cli.why", "say what a job waits for or why it failed, and what to do"),
    ("scale", "ddp_operator.cli.change", "run a job with another number of nodes"),
    ("suspend", "ddp_operator.cli.change", "stop a job's pods, which save a checkpoint; resume goes on from there"),
    ("resume", "ddp_operator.cli.change", "let a suspended job go on"),
    ("delete", "ddp_operator.cli.change", "delete a job and everything that was made for it"),
    ("drill", "ddp_operator.cli.drill", "kill a rank of a running job and measure its recovery"),
    ("completion", "ddp_operator.cli.completion", "print a script that teaches a shell to complete these commands"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit code (``errors.MEANINGS``)."""
    words = list(sys.argv[1:] if argv is None else argv)
    asked = next((word for word in words if not word.startswith("-")), "")
    try:
        parser, modules = build_parser(asked)
    except ModuleNotFoundError as error:
        return _complain(asked, _explain_missing(error), ExitCode.BAD_INPUT)
    typed = shlex.join(["ddp", *words])
    words, extra = _split(words)
    arguments = parser.parse_args(words)
    if arguments.command is None:
        parser.print_help()
        return ExitCode.BAD_INPUT
    arguments.extra, arguments.typed = extra, typed
    return _run(modules[arguments.command], arguments)


def build_parser(*commands: str) -> tuple[argparse.ArgumentParser, dict[str, ModuleType]]:
    """Return the parser, complete for the commands that are named, and their modules."""
    parser = argparse.ArgumentParser(
        prog="ddp", description="Distributed PyTorch training from one YAML, in a cluster or on this machine."
    )
    parser.add_argument("--version", action="version", version=f"ddp {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND")
    modules = {}
    for name, module, help_text in COMMANDS:
        subparser = subparsers.add_parser(name, help=help_text, description=help_text[0].upper() + help_text[1:] + ".")
        if name in commands:
            modules[name] = importlib.import_module(module)
            modules[name].add_arguments(subparser)
    return parser, modules


def _run(module: ModuleType, arguments: argparse.Namespace) -> int:
    """Run a command; what it raises for its user becomes a sentence and an exit code."""
    from ddp_operator.api.errors import InvalidManifest

    try:
        code: int = module.run(arguments)
        sys.stdout.flush()
        return code
    except CommandError as error:
        return _complain(arguments.command, str(error), error.code)
    except InvalidManifest as error:
        return _complain(arguments.command, f"refused\n{error}", ExitCode.BAD_INPUT)
    except ModuleNotFoundError as error:
        return _complain(arguments.command, _explain_missing(error), ExitCode.BAD_INPUT)
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED
    except BrokenPipeError:  # `ddp logs … | head`: nobody reads on, and the interpreter's own flush must not complain
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.OK
    except Exception:  # whatever else it is, it is no answer to what was asked
        traceback.print_exc()
        return _complain(arguments.command, "this is an error in ddp itself; please report it", ExitCode.BROKEN)


def _complain(command: str, words: str, code: int) -> int:
    print(f"ddp {command}: {words}", file=sys.stderr)
    return code


def _explain_missing(error: ModuleNotFoundError) -> str:
    """Say which extra is not installed. Raises: the error itself, where the missing module is one of ours."""
    if error.name is None or error.name.partition(".")[0] == "ddp_operator":
        raise error
    return f"needs the Python package {error.name.partition('.')[0]}; pip install 'ddp-operator[cli]'"


def _split(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split at ``--``: what follows belongs to the training script."""
    if "--" not in words:
        return list(words), []
    place = list(words).index("--")
    return list(words[:place]), list(words[place + 1 :])

"""The command `ddp`. Each subcommand is a module of its own, imported only when it is used.

Those that talk to a cluster log in through the official `kubernetes` client, which is imported when a command connects
and not before: `ddp --help` and completion stay quick.
"""

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
from ddp_operator.cli.io import ExitCode, exit_code
from ddp_operator.client.errors import ClientError
from ddp_operator.terminal import print_text

# Name, module, one line for the list of commands. A module has add_arguments(parser) and run(arguments) -> exit code.
COMMANDS: Final = (
    ("run", "ddp_operator.cli.run", "run a job's YAML, or a training script, on this machine"),
    ("init", "ddp_operator.cli.init", "write the YAML that would run a training script in a cluster"),
    ("render", "ddp_operator.cli.render", "check a job's YAML and print what the operator would create"),
    ("report", "ddp_operator.cli.report", "write an HTML report with the charts of a run"),
    ("board", "ddp_operator.cli.board", "open TensorBoard, MLflow and W&B where they have a run or a job"),
    ("profile", "ddp_operator.cli.profile", "list the profiles of a cluster, or show what one sets and locks"),
    ("convert", "ddp_operator.cli.convert", "convert a Kubeflow PyTorchJob to a DDPTrainingJob"),
    ("submit", "ddp_operator.cli.submit", "check a job's YAML and create the job in a cluster"),
    ("list", "ddp_operator.cli.list_jobs", "list the jobs of a namespace"),
    ("usage", "ddp_operator.cli.usage", "tell what the GPUs of jobs were held for"),
    ("watch", "ddp_operator.cli.watch", "watch the progress of one job or of all jobs"),
    ("logs", "ddp_operator.cli.logs", "print the logs of all ranks of a job in one stream"),
    ("why", "ddp_operator.cli.why", "explain what a job waits for or why it failed, and what to do"),
    ("scale", "ddp_operator.cli.change", "change the number of nodes of a job"),
    ("suspend", "ddp_operator.cli.change", "stop a job's pods after a checkpoint, so that it can be resumed"),
    ("resume", "ddp_operator.cli.change", "resume a suspended job"),
    ("delete", "ddp_operator.cli.change", "delete a job and everything that the operator created for it"),
    ("drill", "ddp_operator.cli.drill", "kill a rank of a running job and measure the recovery"),
    ("completion", "ddp_operator.cli.completion", "print the completion script for a shell"),
)


_WITH_SCRIPT: Final = ("run", "init", "submit", "drill")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit code (``errors.ExitCode``)."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the shell: >&-
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w"))
    words = list(sys.argv[1:] if argv is None else argv)
    asked = next((word for word in words if not word.startswith("-")), "")
    try:
        parser, modules = build_parser(asked)
    except ModuleNotFoundError as error:
        return _report(asked, _explain_missing(error), ExitCode.BAD_INPUT)
    command_line = shlex.join(["ddp", *words])
    cut = words.index("--") if "--" in words else len(words)
    words, extra = words[:cut], words[cut + 1 :]  # what follows goes to the training script
    arguments, unknown = parser.parse_known_args(words)
    if asked in _WITH_SCRIPT:
        from ddp_operator.cli.torchrun import explain_torchrun

        remedy = explain_torchrun(asked, words[words.index(asked) + 1 :], unknown, extra)
        if remedy:
            return _report(asked, remedy, ExitCode.BAD_INPUT)
    if unknown:
        hint = f"; arguments of the script go after --: -- {shlex.join(unknown)}" if asked in _WITH_SCRIPT else ""
        parser.error(f"unrecognized arguments: {shlex.join(unknown)}{hint}")
    if arguments.command is None:
        parser.print_help()
        return ExitCode.BAD_INPUT
    arguments.extra, arguments.command_line = extra, command_line
    return _run(modules[arguments.command], arguments)


def build_parser(*commands: str) -> tuple[argparse.ArgumentParser, dict[str, ModuleType]]:
    """Return the parser, complete for the commands that are named, and their modules."""
    parser = argparse.ArgumentParser(
        prog="ddp", description="Distributed PyTorch training from one YAML file, in a cluster or on this machine."
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
    """Run a command; an error becomes a sentence and an exit code."""
    from ddp_operator.api.errors import InvalidManifest

    try:
        code: int = module.run(arguments)
        sys.stdout.flush()
        return code
    except ClientError as error:
        return _report(arguments.command, str(error), exit_code(error))
    except InvalidManifest as error:
        return _report(arguments.command, f"refused\n{error}", ExitCode.BAD_INPUT)
    except ModuleNotFoundError as error:
        return _report(arguments.command, _explain_missing(error), ExitCode.BAD_INPUT)
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED
    except BrokenPipeError:  # `ddp logs … | head`: keep the interpreter's own flush from failing
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.OK
    except Exception:
        traceback.print_exc()
        return _report(arguments.command, "this is a bug in ddp; please report it", ExitCode.BROKEN)


def _report(command: str, message: str, code: int) -> int:
    print_text(f"ddp {command}: {message}", file=sys.stderr)
    return code


def _explain_missing(error: ModuleNotFoundError) -> str:
    """Return which extra to install. Raises: the error itself, if the missing module is one of ours."""
    if error.name is None or error.name.partition(".")[0] == "ddp_operator":
        raise error
    return f"the Python package {error.name.partition('.')[0]} is not installed; pip install 'ddp-operator[cli]'"

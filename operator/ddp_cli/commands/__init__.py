"""The command `ddp`. Each subcommand is a module, imported when the subcommand runs.

The official `kubernetes` client is imported when a command connects to a cluster, so `ddp --help` and completion stay
fast.
"""

import argparse
import importlib
import importlib.metadata
import os
import shlex
import sys
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from io import TextIOWrapper
from types import ModuleType
from typing import Any, Final, NamedTuple

from ddp_cli.client.errors import ClientError, FieldsLeftOut
from ddp_cli.commands.io import ExitCode, exit_code, print_note
from ddp_cli.view.terminal import print_text
from ddp_operator._version import __version__

# Name, module, one line for the list of commands. A module has add_arguments(parser) and run(arguments) -> exit code.
COMMANDS: Final = (
    ("run", "ddp_cli.commands.run", "run a job's YAML, or a training script, on this machine"),
    ("check", "ddp_cli.commands.check", "check whether a script trains as one job and resumes exactly"),
    ("init", "ddp_cli.commands.init", "write the YAML that would run a training script in a cluster"),
    ("render", "ddp_cli.commands.render", "check a job's YAML and print what the operator would create"),
    ("report", "ddp_cli.commands.report", "write an HTML report with the charts of a run"),
    ("profile", "ddp_cli.commands.profile", "list the profiles of a cluster, or show what one sets"),
    ("convert", "ddp_cli.commands.convert", "convert a Kubeflow PyTorchJob to a DDPTrainingJob"),
    ("submit", "ddp_cli.commands.submit", "check a job's YAML and create the job in a cluster"),
    ("dev", "ddp_cli.commands.dev", "start a job whose pods stay, for runs with changed code within seconds"),
    ("rerun", "ddp_cli.commands.dev", "bring the folder to the pods of ddp dev, and run it there"),
    ("release", "ddp_cli.commands.dev", "end the pods of ddp dev"),
    ("list", "ddp_cli.commands.list_jobs", "list the jobs of a namespace"),
    ("usage", "ddp_cli.commands.usage", "sum up the GPU time of jobs: productive, waiting and lost"),
    ("watch", "ddp_cli.commands.watch", "watch the progress of one job or of all jobs"),
    ("logs", "ddp_cli.commands.logs", "print the logs of all ranks of a job in one stream"),
    ("exec", "ddp_cli.commands.execute", "run a command, or a shell, with the environment of a rank of a job"),
    ("why", "ddp_cli.commands.why", "explain what a job waits for or why it failed, and what to do"),
    ("scale", "ddp_cli.commands.change", "change the number of nodes of a job"),
    ("suspend", "ddp_cli.commands.change", "stop a job's pods after a checkpoint; ddp resume continues it"),
    ("resume", "ddp_cli.commands.change", "resume a suspended job"),
    ("delete", "ddp_cli.commands.change", "delete a job and everything that the operator created for it"),
    ("drill", "ddp_cli.commands.drill", "kill a rank of a running job and measure the recovery"),
    ("mcp", "ddp_cli.commands.mcp", "serve the jobs to an assistant over the Model Context Protocol"),
)
# Commands of the release before, and what replaces them.
_REMOVED: Final = {
    "completion": (
        "removed; argcomplete of the extra cli completes the command: run "
        'eval "$(register-python-argcomplete ddp)", and add that line to ~/.bashrc or ~/.zshrc'
    ),
}
_QUERY: Final = "_ARGCOMPLETE"  # the variable by which a shell queries candidates
_OWN_PACKAGES: Final = ("ddp_cli", "ddp_operator", "ddp_pod")
_WITH_SCRIPT: Final = ("run", "check", "init", "submit", "dev")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit code (``io.ExitCode``)."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the shell: >&-
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w"))
        if isinstance(stream := getattr(sys, name), TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal or file in ASCII or Latin-1 lacks most characters
    command_line = list(sys.argv[1:] if argv is None else argv)
    if _QUERY in os.environ:
        from ddp_cli.commands.completion import complete

        complete()

    command = next((word for word in command_line if not word.startswith("-")), "")
    if command in _REMOVED:
        return _report(command, _REMOVED[command], ExitCode.BAD_INPUT)
    similar = get_close_matches(command, [name for name, _, _ in COMMANDS], 1)
    if similar and similar != [command]:
        return _report(command, f"no such command; did you mean `ddp {similar[0]}`?", ExitCode.BAD_INPUT)
    try:
        parser, commands = build_parser(command)
    except ModuleNotFoundError as error:
        return _report(command, _explain_missing(error), ExitCode.BAD_INPUT)

    end = command_line.index("--") if "--" in command_line else len(command_line)
    words = command_line[:end]
    extra = command_line[end + 1 :]  # of the training script
    arguments, unknown = parser.parse_known_args(words)
    if command in _WITH_SCRIPT:
        from ddp_cli.commands.torchrun import explain_torchrun

        flags = _list_flags(commands[command].parser)
        remedy = explain_torchrun(command, words[words.index(command) + 1 :], unknown, flags)
        if remedy:
            return _report(command, remedy, ExitCode.BAD_INPUT)
    if unknown:
        own_parser = commands[command].parser if command in commands else parser
        own_parser.error(
            f"unrecognized arguments: {shlex.join(unknown)}{_advise_on_unknown(command, own_parser, unknown)}"
        )
    if arguments.command is None:
        parser.print_help()
        return ExitCode.BAD_INPUT

    arguments.extra = extra
    arguments.command_line = shlex.join(["ddp", *command_line])
    return _run(commands[arguments.command].module, arguments)


class Command(NamedTuple):
    """The parser of one subcommand, and the module that runs it."""

    parser: argparse.ArgumentParser
    module: ModuleType


def build_parser(*names: str) -> tuple[argparse.ArgumentParser, dict[str, Command]]:
    """Return the parser of `ddp`, with the arguments of the named subcommands only, and these."""
    parser = argparse.ArgumentParser(
        prog=_find_program_name(),
        description="Distributed PyTorch training from one YAML file, in a cluster or on this machine.",
    )
    parser.add_argument("--version", action="version", version=f"ddp {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND")
    commands = {}
    for name, module_name, help_text in COMMANDS:
        subparser = subparsers.add_parser(name, help=help_text, description=help_text[0].upper() + help_text[1:] + ".")
        if name in names:
            module = importlib.import_module(module_name)
            module.add_arguments(subparser)
            commands[name] = Command(subparser, module)
    return parser, commands


def _list_flags(parser: argparse.ArgumentParser) -> list[str]:
    """Return the long options of a command."""
    return sorted(flag for action in parser._actions for flag in action.option_strings if flag.startswith("--"))


def _advise_on_unknown(command: str, parser: argparse.ArgumentParser, unknown: Sequence[str]) -> str:
    """Return the hint for unknown arguments: a similar option of the command, else where the script's belong."""
    from ddp_cli.commands.arguments import explain_elsewhere

    name = unknown[0].partition("=")[0]
    elsewhere = explain_elsewhere(command, name)
    if elsewhere:
        return f"; {elsewhere}"
    own = {flag.strip("-"): flag for flag in _list_flags(parser)}
    similar = get_close_matches(name.strip("-"), own, 1, cutoff=0.75) if name.startswith("--") else []
    if similar:
        return f"; did you mean {own[similar[0]]}?"
    if command == "exec":
        return f"; put the command after --: -- {shlex.join(unknown)}"
    if command not in (*_WITH_SCRIPT, "rerun"):
        return ""
    if not name.startswith("-"):
        return f"; name only the script (ddp {command} {name}), and put its arguments after --"
    return f"; put arguments of the script after --: -- {shlex.join(unknown)}"


def _find_program_name() -> str:
    """Return the words before a command: kubectl finds the plugin ``kubectl-ddp`` in PATH."""
    return "kubectl ddp" if os.path.basename(sys.argv[0]) == "kubectl-ddp" else "ddp"


def _run(module: ModuleType, arguments: argparse.Namespace) -> int:
    """Run a command; print an error as one message and return its exit code."""
    from ddp_operator.api.errors import InvalidManifest

    try:
        with _print_warnings():
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
        return _report(arguments.command, "internal error in ddp; please report the traceback above", ExitCode.BROKEN)


@contextmanager
def _print_warnings() -> Iterator[None]:
    """Print the client's warnings as notes, without Python's line of source."""
    with warnings.catch_warnings():
        show = warnings.showwarning

        def show_note(message: Warning | str, category: type[Warning], *rest: Any, **more: Any) -> None:
            if issubclass(category, FieldsLeftOut):
                print_note(str(message))
            else:
                show(message, category, *rest, **more)

        warnings.showwarning = show_note
        warnings.simplefilter("default", FieldsLeftOut)
        yield


def _report(command: str, message: str, code: int) -> int:
    print_text(f"ddp {command}: {message}", file=sys.stderr)
    return code


def _explain_missing(error: ModuleNotFoundError) -> str:
    """Return what to install. Raises: the error itself, if the missing module is one of the project's own.

    The project itself is in no package index, so the message names the missing packages.
    """
    if error.name is None or error.name.partition(".")[0] in _OWN_PACKAGES:
        raise error
    package = error.name.partition(".")[0]
    extras = ("mcp", "cli") if package == "mcp" else ("cli",)
    packages = shlex.join(list_requirements(*extras) or [package.replace("_", "-")])
    return f"the Python package {package} is not installed; {shlex.quote(sys.executable)} -m pip install {packages}"


def list_requirements(*extras: str) -> list[str]:
    """Return the requirements of this distribution's extras; none if it is used without an installation."""
    try:
        requirements = importlib.metadata.requires("ddp-operator") or []
    except importlib.metadata.PackageNotFoundError:
        return []
    listed = [requirement.partition(";") for requirement in requirements]
    own = [
        name.strip()
        for name, _, marker in listed
        if any(f"extra == '{extra}'" in marker.replace('"', "'") for extra in extras)
    ]
    return [name for name in own if not name.startswith("ddp-operator")]

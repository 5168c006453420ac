"""The frame of the command `ddp`. Each subcommand is a module, imported when the subcommand runs.

``ddp_cli.__main__`` passes it the commands: those of the kernel, which are listed here, with those of the features.
The official `kubernetes` client is imported when a command connects to a cluster, so `ddp --help` and completion stay
fast.
"""

import argparse
import importlib
import importlib.metadata
import os
import re
import shlex
import sys
import traceback
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from io import TextIOWrapper
from types import ModuleType
from typing import Any, Final, NamedTuple

from ddp_cli.client.errors import ClientError, DeprecatedField, FieldsLeftOut
from ddp_cli.client.hooks import Command, CommandFeature
from ddp_cli.commands.io import ExitCode, exit_code, print_note
from ddp_cli.view.terminal import print_text
from ddp_operator._version import __version__

COMMANDS: Final = (
    Command("run", "ddp_cli.commands.run", "run a job's YAML, or a training script, on this machine", script="file"),
    Command(
        "init", "ddp_cli.commands.init", "write the YAML that would run a training script in a cluster", script="file"
    ),
    Command("render", "ddp_cli.commands.render", "check a job's YAML and print what the operator would create"),
    Command("submit", "ddp_cli.commands.submit", "check a job's YAML and create the job in a cluster", script="file"),
    Command("list", "ddp_cli.commands.list_jobs", "list the jobs of a namespace"),
    Command("usage", "ddp_cli.commands.usage", "sum up the GPU time of jobs: productive, waiting and lost"),
    Command("watch", "ddp_cli.commands.watch", "watch the progress of one job or of all jobs"),
    Command("logs", "ddp_cli.commands.logs", "print the logs of all ranks of a job in one stream"),
    Command("exec", "ddp_cli.commands.execute", "run a command, or a shell, with the environment of a rank of a job"),
    Command("why", "ddp_cli.commands.why", "explain what a job waits for or why it failed, and what to do"),
    Command("scale", "ddp_cli.commands.change", "change the number of nodes of a job"),
    Command("suspend", "ddp_cli.commands.change", "stop a job's pods after a checkpoint; ddp resume continues it"),
    Command("resume", "ddp_cli.commands.change", "resume a suspended job"),
    Command("delete", "ddp_cli.commands.change", "delete a job and everything that the operator created for it"),
)
"""The commands of the kernel, in the order of the list of commands."""
# Commands of the release before, and what replaces them.
_REMOVED: Final = {
    "completion": (
        "removed; argcomplete of the extra cli completes the command: run "
        'eval "$(register-python-argcomplete ddp)", and add that line to ~/.bashrc or ~/.zshrc'
    ),
}
_QUERY: Final = "_ARGCOMPLETE"  # the variable by which a shell queries candidates
_OWN_PACKAGES: Final = ("ddp_cli", "ddp_operator", "ddp_pod")


def place_commands(features: Iterable[CommandFeature]) -> tuple[Command, ...]:
    """Return the commands of the kernel, each followed by those of features that name it."""
    added = [command for feature in features for command in feature.commands]
    return tuple(command for own in COMMANDS for command in (own, *(more for more in added if more.after == own.name)))


def main(listed: Sequence[Command], argv: Sequence[str] | None = None) -> int:
    """Run one of the listed subcommands and return its exit code (``io.ExitCode``)."""
    _prepare_streams()
    command_line = list(sys.argv[1:] if argv is None else argv)
    if _QUERY in os.environ:
        from ddp_cli.commands.completion import complete

        complete(listed)

    command = next((word for word in command_line if not word.startswith("-")), "")
    if command in _REMOVED:
        return _report(command, _REMOVED[command], ExitCode.BAD_INPUT)
    similar = get_close_matches(command, [entry.name for entry in listed], 1)
    if similar and similar != [command]:
        return _report(command, f"no such command; did you mean `ddp {similar[0]}`?", ExitCode.BAD_INPUT)
    try:
        parser, commands = build_parser(listed, command)
    except ModuleNotFoundError as error:
        return _report_missing(command, error)
    except Exception:
        return _report_fault(command)

    end = command_line.index("--") if "--" in command_line else len(command_line)
    words = command_line[:end]
    extra = command_line[end + 1 :]  # of the training script
    arguments, unknown = parser.parse_known_args(words)
    script = next((entry.script for entry in listed if entry.name == command), "")
    if script == "file":
        from ddp_cli.commands.torchrun import explain_torchrun

        flags = _list_flags(commands[command].parser)
        remedy = explain_torchrun(command, words[words.index(command) + 1 :], unknown, flags)
        if remedy:
            return _report(command, remedy, ExitCode.BAD_INPUT)
    if unknown:
        loaded = commands.get(command)
        advice = _advise_on_unknown(command, loaded, script, unknown)
        own_parser = loaded.parser if loaded is not None else parser
        own_parser.error(f"unrecognized arguments: {shlex.join(unknown)}{advice}")
    if arguments.command is None:
        parser.print_help()
        return ExitCode.BAD_INPUT

    arguments.extra = extra
    arguments.command_line = shlex.join(["ddp", *command_line])
    return _run(commands[arguments.command].module, arguments)


def _prepare_streams() -> None:
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the shell: >&-
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w"))
        if isinstance(stream := getattr(sys, name), TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal or file in ASCII or Latin-1 lacks most characters


class LoadedCommand(NamedTuple):
    """The parser of one subcommand, and the module that runs it."""

    parser: argparse.ArgumentParser
    module: ModuleType


def build_parser(listed: Sequence[Command], *names: str) -> tuple[argparse.ArgumentParser, dict[str, LoadedCommand]]:
    """Return the parser of `ddp`, with the arguments of the named subcommands only, and these."""
    parser = argparse.ArgumentParser(
        prog=_find_program_name(),
        description="Distributed PyTorch training from one YAML file, in a cluster or on this machine.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"ddp {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND")
    commands = {}
    for command in listed:
        description = f"{command.help[0].upper()}{command.help[1:]}."
        # An abbreviation would get another meaning with a new option, and hides a mistyped one: --cpu for --cpus.
        subparser = subparsers.add_parser(command.name, help=command.help, description=description, allow_abbrev=False)
        if command.name in names:
            module = importlib.import_module(command.module)
            module.add_arguments(subparser)
            commands[command.name] = LoadedCommand(subparser, module)
    return parser, commands


def _list_flags(parser: argparse.ArgumentParser) -> list[str]:
    """Return the long options of a command."""
    return sorted(flag for action in parser._actions for flag in action.option_strings if flag.startswith("--"))


def _advise_on_unknown(name: str, loaded: LoadedCommand | None, script: str, unknown: Sequence[str]) -> str:
    """Return the hint for unknown arguments: a similar option of the command, else where the script's belong."""
    from ddp_cli.commands.arguments import explain_elsewhere

    option = unknown[0].partition("=")[0]
    elsewhere = explain_elsewhere(loaded.module, option) if loaded is not None else ""
    if elsewhere:
        return f"; {elsewhere}"
    own = {flag.strip("-"): flag for flag in _list_flags(loaded.parser)} if loaded is not None else {}
    similar = get_close_matches(option.strip("-"), own, 1, cutoff=0.75) if option.startswith("--") else []
    if similar:
        return f"; did you mean {own[similar[0]]}?"
    if name == "exec":
        return f"; put the command after --: -- {shlex.join(unknown)}"
    if not script:
        return ""
    if not option.startswith("-"):
        return f"; name only the script (ddp {name} {option}), and put its arguments after --"
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
        return _report_missing(arguments.command, error)
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED
    except BrokenPipeError:  # `ddp logs … | head`: keep the interpreter's own flush from failing
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.OK
    except Exception:
        return _report_fault(arguments.command)


@contextmanager
def _print_warnings() -> Iterator[None]:
    """Print the client's warnings as notes, without Python's line of source."""
    with warnings.catch_warnings():
        show = warnings.showwarning

        def show_note(message: Warning | str, category: type[Warning], *rest: Any, **more: Any) -> None:
            if issubclass(category, FieldsLeftOut | DeprecatedField):
                print_note(str(message))
            else:
                show(message, category, *rest, **more)

        warnings.showwarning = show_note
        warnings.simplefilter("default", FieldsLeftOut)
        warnings.simplefilter("default", DeprecatedField)
        yield


def _report(command: str, message: str, code: int) -> int:
    print_text(f"ddp {command}: {message}", file=sys.stderr)
    return code


def _report_fault(command: str) -> int:
    """Print the traceback of the error that is being handled. It ends this command only."""
    traceback.print_exc()
    return _report(command, "internal error in ddp; please report the traceback above", ExitCode.BROKEN)


def _report_missing(command: str, error: ModuleNotFoundError) -> int:
    """Print what to install; a missing module of the project's own is a fault of ddp."""
    package = (error.name or "").partition(".")[0]
    if package in ("", *_OWN_PACKAGES):
        return _report_fault(command)
    return _report(command, _explain_missing(package), ExitCode.BAD_INPUT)


def _explain_missing(package: str) -> str:
    """Return what to install. The project itself is in no package index, so the message names the missing packages."""
    packages = shlex.join(list_requirements(package) or [package.replace("_", "-")])
    return f"the Python package {package} is not installed; {shlex.quote(sys.executable)} -m pip install {packages}"


def list_requirements(package: str) -> list[str]:
    """Return the requirements of the extra cli, and that of another extra which names the package.

    None if this distribution is used without an installation.
    """
    try:
        listed = importlib.metadata.requires("ddp-operator") or []
    except importlib.metadata.PackageNotFoundError:
        return []
    requirements = [(text.strip(), marker.replace('"', "'")) for text, _, marker in (s.partition(";") for s in listed)]
    own = [text for text, marker in requirements if "extra == 'cli'" in marker or _names(text, package)]
    return [text for text in dict.fromkeys(own) if not text.startswith("ddp-operator")]


def _names(requirement: str, package: str) -> bool:
    return re.match(r"[\w.-]*", requirement)[0].replace("-", "_") == package  # type: ignore[index]

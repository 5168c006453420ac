"""Shell completion: `ddp completion` prints a script; the script and kubectl query `complete` for candidates."""

import argparse
import contextlib
import io
import os
import signal
import sys
from collections.abc import Sequence
from typing import Final

from ddp_cli.commands.arguments import add_cluster_arguments, add_runs_argument, is_local, open_client
from ddp_cli.commands.io import ExitCode
from ddp_cli.view.terminal import print_text

SHELLS: Final = ("bash", "zsh", "fish")
_SECONDS_FOR_CLUSTER: Final = 3
_NO_FILES: Final = ":4"  # Cobra's directives, which kubectl reads from a plugin's last line
_FILES: Final = ":0"
_BASH: Final = """\
_ddp() {
    local current=${COMP_WORDS[COMP_CWORD]}
    mapfile -t COMPREPLY < <(ddp __complete "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null)
    if [[ ${#COMPREPLY[@]} -eq 0 && $current != -* ]]; then mapfile -t COMPREPLY < <(compgen -f -- "$current"); fi
}
complete -o filenames -F _ddp ddp
"""
_ZSH: Final = """\
#compdef ddp
_ddp() {
    local -a candidates
    candidates=("${(@f)$(ddp __complete "${(@)words[2,CURRENT]}" 2>/dev/null)}")
    candidates=(${candidates:#})
    if (( ${#candidates} )); then compadd -- "${candidates[@]}"; else _files; fi
}
compdef _ddp ddp
"""
_FISH: Final = """\
function __ddp_complete
    set -l words (commandline -opc)[2..] (commandline -ct)
    ddp __complete $words 2>/dev/null
end
complete -c ddp -a '(__ddp_complete)'
"""
_SCRIPTS: Final = {"bash": _BASH, "zsh": _ZSH, "fish": _FISH}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("shell", choices=SHELLS, help="bash, zsh or fish")
    parser.epilog = (
        "For the current shell: source <(ddp completion bash). To keep it, add that line to ~/.bashrc. "
        "For fish: ddp completion fish | source. kubectl's own completion completes `kubectl ddp` too."
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the script."""
    print_text(_SCRIPTS[arguments.shell], end="")
    return ExitCode.OK


def main_for_kubectl() -> int:
    """Print candidates in Cobra's format: the program ``kubectl_complete-ddp``, which kubectl starts.

    Source: https://kubernetes.io/docs/tasks/extend-kubectl/kubectl-plugins/
    """
    candidates = complete(sys.argv[1:])
    for candidate in candidates:
        print_text(candidate)
    print_text(_NO_FILES if candidates else _FILES)
    return ExitCode.OK


def complete(words: Sequence[str]) -> list[str]:
    """Return the candidates for the last word: commands, flags, or names of jobs.

    Empty where a file is expected, and where no cluster responds within three seconds.
    """
    *before, current = words or [""]
    if "--" in before:
        return []  # arguments of the training script

    command = next((word for word in before if not word.startswith("-")), "")
    if not command:
        candidates = _list_commands()
    elif current.startswith("-"):
        candidates = list_flags(command)
    elif _takes_job(command):
        candidates = _list_jobs(before[before.index(command) + 1 :])
    else:
        candidates = []
    return [candidate for candidate in candidates if candidate.startswith(current)]


def _list_commands() -> list[str]:
    from ddp_cli.commands import COMMANDS

    return [name for name, _, _ in COMMANDS]


def _list_actions(command: str) -> list[argparse.Action]:
    """Return the arguments of a command; none for an unknown one."""
    from ddp_cli.commands import build_parser

    _, commands = build_parser(command)
    return commands[command].parser._actions if command in commands else []


def list_flags(command: str) -> list[str]:
    """Return the long options of a command."""
    return sorted(flag for action in _list_actions(command) for flag in action.option_strings if flag.startswith("--"))


def _takes_job(command: str) -> bool:
    """Return whether the command's argument is the name of a job."""
    return any(action.dest == "name" and not action.option_strings for action in _list_actions(command))


def _list_jobs(words: Sequence[str]) -> list[str]:
    """Return the names of the jobs that the flags on the command line select."""
    parser = argparse.ArgumentParser(add_help=False, exit_on_error=False)
    add_cluster_arguments(parser)
    parser.add_argument("--local", action="store_true")
    add_runs_argument(parser)
    signal.signal(signal.SIGALRM, _exit_without_candidates)
    signal.alarm(_SECONDS_FOR_CLUSTER)
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            arguments, _ = parser.parse_known_args(list(words))
            backend = open_client(arguments, local=is_local(arguments)).backend
            listing = backend.list()
    except (Exception, SystemExit):  # a shell shows no message while it completes
        return []
    finally:
        signal.alarm(0)
    return sorted(str(item["metadata"]["name"]) for item in listing["items"])


def _exit_without_candidates(number: int, frame: object) -> None:
    os._exit(ExitCode.OK)

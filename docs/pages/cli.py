"""Writes docs/cli.md from the commands' own parsers: ``python -m docs.pages.cli``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Collection, Iterator, Mapping
from typing import Final

from ddp_cli.__main__ import COMMANDS
from ddp_cli.commands import build_parser
from ddp_cli.commands.io import ExitCode

MEANINGS: Final = {
    ExitCode.OK: "success; if the command waited for a job, the job succeeded",
    ExitCode.FAILED: "the job failed, or the command failed",
    ExitCode.BAD_INPUT: "invalid flag, file or manifest; nothing was changed",
    ExitCode.NOT_FOUND: "no job or run folder has that name",
    ExitCode.CLUSTER: "the cluster is unreachable, denied access or refused the call",
    ExitCode.BROKEN: "an internal error of ddp, with its traceback; `ddp run` first stops the pods gracefully",
    ExitCode.INTERRUPTED: "interrupted by Ctrl-C; `ddp run` returns 128 + the number of the signal",
}
_HEAD: Final = """\
# The command `ddp`

<!-- Generated from the commands' parsers by `make generate`. Do not edit. -->

`ddp run`, `check`, `init`, `render` and `convert` work on this machine. All other commands use a cluster as kubectl
does. `ddp list`, `watch`, `why`, `logs`, `report`, `suspend`, `resume`, `scale` and `delete` also accept runs of
`ddp run`: with `--local`, with the path of a run folder, or, with a message, if no cluster is configured.

Results go to standard output and messages to standard error, so programs can parse `-o json`. `kubectl ddp why my-job`
is `ddp why my-job`. [argcomplete](https://pypi.org/project/argcomplete) of the extra `cli` completes commands, flags
and names of jobs: add `eval "$(register-python-argcomplete ddp)"` to `~/.bashrc` or `~/.zshrc`.

## Exit codes

"""


def write_page() -> str:
    """Return the page."""
    parser, _ = build_parser(COMMANDS, *(command.name for command in COMMANDS))
    actions = parser._subparsers._group_actions if parser._subparsers else []
    choices = dict(actions[0].choices or {})
    shared = _find_shared_arguments(choices)
    described = {name: [*_describe(choices[name], shared)] for name in choices}
    lines = [f"- {code}: {meaning}" for code, meaning in MEANINGS.items()]
    lines += ["", "## Commands", ""]
    lines += [f"- {_format_usage(choices[command.name], described)}: {command.help}" for command in COMMANDS]
    lines += ["", "## Arguments of several commands", *_list_shared(shared)]
    for command in COMMANDS:
        if described[command.name]:
            lines += ["", f"## ddp {command.name}", *described[command.name]]
    return _HEAD + "\n".join(lines) + "\n"


def _find_shared_arguments(choices: Mapping[str, argparse.ArgumentParser]) -> dict[str, list[str]]:
    """Return the arguments that several commands have, each with the names of these commands."""
    commands: dict[str, list[str]] = {}
    for name, parser in choices.items():
        for action in parser._actions:
            if not isinstance(action, argparse._HelpAction):
                commands.setdefault(_format_argument(action), []).append(name)
    return {entry: names for entry, names in commands.items() if len(names) > 1}


def _list_shared(shared: Mapping[str, list[str]]) -> Iterator[str]:
    """Yield the shared arguments, those of the same commands together."""
    groups: dict[str, list[str]] = {}
    for entry, names in shared.items():
        groups.setdefault(_list_commands(names), []).append(entry)
    for commands, entries in groups.items():
        yield from ("", f"**{commands}**", "", *entries)


def _format_usage(parser: argparse.ArgumentParser, described: Mapping[str, list[str]]) -> str:
    """Return a command with its positional arguments, and a link if it has a section."""
    usage = f"`{' '.join([parser.prog, *map(_format_positional, _find_positionals(parser))])}`"
    name = parser.prog.split()[-1]
    return f"[{usage}](#ddp-{name})" if described[name] else usage


def _find_positionals(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    return [action for action in parser._actions if not action.option_strings]


def _list_commands(names: list[str]) -> str:
    is_long = len(names) > len(COMMANDS) / 2
    others = [command.name for command in COMMANDS if command.name not in names]
    return f"all but {', '.join(others)}" if is_long else ", ".join(names)


def _describe(parser: argparse.ArgumentParser, shared: Collection[str]) -> Iterator[str]:
    """Yield the arguments of a command that no other command has, and the notes of its help."""
    actions = [action for action in parser._actions if not isinstance(action, argparse._HelpAction)]
    own = [entry for entry in map(_format_argument, actions) if entry not in shared]
    if own:
        yield ""
        yield from own
    if parser.epilog:
        yield ""
        yield parser.epilog


def _format_argument(action: argparse.Action) -> str:
    required = "required; " if action.option_strings and action.required else ""
    return f"- {_name(action)}: {required}{action.help or ''}"


def _format_positional(action: argparse.Action) -> str:
    name = str(action.metavar or "|".join(map(str, action.choices or (action.dest,))))
    return f"[{name}]" if action.nargs == "?" else name


def _name(action: argparse.Action) -> str:
    if not action.option_strings:
        return f"`{_format_positional(action)}`"
    flags = ", ".join(f"`{flag}`" for flag in action.option_strings)
    if action.nargs == 0:
        return flags
    value = action.metavar or "|".join(map(str, action.choices or (action.dest.upper(),)))
    return f"{flags} `{value}`"


if __name__ == "__main__":
    sys.stdout.write(write_page())

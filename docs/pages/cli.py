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

`ddp run`, `init`, `render` and `convert` work on this machine. All other commands use a cluster. They log in as kubectl
does, with the kubeconfig and its current context, or with the service account of their pod, and need the same
permissions as kubectl.

The package also installs a kubectl plugin: `kubectl ddp why my-job` is `ddp why my-job`. Commands, flags and names of
jobs are completed by [argcomplete](https://pypi.org/project/argcomplete) of the extra `cli`: add the line
`eval "$(register-python-argcomplete ddp)"` to `~/.bashrc` or `~/.zshrc`.

`ddp list`, `watch`, `why`, `logs`, `report`, `suspend`, `resume`, `scale` and `delete` also accept runs of `ddp run`:
with `--local`, with the path of a run folder, or if no cluster is configured. In the last case a message states this.

Results go to standard output and messages to standard error, so programs can parse `-o json`.

## Exit codes

| code | meaning |
|---|---|
"""


def write_page() -> str:
    """Return the page."""
    parser, _ = build_parser(COMMANDS, *(command.name for command in COMMANDS))
    actions = parser._subparsers._group_actions if parser._subparsers else []
    choices = dict(actions[0].choices or {})
    shared = _find_shared_arguments(choices)
    lines = [f"| {code} | {meaning} |" for code, meaning in MEANINGS.items()]
    lines += ["", "## Commands", "", "| command | action |", "|---|---|"]
    lines += [f"| [`ddp {command.name}`](#ddp-{command.name}) | {command.help} |" for command in COMMANDS]
    lines += ["", "## Arguments of several commands", "", "| argument | meaning | commands |", "|---|---|---|"]
    lines += [f"{row} {_list_commands(names)} |" for row, names in shared.items()]
    for command in COMMANDS:
        lines += ["", f"## ddp {command.name}", "", *_describe(choices[command.name], shared)]
    return _HEAD + "\n".join(lines) + "\n"


def _find_shared_arguments(choices: Mapping[str, argparse.ArgumentParser]) -> dict[str, list[str]]:
    """Return the rows of arguments that several commands have, each with the names of these commands."""
    commands: dict[str, list[str]] = {}
    for name, parser in choices.items():
        for action in parser._actions:
            if not isinstance(action, argparse._HelpAction):
                commands.setdefault(_format_row(action), []).append(name)
    return {row: names for row, names in commands.items() if len(names) > 1}


def _list_commands(names: list[str]) -> str:
    is_long = len(names) > len(COMMANDS) / 2
    others = [command.name for command in COMMANDS if command.name not in names]
    return f"all but {', '.join(others)}" if is_long else ", ".join(names)


def _describe(parser: argparse.ArgumentParser, shared: Collection[str]) -> Iterator[str]:
    """Yield a command's usage, the arguments that no other command has, and the notes of its help."""
    positionals = [action for action in parser._actions if not action.option_strings]
    yield "    " + " ".join([parser.prog, *map(_format_positional, positionals), "[flags]"])
    rows = [_format_row(action) for action in parser._actions if not isinstance(action, argparse._HelpAction)]
    own = [row for row in rows if row not in shared]
    if own:
        yield from ("", "| argument | meaning |", "|---|---|")
        yield from own
    if parser.epilog:
        yield ""
        yield parser.epilog


def _format_row(action: argparse.Action) -> str:
    return f"| {_name(action)} | {_help(action)} |"


def _format_positional(action: argparse.Action) -> str:
    name = str(action.metavar or "|".join(map(str, action.choices or (action.dest,))))
    return f"[{name}]" if action.nargs == "?" else name


def _name(action: argparse.Action) -> str:
    if not action.option_strings:
        return f"`{_format_positional(action)}`".replace("|", "\\|")
    flags = ", ".join(f"`{flag}`" for flag in action.option_strings)
    if action.nargs == 0:
        return flags
    value = action.metavar or "|".join(map(str, action.choices or (action.dest.upper(),)))
    return f"{flags} `{value}`".replace("|", "\\|")


def _help(action: argparse.Action) -> str:
    required = "required; " if action.option_strings and action.required else ""
    return (required + (action.help or "")).replace("|", "\\|")


if __name__ == "__main__":
    sys.stdout.write(write_page())

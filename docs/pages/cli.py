"""Writes docs/cli.md from the commands' own parsers: ``python -m docs.pages.cli``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from typing import Final

from ddp_operator.cli import COMMANDS, build_parser
from ddp_operator.cli.io import ExitCode

MEANINGS: Final = {
    ExitCode.OK: "success; where the command waited for a job, the job succeeded",
    ExitCode.FAILED: "the job failed, or the command could not do what it was asked to do",
    ExitCode.BAD_INPUT: "invalid flag, file or manifest; nothing was changed",
    ExitCode.NOT_FOUND: "no job, or no run folder, of that name",
    ExitCode.CLUSTER: "the cluster is unreachable, denied access or refused the call",
    ExitCode.BROKEN: "a bug in ddp itself, with its traceback; `ddp run` stops the pods in order first",
    ExitCode.INTERRUPTED: "interrupted by Ctrl-C; `ddp run` returns 128 + the number of the signal",
}
_HEAD: Final = """\
# The command `ddp`

<!-- Generated from the commands' parsers by `make generate`. Do not edit. -->

`ddp run`, `init`, `render`, `convert` and `report` work on this machine. The others talk to a cluster and log in as
kubectl does: with the kubeconfig and its current context, or with the service account of the pod they run in. They need
the same permissions as kubectl, which can do all of it too; `ddp` adds progress bars, the logs of all ranks in one
stream, and `why`. `ddp list`, `watch`, `why`, `logs`, `suspend`, `resume`, `scale` and `delete` know the runs of
`ddp run` as well: with `--local`, given the path of a run folder, or where no cluster is configured, which they
then say.

The package also installs a kubectl plugin: `kubectl ddp why my-job` is `ddp why my-job`. Commands, flags and names of
jobs are completed in bash, zsh and fish ([`ddp completion`](#ddp-completion)), and by kubectl's own completion.

Results go to standard output, messages to standard error, so that programs can read `-o json`. An error message says
what to do.

## Exit codes

| code | meaning |
|---|---|
"""


def write_page() -> str:
    """Return the page."""
    parser, _ = build_parser(*(name for name, _, _ in COMMANDS))
    actions = parser._subparsers._group_actions if parser._subparsers else []
    choices = dict(actions[0].choices or {})
    lines = [f"| {code} | {meaning} |" for code, meaning in MEANINGS.items()]
    lines += ["", "## Commands", "", "| command | what it does |", "|---|---|"]
    lines += [f"| [`ddp {name}`](#ddp-{name}) | {text} |" for name, _, text in COMMANDS]
    for name, _, text in COMMANDS:
        lines += ["", f"## ddp {name}", "", f"{text[0].upper()}{text[1:]}.", "", *_describe(choices[name])]
    return _HEAD + "\n".join(lines) + "\n"


def _describe(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Yield a command's usage, its arguments and what else its help says."""
    places = [action for action in parser._actions if not action.option_strings]
    yield "    " + " ".join([parser.prog, *map(_place, places), "[flags]"])
    yield ""
    yield "| argument | meaning |"
    yield "|---|---|"
    for action in parser._actions:
        if not isinstance(action, argparse._HelpAction):
            yield f"| {_name(action)} | {_help(action)} |"
    if parser.epilog:
        yield ""
        yield parser.epilog


def _place(action: argparse.Action) -> str:
    words = str(action.metavar or "|".join(map(str, action.choices or (action.dest,))))
    return f"[{words}]" if action.nargs == "?" else words


def _name(action: argparse.Action) -> str:
    if not action.option_strings:
        return f"`{_place(action)}`".replace("|", "\\|")
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

"""`--workdir`: pack a folder and run the job in it."""

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

from ddp_cli.client.workdir import Workdir
from ddp_cli.commands.init import Script
from ddp_cli.commands.io import CommandError


def add_workdir_arguments(parser: argparse.ArgumentParser) -> Any:
    """Declare the arguments of every command that packs a folder. Returns their group."""
    group = parser.add_argument_group("code")
    group.add_argument(
        "--workdir", type=Path, metavar="DIR", help="pack the files of this folder that git would add; pods start in it"
    )
    group.add_argument(
        "--include",
        action="append",
        default=[],
        metavar="PATH",
        help="also pack this file or folder of DIR, even if git ignores it or it may hold a secret; repeatable",
    )
    group.add_argument(
        "--pip", action="store_true", help="install DIR/requirements.txt in each pod before its ranks start"
    )
    return group


def read_workdir(arguments: argparse.Namespace, folder: Path | None = None) -> Workdir | None:
    """Return the folder that the arguments name, else ``folder``; None: no folder. Raises: CommandError."""
    names = ("include", "pip", "code_claim")
    options: dict[str, Any] = {name: getattr(arguments, name, None) for name in names}
    chosen = arguments.workdir or folder
    if chosen is not None:
        return Workdir(chosen, *options.values())
    for name, value in options.items():
        if value:
            raise CommandError(f"--{name.replace('_', '-')} needs --workdir DIR; add it")
    return None


def place_script(script: Script, workdir: Path) -> Script:
    """Return the script with its path relative to ``workdir``, where a pod starts. Raises: ClientError."""
    if script.path is None:
        return script
    return replace(script, command=(*script.command[:-1], Workdir(workdir).place(script.path)))

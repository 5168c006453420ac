"""`--workdir`: a folder that goes with the job."""

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

from ddp_operator.cli.init import Script
from ddp_operator.cli.io import CommandError
from ddp_operator.client.workdir import Workdir


def add_workdir_arguments(parser: argparse.ArgumentParser) -> Any:
    """Declare the arguments of every command that takes a folder along. Returns their group."""
    group = parser.add_argument_group("code")
    group.add_argument(
        "--workdir", type=Path, metavar="DIR", help="pack this folder, as git would, and start the pods in it"
    )
    group.add_argument(
        "--include",
        action="append",
        default=[],
        metavar="PATH",
        help="pack this file or folder of DIR though it is ignored or may hold a secret; may be repeated",
    )
    group.add_argument(
        "--pip", action="store_true", help="install DIR's requirements.txt in each pod before its ranks start"
    )
    return group


def read_workdir(arguments: argparse.Namespace, folder: Path | None = None) -> Workdir | None:
    """Return the folder that the arguments name, else ``folder``; None: there is none. Raises: CommandError."""
    names = ("include", "pip", "code_claim", "code_image")
    options: dict[str, Any] = {name: getattr(arguments, name, None) for name in names}
    chosen = arguments.workdir or folder
    if chosen is not None:
        return Workdir(chosen, *options.values())
    for name, given in options.items():
        if given:
            raise CommandError(f"--{name.replace('_', '-')}: is about the folder of --workdir; name that too")
    return None


def place_script(script: Script, workdir: Path) -> Script:
    """Return the script with its path as a pod has it, which starts in ``workdir``. Raises: ClientError."""
    return script if script.words[0] == "-m" else replace(script, words=(Workdir(workdir).place(script.words[0]),))

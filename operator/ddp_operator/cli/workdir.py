"""`--workdir`: a folder that goes with the job. Its options, and how it comes into the cluster."""

import argparse
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from ddp_operator.api.job import DDPTrainingJob
from ddp_operator.cli.init import Script
from ddp_operator.cli.io import CommandError
from ddp_operator.code.files import CannotPack
from ddp_operator.code.packed import Code, pack_code
from ddp_operator.manifests.template import resolve_template


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


def read_workdir(arguments: argparse.Namespace, folder: Path | None = None) -> Code | None:
    """Pack the folder that the arguments name, else ``folder``; None: there is none. Raises: CommandError."""
    chosen = arguments.workdir or folder
    if chosen is None:
        unused = next(
            (
                f"--{name.replace('_', '-')}"
                for name in ("include", "pip", "code_claim")
                if getattr(arguments, name, None)
            ),
            None,
        )
        if unused:
            raise CommandError(f"{unused}: is about the folder of --workdir; name that too")
        return None
    try:
        return pack_code(chosen, arguments.include, pip=arguments.pip, claim=getattr(arguments, "code_claim", None))
    except CannotPack as error:
        raise CommandError(str(error)) from None


def place_script(script: Script, workdir: Path) -> Script:
    """Return the script with its path as a pod has it, which starts in ``workdir``. Raises: CommandError."""
    if script.words[0] == "-m":
        return script
    path = os.path.relpath(os.path.realpath(script.words[0]), os.path.realpath(workdir))
    if path.startswith(".."):
        raise CommandError(f"{script.words[0]}: is not in --workdir {workdir}, which is all that the pods get")
    return replace(script, words=(path,))


def default_workdir(script: Script) -> Path:
    """Return the folder that a script is run from: the current one, or where it is outside of that, its own.

    Raises: CommandError.
    """
    current = Path.cwd()
    path = Path(script.words[0]).resolve()
    folder = current if script.words[0] == "-m" or current in path.parents else path.parent
    if folder in (Path.home(), Path(folder.anchor)):
        raise CommandError(f"--workdir: name the folder to pack; {folder} is too much to take by itself")
    return folder


def check_workdir(code: Code, job: DDPTrainingJob, *, in_cluster: bool) -> None:
    """See that the job's command finds its script in the folder, and the folder its place. Raises: CommandError."""
    template = resolve_template(job)
    try:
        if in_cluster:
            code.check_size()
        code.check_command(template.command, template.trainer.get("workingDir"))
    except CannotPack as error:
        raise CommandError(str(error)) from None

"""The folder that is packed for a job."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ddp_cli.client.errors import ClientError
from ddp_cli.client.packing.files import CannotPack
from ddp_cli.client.packing.packed import PackedCode, pack_code
from ddp_cli.client.validation import check_manifest
from ddp_operator.api.job_file import FindObject, Manifest, find_none
from ddp_operator.manifests.template import resolve_template

ENTRYPOINT: Final = (
    "has args without command: the image's entrypoint does not run. If the training needs it, write it before its "
    "arguments: command: [/entrypoint.sh]"
)


@dataclass(frozen=True, slots=True)
class Workdir:
    """A folder to pack: further paths to include, whether to install its requirements, and its claim."""

    folder: Path
    include: Sequence[str] = ()
    pip: bool = False
    claim: str | None = None

    def pack(self) -> PackedCode:
        """Pack it. Raises: ClientError."""
        try:
            return pack_code(self.folder, self.include, pip=self.pip, claim=self.claim)
        except CannotPack as error:
            raise ClientError(str(error)) from None

    def place(self, script: str) -> str:
        """Return the path of a script relative to the folder, where a pod starts. Raises: ClientError."""
        path = os.path.relpath(os.path.realpath(script), os.path.realpath(self.folder))
        if path.startswith(".."):
            raise ClientError(
                f"{script} is outside of --workdir {self.folder}, the only folder that pods receive; choose another"
            )
        return path


def skips_entrypoint(container: Mapping[str, Any]) -> bool:
    """Return whether a container's arguments are those of its image's entrypoint."""
    return bool(container.get("args")) and not container.get("command")


def default_folder(script: str | None) -> Path:
    """Return the folder to pack for a script: the current one, or the script's if that is elsewhere.

    Raises: ClientError.
    """
    current = Path.cwd()
    path = Path(script).resolve() if script is not None else current / "module"
    return check_folder(current if current in path.parents else path.parent)


def check_folder(folder: Path) -> Path:
    """Return a folder chosen by default, unless it is the home or the root folder. Raises: ClientError."""
    if folder in (Path(os.path.expanduser("~")), Path(folder.anchor)):
        raise ClientError(f"{folder} is not chosen by default; name the folder of the script with --workdir")
    return folder


def check_job(
    text: str,
    workdir: Workdir | None,
    *,
    in_cluster: bool,
    note: Callable[[str], None],
    profiles: FindObject = find_none,
) -> tuple[Manifest, PackedCode | None]:
    """Pack the folder of a job, check its manifest, and return both.

    ``note`` receives lines about the packed files; ``profiles`` finds profiles that the file lacks.

    Raises: ClientError, InvalidManifest.
    """
    code = workdir.pack() if workdir is not None else None
    manifest = check_manifest(text, code.spec if code else None, profiles)
    template = resolve_template(manifest.job)
    if in_cluster and skips_entrypoint(template.trainer):
        note(f"warning: container {template.trainer['name']} {ENTRYPOINT}")
    if code is not None:
        try:
            if in_cluster:
                code.check_size()
            code.check_command(template.command, template.trainer.get("workingDir"))
        except CannotPack as error:
            raise ClientError(str(error)) from None
        note(code.describe())
    return manifest, code

"""The folder that is packed for a job."""

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ddp_cli.client.errors import ClientError
from ddp_cli.client.packing.files import CannotPack
from ddp_cli.client.packing.packed import PackedCode, pack_code
from ddp_cli.client.validation import check_manifest
from ddp_operator.api.errors import InvalidManifest
from ddp_operator.api.parse import FindProfile, Manifest, find_none
from ddp_operator.manifests.advice import list_warnings
from ddp_operator.manifests.template import check_nested_launchers, resolve_template

_MAX_SCRIPT: Final = 64 << 10
"""Bytes of a shell script that is searched for launchers."""


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


class ScriptReader:
    """Reads the shell scripts of a folder, each of them once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: set[str] = set()

    def read(self, path: str) -> str | None:
        """Return the text of a short script; None for any other path."""
        file = self._folder / path
        with suppress(OSError):
            if path not in self._read and file.is_file() and file.stat().st_size <= _MAX_SCRIPT:
                self._read.add(path)
                return file.read_text(encoding="utf-8", errors="replace")
        return None


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
    profiles: FindProfile = find_none,
) -> tuple[Manifest, PackedCode | None]:
    """Pack the folder of a job, check its manifest, and return both.

    ``note`` receives lines about the packed files; ``profiles`` finds profiles that the file lacks.

    Raises: ClientError, InvalidManifest.
    """
    code = workdir.pack() if workdir is not None else None
    manifest = check_manifest(text, code.spec if code else None, profiles)
    template = resolve_template(manifest.job)
    if not template.trainer.get("workingDir") and (workdir is not None or not in_cluster):
        folder = workdir.folder if workdir is not None else Path.cwd()
        errors = list(check_nested_launchers(manifest.job.spec, template, ScriptReader(folder).read))
        if errors:
            raise InvalidManifest(errors)
    for warning in list_warnings(template, in_cluster=in_cluster):
        note(f"warning: {warning}")
    if code is not None:
        try:
            if in_cluster:
                code.check_size()
            code.check_command(template.command, template.trainer.get("workingDir"))
        except CannotPack as error:
            raise ClientError(str(error)) from None
        note(code.describe())
    return manifest, code

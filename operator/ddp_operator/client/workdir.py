"""The folder that a job takes along."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ddp_operator.api.parse import FindProfile, Manifest, find_none
from ddp_operator.client.errors import ClientError
from ddp_operator.code.files import CannotPack
from ddp_operator.code.packed import Code, pack_code
from ddp_operator.manifests.template import resolve_template
from ddp_operator.validation import check_manifest


@dataclass(frozen=True, slots=True)
class Workdir:
    """A folder, what of it travels though ignored, whether to install its requirements, and its claim or image."""

    folder: Path
    include: Sequence[str] = ()
    pip: bool = False
    claim: str | None = None
    image: str | None = None

    def pack(self) -> Code:
        """Pack it. Raises: ClientError."""
        if self.claim is not None and self.image is not None:
            raise ClientError("the packed folder goes onto a claim or into an image, and not both; name one of them")
        try:
            return pack_code(self.folder, self.include, pip=self.pip, claim=self.claim, image=self.image)
        except CannotPack as error:
            raise ClientError(str(error)) from None

    def place(self, script: str) -> str:
        """Return the path of a script as a pod has it, which starts in the folder. Raises: ClientError."""
        path = os.path.relpath(os.path.realpath(script), os.path.realpath(self.folder))
        if path.startswith(".."):
            raise ClientError(f"{script}: is not in --workdir {self.folder}, which is all that the pods get")
        return path


def default_folder(script: str | None) -> Path:
    """Return the folder that a script is run from: the current one, or where it is outside of that, its own.

    Raises: ClientError.
    """
    current = Path.cwd()
    path = Path(script).resolve() if script is not None else current / "module"
    return check_folder(current if current in path.parents else path.parent)


def check_folder(folder: Path) -> Path:
    """Return a folder that was not named, where it is no more than a project. Raises: ClientError."""
    if folder in (Path(os.path.expanduser("~")), Path(folder.anchor)):
        raise ClientError(f"--workdir: name the folder to pack; {folder} is too much to take by itself")
    return folder


def check_job(
    text: str,
    workdir: Workdir | None,
    *,
    in_cluster: bool,
    note: Callable[[str], None],
    profiles: FindProfile = find_none,
    exact: bool = False,
) -> tuple[Manifest, Code | None]:
    """Return the manifest in ``text``, checked, with the folder that it takes along, packed.

    ``note`` is told what is packed; ``profiles`` finds those that the file does not have; ``exact``: as of
    ``check_manifest``.

    Raises: ClientError, InvalidManifest.
    """
    code = workdir.pack() if workdir is not None else None
    manifest = check_manifest(text, code.spec if code else None, profiles, exact=exact)
    if code is not None:
        template = resolve_template(manifest.job)
        try:
            if in_cluster:
                code.check_size()
            code.check_command(template.command, template.trainer.get("workingDir"))
        except CannotPack as error:
            raise ClientError(str(error)) from None
        note(code.describe())
    return manifest, code

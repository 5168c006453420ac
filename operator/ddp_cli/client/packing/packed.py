"""A packed folder with its ``spec.code``, and the ConfigMap that contains it."""

import base64
import posixpath
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ddp_cli.client.packing.archive import CONFIG_MAP_LIMIT, Archive, format_size, list_largest, pack, shorten_list
from ddp_cli.client.packing.files import CannotPack
from ddp_operator.api import code_paths, constants, other_kinds
from ddp_operator.api.code_source import CLAIM, CONFIG_MAP, describe_revision, split_source
from ddp_operator.manifests.torchrun import UserCommand
from ddp_pod.contract.command_line import split_python_line

REQUIREMENTS: Final = "requirements.txt"
_WEIGHTS: Final = (".pt", ".pth", ".ckpt", ".safetensors")


@dataclass(frozen=True, slots=True)
class PackedCode:
    """A folder's archive and its ``spec.code``."""

    folder: Path
    archive: Archive
    spec: Mapping[str, Any]

    @property
    def claim(self) -> str:
        """The claim that the archive is for; empty: it is for a ConfigMap."""
        source = split_source(self.spec["source"])
        return source.name if source.kind == CLAIM else ""

    @property
    def path(self) -> str:
        """The path of the archive in its volume."""
        return split_source(self.spec["source"]).path

    def describe(self) -> str:
        """Return a line about the packed files, and lines about large ones and about possible secrets left out."""
        archive = self.archive
        changes = " with changes" if archive.dirty else ""
        commit = f", commit {archive.commit[:12]}{changes}" if archive.commit else ""
        sizes = f"{format_size(archive.size)}, packed {format_size(len(archive.data))}"
        files = f"{len(archive.sizes)} file{'s' if len(archive.sizes) > 1 else ''}"
        lines = [f"code: {files} of {self.folder} ({sizes}{commit}), digest {archive.digest[:12]}"]
        large = [file for file in archive.sizes if file[0].lower().endswith(_WEIGHTS) or file[1] > CONFIG_MAP_LIMIT]
        if large:
            lines.append(f"code: packs weights or large files: {list_largest(large)}; name unneeded ones in .ddpignore")
        if archive.left_out:
            lines.append(f"code: left out possible secrets: {shorten_list(archive.left_out)}; --include PATH packs one")
        return "\n".join(lines)

    def check_command(self, command: UserCommand, working_dir: str | None) -> None:
        """Check that the archive contains the script of the command. Raises: CannotPack."""
        line = None if command.program or working_dir else split_python_line(command.argv)
        if line is None or line.kind != "script" or posixpath.isabs(line.target):
            return
        path = posixpath.normpath(line.target)
        packed = [name for name, _ in self.archive.sizes]
        if path not in packed and f"{path}/__main__.py" not in packed:
            if path in self.archive.left_out:
                raise CannotPack(
                    f"the command runs {path}, which is not packed because it may hold a secret; replace a token in it "
                    f"by an environment variable, or add --include {path}"
                )
            raise CannotPack(
                f"the command runs {line.target}, which is not among the packed files of {self.folder}, where the "
                "command starts; choose another --workdir, or check .gitignore and .ddpignore"
            )

    def check_size(self) -> None:
        """Check that the archive fits in a ConfigMap. Raises: CannotPack."""
        size = len(self.archive.data)
        if not self.claim and size > CONFIG_MAP_LIMIT:
            raise CannotPack(
                f"{self.folder} is {format_size(size)} when packed, and a ConfigMap holds at most "
                f"{format_size(CONFIG_MAP_LIMIT)}. Largest files: {list_largest(self.archive.sizes)}. Name unneeded "
                "files in .ddpignore, or store the folder on a claim that all pods can mount (--code-claim NAME)"
            )

    def build_config_map(self, namespace: str) -> dict[str, Any]:
        """Return the ConfigMap with the archive."""
        labels = {constants.LABEL_MANAGED_BY: other_kinds.MANAGED_BY_CLI}
        return {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": code_config_map_name(self.archive.digest), "namespace": namespace, "labels": labels},
            "immutable": True,
            "binaryData": {code_paths.CODE_FILE: base64.b64encode(self.archive.data).decode()},
        }


def pack_code(
    folder: Path,
    include: Sequence[str] = (),
    *,
    pip: bool = False,
    claim: str | None = None,
    limit: int = CONFIG_MAP_LIMIT,
) -> PackedCode:
    """Pack a folder for a ConfigMap or a claim. ``pip``: install its requirements. Raises: CannotPack.

    ``limit``: bytes above which it is compressed harder, if there is no claim.
    """
    archive = pack(folder, include, limit=limit if claim is None else sys.maxsize)
    if pip and all(name != REQUIREMENTS for name, _ in archive.sizes):
        raise CannotPack(f"--pip: the packed files of {folder} have no {REQUIREMENTS}; add one")
    source = f"{CONFIG_MAP}/{code_config_map_name(archive.digest)}"
    if claim is not None:
        source = f"{CLAIM}/{claim}/ddp-code/{archive.digest}.tar.gz"
    revision = describe_revision(archive.digest, archive.commit, is_dirty=archive.dirty)
    spec = {"digest": archive.digest, "source": source, "revision": revision}
    return PackedCode(folder, archive, spec | ({"pip": REQUIREMENTS} if pip else {}))


CODE_PREFIX = "ddp-code-"
"""Prefix of the ConfigMaps with code that `ddp submit` creates."""


def code_config_map_name(digest: str) -> str:
    """Return the name of the ConfigMap with the code of this SHA-256 (hex), for all jobs of a namespace that run it."""
    return f"{CODE_PREFIX}{digest[:16]}"

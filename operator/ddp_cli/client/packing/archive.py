"""Pack a folder into one compressed tar. The digest is the same for the same files on every machine."""

import gzip
import hashlib
import io
import lzma
import os
import tarfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any, Final

from ddp_cli.client.packing.files import MOST, MOST_FILES, CannotPack, Selection
from ddp_cli.local.git import ask_git

MEBIBYTE: Final = 1 << 20
CONFIG_MAP_LIMIT: Final = MEBIBYTE
"""Maximum size of a ConfigMap in bytes."""
_LEVEL: Final = 6  # of gzip
_SHOWN: Final = 5


@dataclass(frozen=True, slots=True)
class Archive:
    """A packed folder. ``digest``: SHA-256 of the uncompressed tar, in hex."""

    data: bytes
    digest: str
    sizes: tuple[tuple[str, int], ...]
    """Each file's path and size in bytes."""
    left_out: tuple[str, ...]
    commit: str = ""
    dirty: bool = False
    """Whether the folder differs from the commit."""

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(size for _, size in self.sizes)


def pack(folder: Path, include: Sequence[str] = (), *, limit: int = CONFIG_MAP_LIMIT) -> Archive:
    """Pack a folder. It is compressed harder if that may reduce it to ``limit`` bytes. Raises: CannotPack."""
    if not folder.is_dir():
        raise CannotPack(f"{folder}: the folder does not exist")
    selection = Selection(folder, include)
    sink = _Sink()
    sizes = _write_tar(folder, selection, sink)
    if not sizes:
        raise CannotPack(f"{folder}: nothing to pack; the folder is empty, or .gitignore and .ddpignore exclude all")
    data = sink.data.getvalue()
    if limit < len(data) <= 3 * limit:
        smaller = lzma.compress(gzip.decompress(data), preset=3)
        data = smaller if len(smaller) <= limit else data
    commit = ask_git(folder, "rev-parse")
    dirty = bool(commit and ask_git(folder, "status", "--porcelain", "--ignore-submodules", "--", "."))
    return Archive(data, sink.digest.hexdigest(), tuple(sizes), tuple(selection.left_out), commit, dirty)


def list_largest(sizes: Iterable[tuple[str, int]]) -> str:
    """Return the largest files with their sizes as text."""
    largest = sorted(sizes, key=itemgetter(1), reverse=True)
    return shorten_list([f"{path} ({format_size(size)})" for path, size in largest])


def shorten_list(names: Sequence[str]) -> str:
    """Return the first five names, and the number of the others."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def format_size(size: int) -> str:
    """Return a number of bytes with a unit, such as 1.4 MiB."""
    if size == 0:
        return "0 KiB"
    if size < MEBIBYTE:
        return f"{max(1, round(size / 1024))} KiB"
    return f"{size / MEBIBYTE:.1f} MiB"


class _Sink(io.RawIOBase):
    """Receives the tar: computes its digest, and compresses it into ``data``."""

    def __init__(self) -> None:
        super().__init__()
        self.digest = hashlib.sha256()
        self.data = io.BytesIO()
        self._gzip = gzip.GzipFile(fileobj=self.data, mode="wb", compresslevel=_LEVEL, mtime=0, filename="")

    def write(self, piece: Any) -> int:
        """Add a piece of the tar."""
        self.digest.update(piece)
        return self._gzip.write(piece)

    def close(self) -> None:
        """Complete the compressed data."""
        self._gzip.close()
        super().close()


def _write_tar(folder: Path, selection: Selection, sink: _Sink) -> list[tuple[str, int]]:
    """Write the selected files. Returns each file's path and size in bytes. Raises: CannotPack."""
    root = os.path.realpath(folder)
    sizes: list[tuple[str, int]] = []
    total = 0
    with tarfile.open(mode="w|", fileobj=sink, format=tarfile.PAX_FORMAT, bufsize=MEBIBYTE) as tar:
        for path, place in selection.walk():
            if len(sizes) >= MOST_FILES:
                raise CannotPack(
                    f"the folder has more than {MOST_FILES:,} files; name data in .ddpignore, or mount it from a volume"
                )
            try:
                descriptor = os.open(place, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            except OSError as error:
                if not os.path.islink(place):
                    raise CannotPack(f"{path}: {error.strerror}; make it readable, or name it in .ddpignore") from None
                tar.addfile(_describe_link(path, _read_link(root, path, place)))
                sizes.append((path, 0))
                continue
            with os.fdopen(descriptor, "rb") as file:
                member = _describe_file(path, os.fstat(file.fileno()))
                sizes.append((path, member.size))
                total += member.size
                if total > MOST:
                    raise CannotPack(
                        f"the folder has more than {format_size(MOST)}; name data in .ddpignore, and mount it from a "
                        f"volume. Largest files so far: {list_largest(sizes)}"
                    )
                try:
                    tar.addfile(member, file)
                except OSError as error:
                    problem = error.strerror or "the file became shorter during packing"
                    raise CannotPack(f"{path}: {problem}; try again") from None
    sink.close()
    return sizes


def _describe_file(path: str, status: os.stat_result) -> tarfile.TarInfo:
    """Return the member of a file without owner and time, which would change the digest."""
    member = tarfile.TarInfo(path)
    member.size = status.st_size
    member.mode = 0o755 if status.st_mode & 0o100 else 0o644
    return member


def _describe_link(path: str, target: str) -> tarfile.TarInfo:
    member = tarfile.TarInfo(path)
    member.type = tarfile.SYMTYPE
    member.linkname = target
    member.mode = 0o777
    return member


def _read_link(root: str, path: str, place: str) -> str:
    """Return the target of a link, relative to the link. Raises: CannotPack, if it leaves the folder."""
    target = os.readlink(place)
    folder = os.path.dirname(place)
    resolved = os.path.realpath(os.path.join(folder, target))
    if os.path.commonpath([root, resolved]) != root:
        raise CannotPack(
            f"{path}: this link points outside of the folder (to {resolved}), which pods do not receive; copy its "
            "target, or name the link in .ddpignore"
        )
    return os.path.relpath(resolved, os.path.realpath(folder)) if os.path.isabs(target) else target

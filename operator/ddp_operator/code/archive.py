"""A folder as one compressed tar, the same bytes for the same files on every machine."""

import gzip
import hashlib
import lzma
import os
import subprocess
import tarfile
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from isal import isal_zlib

from ddp_operator.code.files import MOST, CannotPack, Selection

MEBIBYTE: Final = 1 << 20
CONFIG_MAP_LIMIT: Final = MEBIBYTE
"""Bytes that Kubernetes takes in a ConfigMap."""
_PIECE: Final = MEBIBYTE


@dataclass(frozen=True, slots=True)
class Archive:
    """A folder's files. ``digest``: SHA-256, in hex, of the tar before it was compressed."""

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

    def list_largest(self, count: int = 5) -> str:
        """Return the largest files with their sizes, for people."""
        largest = sorted(self.sizes, key=lambda one: -one[1])[:count]
        return ", ".join(f"{path} ({format_size(size)})" for path, size in largest)


def pack(folder: Path, include: Sequence[str] = (), *, limit: int = CONFIG_MAP_LIMIT) -> Archive:
    """Pack a folder. It is compressed harder where that may bring it below ``limit`` bytes. Raises: CannotPack."""
    if not folder.is_dir():
        raise CannotPack(f"{folder}: there is no such folder")
    selection, sizes, digest = Selection(folder, include), list[tuple[str, int]](), hashlib.sha256()
    compressed: list[Future[bytes]] = []
    with ThreadPoolExecutor(2 + (os.cpu_count() or 1)) as pool, ThreadPoolExecutor(1) as in_order:
        commit = pool.submit(ask_git, folder, "rev-parse", "HEAD")
        changes = pool.submit(ask_git, folder, "status", "--porcelain", "--", ".")
        for piece in _write_tar(folder, selection, sizes):
            in_order.submit(digest.update, piece)
            compressed.append(pool.submit(_compress, piece))
    if not sizes:
        raise CannotPack(f"{folder}: there is nothing to pack: no files, or .gitignore and .ddpignore leave all out")
    data = b"".join(piece.result() for piece in compressed)
    if limit < len(data) <= 3 * limit:
        smaller = lzma.compress(gzip.decompress(data), preset=3)
        data = smaller if len(smaller) <= limit else data
    dirty = bool(commit.result() and changes.result())
    return Archive(data, digest.hexdigest(), tuple(sizes), tuple(selection.left_out), commit.result(), dirty)


def format_size(size: int) -> str:
    """Return a number of bytes as people write it, such as 1.4 MiB."""
    if size < MEBIBYTE:
        return f"{max(1, round(size / 1024)) if size else 0} KiB"
    return f"{size / MEBIBYTE:.1f} MiB"


def _compress(piece: memoryview) -> bytes:
    return isal_zlib.compress(piece, 1, 31)  # a member of a gzip file


def _write_tar(folder: Path, selection: Selection, sizes: list[tuple[str, int]]) -> Iterator[memoryview]:
    """Yield the tar in pieces that are each worth a task. Files are read to where they stay, between zeros."""
    root, total = os.path.realpath(folder), 0
    piece, used = bytearray(_PIECE), 0
    for path, place in selection.walk():
        descriptor, size = -1, 0
        try:
            try:
                descriptor = os.open(place, os.O_RDONLY | os.O_NOFOLLOW)
                status = os.fstat(descriptor)
            except OSError as error:
                if not os.path.islink(place):
                    raise CannotPack(f"{path}: {error.strerror}; make it readable, or name it in .ddpignore") from None
                link = tarfile.TarInfo(path)
                link.type, link.linkname, link.mode = tarfile.SYMTYPE, _read_link(root, path, place), 0o777
                header = link.tobuf(tarfile.PAX_FORMAT)
            else:
                size = status.st_size
                header = _build_header(path, size, executable=bool(status.st_mode & 0o100))
            sizes.append((path, size))
            total += size
            if total > MOST:
                largest = Archive(b"", "", tuple(sizes), ()).list_largest()
                raise CannotPack(
                    f"the folder has more than {format_size(MOST)}; name data in .ddpignore, and mount a volume with "
                    f"it. Largest so far: {largest}"
                )
            begin = used + len(header)
            end = begin + size + -size % tarfile.BLOCKSIZE
            if end > len(piece):
                yield memoryview(piece)[:used]
                begin, end = begin - used, end - used
                piece, used = bytearray(max(_PIECE, end)), 0
            piece[used:begin] = header
            used = end
            _read(descriptor, memoryview(piece)[begin : begin + size], path)
        finally:
            if descriptor >= 0:
                os.close(descriptor)
    yield memoryview(piece)[:used]
    yield memoryview(bytes(2 * tarfile.BLOCKSIZE))


def _read(descriptor: int, place: memoryview, path: str) -> None:
    while place:
        count = os.readv(descriptor, [place])
        if not count:
            raise CannotPack(f"{path}: became shorter while it was read; try again")
        place = place[count:]


_MODES: Final = {False: b"0000644\0", True: b"0000755\0"}
_OWNER: Final = b"0000000\0" * 2
_MTIME: Final = b"00000000000\0"
_TAIL: Final = bytes(100) + b"ustar\x0000" + bytes(247)
_CONSTANT_SUMS: Final = {
    executable: sum(mode + _OWNER + b"\0" + _MTIME + b" " * 8 + b"0" + _TAIL) for executable, mode in _MODES.items()
}


def _build_header(path: str, size: int, *, executable: bool) -> bytes:
    """Return what ``tarfile`` makes of a file without owner and time, four times as quickly for the usual name."""
    if len(path) > 100 or not path.isascii() or size >= 8 << 30:
        member = tarfile.TarInfo(path)
        member.size, member.mode = size, 0o755 if executable else 0o644
        return member.tobuf(tarfile.PAX_FORMAT)
    name, length = path.encode(), b"%011o" % size
    checksum = _CONSTANT_SUMS[executable] + sum(name) + sum(length)
    start = name.ljust(100, b"\0") + _MODES[executable] + _OWNER + length
    return b"%s\0%s%06o\0 0%s" % (start, _MTIME, checksum, _TAIL)


def _read_link(root: str, path: str, place: str) -> str:
    """Return where a link inside the folder points, relative to it. Raises: CannotPack where it leaves the folder."""
    target = os.readlink(place)
    folder = os.path.dirname(place)
    resolved = os.path.realpath(os.path.join(folder, target))
    if os.path.commonpath([root, resolved]) != root:
        raise CannotPack(
            f"{path}: this link leaves the folder (to {resolved}), where the pods could not follow it; copy what it "
            "points to, or name it in .ddpignore"
        )
    return os.path.relpath(resolved, os.path.realpath(folder)) if os.path.isabs(target) else target


def ask_git(folder: Path, *words: str, seconds: float = 20.0) -> str:
    """Return what git says of a folder; empty where it says nothing, is not there, or takes too long."""
    line = ["git", "--no-optional-locks", "-C", str(folder), *words]
    try:
        return subprocess.run(
            line, capture_output=True, text=True, errors="replace", timeout=seconds, check=True
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""

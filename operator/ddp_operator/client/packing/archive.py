"""Pack a folder into one compressed tar. The digest is the same for the same files on every machine."""

import gzip
import hashlib
import lzma
import os
import tarfile
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Final

from isal import isal_zlib

from ddp_operator.client.packing.files import MOST, CannotPack, Selection
from ddp_operator.local.git import ask_git

MEBIBYTE: Final = 1 << 20
CONFIG_MAP_LIMIT: Final = MEBIBYTE
"""Maximum size of a ConfigMap in bytes."""
_PIECE: Final = MEBIBYTE


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

    def list_largest(self, count: int = 5) -> str:
        """Return the largest files with their sizes as text."""
        largest = sorted(self.sizes, key=itemgetter(1), reverse=True)[:count]
        return ", ".join(f"{path} ({format_size(size)})" for path, size in largest)


def pack(folder: Path, include: Sequence[str] = (), *, limit: int = CONFIG_MAP_LIMIT) -> Archive:
    """Pack a folder. It is compressed harder if that may reduce it to ``limit`` bytes. Raises: CannotPack."""
    if not folder.is_dir():
        raise CannotPack(f"{folder}: the folder does not exist")
    selection = Selection(folder, include)
    sizes: list[tuple[str, int]] = []
    digest = hashlib.sha256()
    compressed: list[Future[bytes]] = []
    with ThreadPoolExecutor(2 + (os.cpu_count() or 1)) as pool, ThreadPoolExecutor(1) as in_order:
        commit = pool.submit(ask_git, folder, "rev-parse", "HEAD")
        changes = pool.submit(ask_git, folder, "status", "--porcelain", "--", ".")
        for piece in _write_tar(folder, selection, sizes):
            in_order.submit(digest.update, piece)
            compressed.append(pool.submit(_compress, piece))
    if not sizes:
        raise CannotPack(f"{folder}: nothing to pack; the folder is empty, or .gitignore and .ddpignore exclude all")
    data = b"".join(piece.result() for piece in compressed)
    if limit < len(data) <= 3 * limit:
        smaller = lzma.compress(gzip.decompress(data), preset=3)
        data = smaller if len(smaller) <= limit else data
    dirty = bool(commit.result() and changes.result())
    return Archive(data, digest.hexdigest(), tuple(sizes), tuple(selection.left_out), commit.result(), dirty)


def format_size(size: int) -> str:
    """Return a number of bytes with a unit, such as 1.4 MiB."""
    if size == 0:
        return "0 KiB"
    if size < MEBIBYTE:
        return f"{max(1, round(size / 1024))} KiB"
    return f"{size / MEBIBYTE:.1f} MiB"


def _compress(piece: memoryview) -> bytes:
    return isal_zlib.compress(piece, 1, 31)  # a member of a gzip file


def _write_tar(folder: Path, selection: Selection, sizes: list[tuple[str, int]]) -> Iterator[memoryview]:
    """Yield the tar in pieces of about a mebibyte. Files are read directly into a zeroed piece, which pads them."""
    root = os.path.realpath(folder)
    total = 0
    piece = bytearray(_PIECE)
    used = 0
    for path, place in selection.walk():
        descriptor = -1
        size = 0
        try:
            try:
                descriptor = os.open(place, os.O_RDONLY | os.O_NOFOLLOW)
                status = os.fstat(descriptor)
            except OSError as error:
                if not os.path.islink(place):
                    raise CannotPack(f"{path}: {error.strerror}; make it readable, or name it in .ddpignore") from None
                header = _build_link_header(path, _read_link(root, path, place))
            else:
                size = status.st_size
                header = _build_header(path, size, executable=bool(status.st_mode & 0o100))
            sizes.append((path, size))
            total += size
            if total > MOST:
                largest = Archive(b"", "", tuple(sizes), ()).list_largest()
                raise CannotPack(
                    f"the folder has more than {format_size(MOST)}; name data in .ddpignore, and mount it from a "
                    f"volume. Largest files so far: {largest}"
                )
            start = used + len(header)
            end = start + size + -size % tarfile.BLOCKSIZE
            if end > len(piece):
                yield memoryview(piece)[:used]
                start -= used
                end -= used
                piece = bytearray(max(_PIECE, end))
                used = 0
            piece[used:start] = header
            used = end
            _read(descriptor, memoryview(piece)[start : start + size], path)
        finally:
            if descriptor >= 0:
                os.close(descriptor)
    yield memoryview(piece)[:used]
    yield memoryview(bytes(2 * tarfile.BLOCKSIZE))


def _read(descriptor: int, place: memoryview, path: str) -> None:
    while place:
        count = os.readv(descriptor, [place])
        if not count:
            raise CannotPack(f"{path}: the file became shorter during packing; try again")
        place = place[count:]


_MODES: Final = {False: b"0000644\0", True: b"0000755\0"}
_OWNER: Final = b"0000000\0" * 2
_MTIME: Final = b"00000000000\0"
_TAIL: Final = bytes(100) + b"ustar\x0000" + bytes(247)
_CONSTANT_SUMS: Final = {
    executable: sum(mode + _OWNER + b"\0" + _MTIME + b" " * 8 + b"0" + _TAIL) for executable, mode in _MODES.items()
}


def _build_header(path: str, size: int, *, executable: bool) -> bytes:
    """Return ``tarfile``'s header of a file without owner and time; four times faster for short names."""
    if len(path) > 100 or not path.isascii() or size >= 8 << 30:
        member = tarfile.TarInfo(path)
        member.size = size
        member.mode = 0o755 if executable else 0o644
        return member.tobuf(tarfile.PAX_FORMAT)
    name = path.encode()
    length = b"%011o" % size
    checksum = _CONSTANT_SUMS[executable] + sum(name) + sum(length)
    start = name.ljust(100, b"\0") + _MODES[executable] + _OWNER + length
    return b"%s\0%s%06o\0 0%s" % (start, _MTIME, checksum, _TAIL)


def _build_link_header(path: str, target: str) -> bytes:
    link = tarfile.TarInfo(path)
    link.type = tarfile.SYMTYPE
    link.linkname = target
    link.mode = 0o777
    return link.tobuf(tarfile.PAX_FORMAT)


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

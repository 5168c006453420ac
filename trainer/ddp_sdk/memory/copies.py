"""Copies of a state as files in shared memory, which outlive the process that writes them.

A file is a header of 4,096 bytes, the payload (the tensors) and the manifest (JSON). A writer first invalidates the
header and writes it last, so that a process killed in between leaves a file that is not a copy. Each writer has two
files and overwrites the older copy.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import stat
import struct
import time
import zlib
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor

HEADER_BYTES = 4096
_MAGIC = b"DDPMEM01"
_FIELDS = struct.Struct("<8sqqqqqqQdqd")
_UNDER_WAY = b"DDPMEMWR"
_WRITER = struct.Struct("<8sq")  # the former, and the process that writes
_CRC = struct.Struct("<I")
ENCODED_BYTES = _FIELDS.size + _CRC.size
"""Length of :func:`encode_header`."""
REPLICATED = 1
SHARD = 2
# Below the size from which torch sums with several threads: the training needs the cores.
_CHUNK_WORDS = 1 << 15
_MEBIBYTE = 1 << 20
_CGROUP = "/sys/fs/cgroup"


class NoRoomError(Exception):
    """There is not enough memory for a file. ``needed``, ``available``: bytes."""

    def __init__(self, folder: str, needed: int, available: int) -> None:
        super().__init__(
            f"{folder} has room for {available // _MEBIBYTE} MiB, and {needed // _MEBIBYTE + 1} MiB are needed"
        )
        self.needed = needed
        self.available = available


class Header(NamedTuple):
    """The description of a file's content.

    ``kind``: REPLICATED, the state of all ranks, or SHARD, that of rank ``rank`` of ``world`` ranks. ``time``: of the
    write, Unix seconds. ``saves`` and ``stalled``: number of saves of the writing process so far, and the seconds for
    which they stopped the training.
    """

    kind: int
    step: int
    world: int
    rank: int
    payload: int
    manifest: int
    checksum: int
    time: float
    saves: int = 0
    stalled: float = 0.0

    @property
    def size(self) -> int:
        """Bytes of payload and manifest."""
        return self.payload + self.manifest


def encode_header(header: Header) -> bytes:
    """Return the header with its own checksum."""
    fields = _FIELDS.pack(_MAGIC, *header)
    return fields + _CRC.pack(zlib.crc32(fields))


def decode_header(data: bytes) -> Header | None:
    """Read a header; None if it is invalid."""
    if len(data) < ENCODED_BYTES or not data.startswith(_MAGIC):
        return None
    fields = data[: _FIELDS.size]
    if _CRC.unpack_from(data, _FIELDS.size)[0] != zlib.crc32(fields):
        return None
    return Header(*_FIELDS.unpack(fields)[1:])


class CopyFile:
    """One file of a writer. ``path``: in shared memory; it is created at its first use."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._map: mmap.mmap | None = None
        self._memory: Tensor | None = None
        self.is_pinned = False

    @property
    def header(self) -> Header | None:
        """The header; None if the file contains no copy."""
        if self._map is not None:
            return decode_header(self._map[:ENCODED_BYTES])
        try:
            with open(self.path, "rb", opener=_open_plain) as file:
                header = decode_header(file.read(ENCODED_BYTES))
                size = os.fstat(file.fileno()).st_size
        except OSError:
            return None
        if header is None or min(header.payload, header.manifest) < 0 or HEADER_BYTES + header.size > size:
            return None
        return header

    @property
    def allocated(self) -> int:
        try:
            return os.lstat(self.path).st_size
        except OSError:
            return 0

    def invalidate(self) -> None:
        """Declare that the file contains no copy."""
        if self._map is not None:
            self._map[: len(_MAGIC)] = bytes(len(_MAGIC))
            return
        if self.header is not None:
            with open(self.path, "r+b", opener=_open_plain) as file:
                file.write(bytes(len(_MAGIC)))

    def announce(self) -> None:
        """Declare that this process is writing a copy, for which torchrun's agent waits before it ends the ranks."""
        assert self._map is not None
        self._map[: _WRITER.size] = _WRITER.pack(_UNDER_WAY, os.getpid())

    def reserve(self, size: int) -> Tensor:
        """Return the memory for ``size`` bytes of payload and manifest, uint8, and invalidate the file.

        Raises :class:`NoRoomError`.
        """
        self.invalidate()
        if self._memory is None or not size <= self._memory.numel() <= 2 * size + _MEBIBYTE:
            self._allocate(size + size // 64 + HEADER_BYTES)  # the manifest grows with the digits of its numbers
        assert self._memory is not None
        return self._memory[:size]

    def open(self) -> Tensor:
        """Return the payload and the manifest of the copy in the file, uint8."""
        header = self.header
        if header is None:
            raise ValueError(f"{self.path} contains no copy")
        if self._memory is None:
            self._map_file()
        assert self._memory is not None
        return self._memory[: header.size]

    def commit(self, header: Header) -> None:
        """Declare that the file contains a copy."""
        assert self._map is not None
        # The magic last: a process that is killed in between leaves a file that readers refuse.
        encoded = encode_header(header)
        self._map[len(_MAGIC) : len(encoded)] = encoded[len(_MAGIC) :]
        self._map[: len(_MAGIC)] = encoded[: len(_MAGIC)]

    def verify(self) -> bool:
        """Return whether payload and manifest have the checksum of the header."""
        header = self.header
        return header is not None and compute_checksum(self.open()) == header.checksum

    def pin(self) -> None:
        """Register the memory for asynchronous copies from a GPU, if the driver permits it."""
        if self._memory is None or self.is_pinned:
            return
        error = _runtime().cudaHostRegister(self._memory.data_ptr(), self._memory.numel(), 0)
        self.is_pinned = int(error) == 0

    def close(self) -> None:
        """Release the memory of this process. The copy remains."""
        if self.is_pinned and self._memory is not None:
            _runtime().cudaHostUnregister(self._memory.data_ptr())
        self.is_pinned = False
        self._memory = None
        self._map = None

    def _allocate(self, size: int) -> None:
        self.close()
        folder = os.path.dirname(self.path)
        with suppress(FileNotFoundError):
            os.unlink(self.path)
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            available = find_available(folder)
            if HEADER_BYTES + size > available:
                raise NoRoomError(folder, HEADER_BYTES + size, available)
            # Without reserved pages the process would get SIGBUS when the file system is full.
            os.posix_fallocate(descriptor, 0, HEADER_BYTES + size)
        except OSError:
            os.ftruncate(descriptor, 0)
            raise NoRoomError(folder, HEADER_BYTES + size, find_available(folder)) from None
        finally:
            os.close(descriptor)
        self._map_file()

    def _map_file(self) -> None:
        with open(self.path, "r+b", opener=_open_plain) as file:
            self._map = mmap.mmap(file.fileno(), 0)
        self._memory = torch.frombuffer(self._map, dtype=torch.uint8, offset=HEADER_BYTES)


def _open_plain(path: str, flags: int) -> int:
    """Return the descriptor of a regular file: a link or a pipe in its place is not opened. Raises: OSError."""
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise OSError(f"{path} is no regular file")


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def make_private_folder(path: str) -> None:
    """Create a folder that only this user can read and change, and its parent.

    Raises PermissionError if either exists and is a link or open to other users.
    """
    parent = os.path.dirname(path)
    os.makedirs(parent, mode=0o700, exist_ok=True)
    above = os.lstat(parent)
    is_open = above.st_mode & stat.S_IWOTH and not above.st_mode & stat.S_ISVTX
    _check_folder(parent, above, is_safe=above.st_uid in (0, os.geteuid()) and not is_open)
    with suppress(FileExistsError):
        os.mkdir(path, 0o700)
    own = os.lstat(path)
    _check_folder(path, own, is_safe=own.st_uid == os.geteuid() and not own.st_mode & 0o077)


def _check_folder(path: str, status: os.stat_result, *, is_safe: bool) -> None:
    if not is_safe or not stat.S_ISDIR(status.st_mode):
        raise PermissionError(
            f"{path} ({stat.filemode(status.st_mode)}, uid {status.st_uid}) is a link or open to other users, who "
            "could read or replace the copies; delete it, or give another folder"
        )


def find_available(folder: str) -> int:
    """Return how many bytes more fit into a folder in shared memory: of its file system, and of the container."""
    status = os.statvfs(folder)
    available = status.f_bavail * status.f_frsize
    limit = _read_number(f"{_CGROUP}/memory.max")
    current = _read_number(f"{_CGROUP}/memory.current")
    if limit is not None and current is not None:
        available = min(available, limit - current + _read_reclaimable())
    return max(0, available)


def _read_number(path: str) -> int | None:
    try:
        with open(path, encoding="ascii") as file:
            return int(file.read(64))
    except (OSError, ValueError):
        return None  # not limited, or another version of cgroups


def _read_reclaimable() -> int:
    """Return the bytes of the page cache that the kernel frees when memory is short."""
    try:
        with open(f"{_CGROUP}/memory.stat", encoding="ascii") as file:
            values = dict(line.split(maxsplit=1) for line in file.read(1 << 16).splitlines())
        return int(values.get("inactive_file", 0))
    except (OSError, ValueError):
        return 0


def compute_checksum(memory: Tensor) -> int:
    """Return the checksum of ``memory``, uint8: the CRC of the sums of its 64-bit words in chunks of 256 KiB.

    It detects changed, lost and displaced pages at five times the speed of a CRC over all bytes.
    """
    whole = memory.numel() // 8 * 8
    words = memory[:whole].view(torch.int64)
    sums = [int(words[start : start + _CHUNK_WORDS].sum()) for start in range(0, words.numel(), _CHUNK_WORDS)]
    checksum = zlib.crc32(struct.pack(f"<{len(sums)}q", *sums))
    return zlib.crc32(bytes(memory[whole:].tolist()), checksum)


def copy_memory(address: int, source: Tensor, size: int) -> None:
    """Copy ``size`` bytes of ``source``, in host memory without gaps, to an address.

    Releases the GIL, and uses one thread: torch's copy would start a pool of threads beside that of the training.
    """
    ctypes.memmove(address, source.data_ptr(), size)


def build_header(kind: int, step: int, *, world: int, rank: int, payload: int, memory: Tensor) -> Header:
    """Return the header of a copy. ``payload``: its bytes, of those of ``memory``."""
    checksum = compute_checksum(memory)
    return Header(kind, step, world, rank, payload, memory.numel() - payload, checksum, time.time())

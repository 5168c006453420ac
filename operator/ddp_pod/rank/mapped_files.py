"""The data files that a rank maps into its memory: after a bus error the process that knows them has ended.

The watchdog reads them now and then, and the rank itself at its first step: scripts map their files before it.
"""

import itertools
import os
from typing import Final

from ..base.files import try_write_json
from .end_notes import MappedFile

_MOST_MAPPINGS: Final = 4096  # read of one process
_MOST_FILES: Final = 256  # kept of one process


def list_mapped_files(pid: int) -> list[MappedFile]:
    """Return the data files that a process maps (Linux); empty if it cannot be read. Libraries are left out."""
    files: dict[tuple[str, int], int] = {}
    libraries = set()
    try:
        with open(f"/proc/{pid}/maps", encoding="utf-8", errors="replace") as lines:
            for line in itertools.islice(lines, _MOST_MAPPINGS):
                addresses, access, offset, _, inode, *name = line.split(None, 5)
                path = name[0].rstrip("\n") if name else ""
                if "x" in access:
                    libraries.add(path)
                if not path.startswith("/"):
                    continue
                start, _, end = addresses.partition("-")
                mapped = int(offset, 16) + int(end, 16) - int(start, 16)
                files[path, int(inode)] = max(files.get((path, int(inode)), 0), mapped)
    except (OSError, ValueError):
        return []
    data = [MappedFile(path, inode, end) for (path, inode), end in files.items() if path not in libraries]
    return data[:_MOST_FILES]


def keep_mapped_files(path: str) -> None:
    """Keep the files that this process maps. For a program of several, the last one that begins to train counts."""
    write_mapped_files(path, list_mapped_files(os.getpid()))


def write_mapped_files(path: str, files: list[MappedFile]) -> None:
    """Keep the files that a rank maps, if there are any, and space for the list."""
    if files:
        try_write_json(path, {"files": files})

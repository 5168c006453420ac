"""What a rank notes while it runs, for the case that it ends without an exception: mapped files, and its own calls."""

import os
from typing import NamedTuple

from ..base.files import read_json, try_write_json
from ..base.runtime_files import MAPPINGS, OWN_END


class MappedFile(NamedTuple):
    """A file that a process maps into its memory. ``end``: bytes of the file that are mapped, from its beginning."""

    path: str
    inode: int
    end: int


class OwnEnd(NamedTuple):
    """A call by which a script ends a process at once, or later if it sets a timer. ``place``: of the call."""

    pid: int
    call: str
    place: str
    is_timer: bool


def mappings_path(runtime: str, local_rank: int) -> str:
    """Return the file that has what a rank maps."""
    return os.path.join(runtime, "output", f"{local_rank}.{MAPPINGS}")


def own_end_path(runtime: str, local_rank: int) -> str:
    """Return the file that has the calls of a rank's processes."""
    return os.path.join(runtime, "output", f"{local_rank}.{OWN_END}")


def write_mapped_files(path: str, files: list[MappedFile]) -> None:
    """Keep the files that a rank maps, if there are any, and space for the list."""
    if files:
        try_write_json(path, {"files": files})


def read_mapped_files(path: str) -> list[MappedFile]:
    """Return the files that a rank mapped when they were read last; empty if that is unknown."""
    known = read_json(path).get("files")
    items = known if isinstance(known, list) else ()
    return [MappedFile(*item) for item in items if isinstance(item, list) and list(map(type, item)) == [str, int, int]]


def read_own_ends(path: str) -> dict[int, OwnEnd]:
    """Return the last call for each exit code, as a shell has it."""
    ends = {}
    for code, raw in read_json(path).items():
        is_valid = isinstance(raw, list) and list(map(type, raw)) == [int, str, str, bool]
        if code.isdecimal() and is_valid:
            ends[int(code)] = OwnEnd(*raw)
    return ends

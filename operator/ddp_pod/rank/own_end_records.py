"""Where a script has ended its own process, or has set a timer that did: what ``own_ends`` notes."""

import os
from typing import NamedTuple

from ..base.files import read_json
from ..base.runtime_files import OWN_END


class OwnEnd(NamedTuple):
    """A call by which a script ends a process at once, or later if it sets a timer. ``place``: of the call."""

    pid: int
    call: str
    place: str
    is_timer: bool


def own_end_path(runtime: str, local_rank: int) -> str:
    """Return the file that has the calls of a rank's processes."""
    return os.path.join(runtime, "output", f"{local_rank}.{OWN_END}")


def read_own_ends(path: str) -> dict[int, OwnEnd]:
    """Return the last call for each exit code, as a shell has it."""
    ends = {}
    for code, raw in read_json(path).items():
        is_valid = isinstance(raw, list) and list(map(type, raw)) == [int, str, str, bool]
        if code.isdecimal() and is_valid:
            ends[int(code)] = OwnEnd(*raw)
    return ends

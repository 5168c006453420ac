"""The last bytes that each rank has written, which the log reader keeps."""

import os
import re
from typing import Final

from ..base.exceptions import PLACE
from ..base.files import is_own_file
from ..base.pod import Pod

END_BYTES: Final = 32768
"""Kept of a rank's output: a report of faulthandler has up to 100 frames."""
SECONDS_TO_KEEP: Final = 1.0
"""After which the last bytes of a rank's output are in its file, at the latest with the reader's next pause."""
COLOURS: Final = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
"""Terminal sequences."""
_LINES: Final = 15
_WIDTH: Final = 300
# The first line of a torchrun that a shell script started: its stack and summary follow, which are not the cause.
_NESTED_TORCHRUN: Final = re.compile(r'^(?!.*File ").*torch[./]distributed[./]elastic[./]', re.MULTILINE)


def end_path(pod: Pod, local_rank: int) -> str:
    """Return the file with the last bytes of a local rank."""
    return os.path.join(pod.runtime, "output", f"{local_rank}.end")


def read_end(pod: Pod, local_rank: int) -> str:
    """Return the last kilobytes that a rank wrote; empty if its output did not pass the reader."""
    try:
        with open(end_path(pod, local_rank), "rb") as file:
            text = COLOURS.sub("", file.read(END_BYTES).decode("utf-8", "replace"))
    except OSError:
        return ""
    torchrun = _NESTED_TORCHRUN.search(text)
    return text if torchrun is None else text[: torchrun.start()].strip() or text


def read_last_lines(pod: Pod, local_rank: int) -> str:
    """Return the last lines that a rank wrote; empty if its output did not pass the reader."""
    text = read_end(pod, local_rank)
    lines = [line.rstrip() for line in text.splitlines() if line.strip() and not _is_of_shim(line)]
    return "\n".join(line[:_WIDTH] for line in lines[-_LINES:])


def _is_of_shim(line: str) -> bool:
    """Return whether a line of a crash report is a frame of the shim, or the list of loaded modules."""
    place = PLACE.match(line)
    return is_own_file(place[1]) if place else "Extension modules: " in line

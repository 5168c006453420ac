"""Which GPUs this machine has and which pod gets which. Imports no torch: `ddp run` must start at once."""

import functools
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"


def find_gpus(environ: Mapping[str, str], *, devices: Path = Path("/dev")) -> tuple[str, ...]:
    """Return the ids of the GPUs that processes of this user may use, as CUDA_VISIBLE_DEVICES names them."""
    if VISIBLE_DEVICES in environ:
        return tuple(word for part in environ[VISIBLE_DEVICES].split(",") if (word := part.strip()) not in ("", "-1"))
    found = _ask_driver()
    if found is None:
        found = sum(re.fullmatch(r"nvidia\d+", path.name) is not None for path in devices.glob("nvidia*"))
    return tuple(map(str, range(found)))


@functools.cache
def _ask_driver() -> int | None:
    """Count with nvidia-smi, once a process; None where that cannot be asked."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    try:
        # The driver can take seconds to wake up, and hangs where it is broken.
        answer = subprocess.run([tool, "-L"], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if answer.returncode != 0:
        return None
    return sum(line.startswith("GPU ") for line in answer.stdout.splitlines())


class GpuPool:
    """Hands out GPUs so that no two pods share one."""

    def __init__(self, ids: Sequence[str]) -> None:
        self._ids = tuple(ids)
        self._free = list(ids)
        self._held: dict[str, list[str]] = {}

    def take(self, holder: str, count: int) -> list[str] | None:
        """Give ``count`` GPUs to the holder, or None while there are too few."""
        if count > len(self._free):
            return None
        taken, self._free = self._free[:count], self._free[count:]
        self._held[holder] = taken
        return taken

    def give_back(self, holder: str) -> None:
        """Take back what the holder has; the next one gets the first that are free, in the machine's order."""
        free = {*self._free, *self._held.pop(holder, [])}
        self._free = [one for one in self._ids if one in free]

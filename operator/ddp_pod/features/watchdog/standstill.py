"""Whether ranks move data: a download or a preparation does, even while it uses almost no CPU."""

from collections.abc import Iterable
from typing import Final

from ...contract.processes import find_family
from ...network.connections import list_outer_sockets

_MOST_PROCESSES: Final = 32  # of a rank
_MOST_BYTES: Final = 1 << 18  # that do not count: what ranks write for the launcher
_BYTES_PER_SECOND: Final = 1024  # the same
_BLOCK_COUNTERS: Final = ("rchar", "wchar", "read_bytes", "write_bytes")  # of proc(5), io


class Standstill:
    """For how long ranks have read and written almost nothing: files, pipes, and the network if they use one."""

    def __init__(self) -> None:
        self._pids: frozenset[int] = frozenset()
        self._since = 0.0
        self._moved: int | None = None  # bytes at that time; None: unknown

    def observe(self, pids: frozenset[int], now: float) -> float:
        """Record the processes of a pod's ranks. Returns for how many seconds none of them has moved data."""
        moved = count_moved_bytes(pids)
        if pids != self._pids or not self._stands_still(moved, now):
            self._pids = pids
            self._since = now
            self._moved = moved
        return now - self._since

    def _stands_still(self, moved: int | None, now: float) -> bool:
        if moved is None or self._moved is None:
            return False
        return abs(moved - self._moved) <= _MOST_BYTES + _BYTES_PER_SECOND * (now - self._since)


def count_moved_bytes(pids: Iterable[int]) -> int | None:
    """Return what processes and their descendants have read and written in bytes; None: unknown.

    The network counts as that of the pod, if one of them has a connection that leaves it.
    """
    families = [find_family(pid, _MOST_PROCESSES + 1) for pid in pids]
    if any(len(family) > _MOST_PROCESSES for family in families):
        return None
    members = sorted({member for family in families for member in family})
    counts = [_count_file_bytes(member) for member in members]
    sockets = list_outer_sockets(members)
    if sockets is None or None in counts:
        return None
    return sum(filter(None, counts)) + (_count_network_bytes() if sockets else 0)


def _count_file_bytes(pid: int) -> int | None:
    try:
        with open(f"/proc/{pid}/io", encoding="ascii") as file:
            values = dict(line.split(": ") for line in file.read().splitlines())
        return sum(int(values[name]) for name in _BLOCK_COUNTERS)
    except (OSError, ValueError, KeyError):
        return None


def _count_network_bytes() -> int:
    """Return what this pod's interfaces but the loopback have received and sent."""
    with open("/proc/net/dev", encoding="ascii") as file:
        rows = [line.split(":") for line in file.read().splitlines()[2:]]
    return sum(int(row.split()[column]) for name, row in rows if name.strip() != "lo" for column in (0, 8))

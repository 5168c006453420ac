"""Read the progress of a pod's ranks: from the script's exporter, its posts, its log, and the rank's counters."""

import os
import socket
import threading
import time
from contextlib import suppress
from typing import NamedTuple

from ..base.files import read_json
from ..contract.names import PAGES, STACK_LIMIT
from ..contract.progress import RankProgress
from ..contract.records import read_record
from ..rank.counters import CounterMemory, RankCounters
from .prometheus import read_script_page
from .rank_progress import merge_counters

PAGE_TIMEOUT = 1.0
_PAGE_LIMIT = 1 << 20


class RankPage(NamedTuple):
    """The progress of a rank. ``text``: the page of its script's exporter, which may have further series."""

    progress: RankProgress
    text: str = ""


class RankReader:
    """Reads the progress of a pod's local ranks, also of those that have ended.

    ``counters``: of their optimizer steps, if the launcher keeps them.
    """

    def __init__(self, runtime: str, counters: CounterMemory | None = None) -> None:
        self._folder = os.path.join(runtime, "metrics")
        self._counters = counters
        self._last: dict[int, RankProgress] = {}

    def list_ranks(self) -> list[int]:
        """Return the local ranks that show progress: they have a page or have counted steps."""
        counters = {} if self._counters is None else self._counters.read_all()
        ranks = {rank for rank, found in counters.items() if found.shows_steps}
        with suppress(OSError):
            names = [name.partition(".") for name in os.listdir(self._folder)]
            ranks |= {int(rank) for rank, _, kind in names if rank.isdigit() and kind in PAGES}
        return sorted(ranks)

    @property
    def reads_log(self) -> bool:
        """Whether the progress of a rank is read from its log."""
        return any(os.path.exists(self._path(rank, "log")) for rank in self.list_ranks())

    def collect(self) -> dict[int, RankPage]:
        """Return the pages of the local ranks in order, without those that do not respond in time."""
        pages: dict[int, RankPage] = {}

        def collect(rank: int) -> None:
            page = self._read(rank)
            if page is not None:
                pages[rank] = page

        threads = [threading.Thread(target=collect, args=(rank,), daemon=True) for rank in self.list_ranks()]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + 2 * PAGE_TIMEOUT
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        done = dict(pages)
        self._last.update({rank: page.progress for rank, page in done.items()})
        return {rank: done[rank] for rank in sorted(done)}

    def progress(self) -> RankProgress | None:
        """Return the last known progress of the lowest rank. Waits for exporters: call it after the ranks' end."""
        for rank in self.list_ranks():
            self._refresh(rank)
            if rank in self._last:
                return self._last[rank]
        return self._last[min(self._last)] if self._last else None

    def rank_progress(self, rank: int) -> RankProgress:
        """Return the last known progress of an ended local rank."""
        self._refresh(rank)
        return self._last.get(rank, RankProgress())

    def step(self, rank: int) -> float | None:
        """Return the run's step that an ended local rank has reported, otherwise that of another rank of this pod."""
        peers = [peer for peer in self.list_ranks() if peer != rank]
        for candidate in (rank, *peers):
            step = find_run_step(self.rank_progress(candidate))
            if step is not None:
                return step
        return None

    def threads(self, rank: int) -> str:
        """Return the stacks of a local rank's other threads; empty if its exporter does not respond."""
        try:
            return self._fetch(rank, "/threads")[:STACK_LIMIT].rstrip()
        except (OSError, ValueError, OverflowError):
            return ""

    def read_counters(self, rank: int) -> RankCounters | None:
        """Return the counters of a local rank's last process; None without any."""
        return None if self._counters is None else self._counters.read(rank)

    def count_steps(self, rank: int) -> int | None:
        """Return the steps of a local rank's last process; None if they are not counted."""
        counters = self.read_counters(rank)
        return counters.steps if counters is not None and counters.is_counted else None

    def _refresh(self, rank: int) -> None:
        page = self._read(rank)
        if page is not None:
            self._last[rank] = page.progress

    def _read(self, rank: int) -> RankPage | None:
        """Return a rank's page from its exporter, or else from the best of its files and its counters."""
        with suppress(OSError, ValueError, OverflowError):  # the rank has no exporter, or it does not respond
            return _build_page(self._fetch(rank, "/metrics"))
        with suppress(OSError), open(self._path(rank, "prom"), encoding="utf-8", errors="replace") as file:
            return _build_page(file.read(_PAGE_LIMIT))
        known = next((raw for kind in PAGES[2:] if (raw := read_json(self._path(rank, kind)))), None)
        progress = None if known is None else read_record(RankProgress, known)
        counters = self.read_counters(rank)
        if counters is not None and counters.shows_steps:
            return RankPage(merge_counters(progress, counters))
        return None if progress is None else RankPage(progress)

    def _fetch(self, rank: int, path: str) -> str:
        """Return a page of a rank's exporter. Raises: OSError, ValueError, OverflowError."""
        with open(self._path(rank, "port"), encoding="ascii") as file:
            return fetch_page(int(file.read(16)), path)

    def _path(self, rank: int, kind: str) -> str:
        return os.path.join(self._folder, f"{rank}.{kind}")


def _build_page(text: str) -> RankPage:
    return RankPage(read_script_page(text), text)


def find_run_step(progress: RankProgress) -> float | None:
    """Return the run's step; if it is unknown, the number of steps that the script itself reports.

    The steps that the launcher counts are none of the run: the process may have resumed from a checkpoint.
    """
    return progress.step if progress.is_counted else progress.known_step


def fetch_page(port: int, path: str = "/metrics", timeout: float = PAGE_TIMEOUT) -> str:
    """Return a page of this machine, at most 1 MiB within ``timeout`` seconds. Raises: OSError or ValueError."""
    deadline = time.monotonic() + timeout
    with socket.socket() as connection:
        connection.settimeout(timeout)
        connection.connect(("127.0.0.1", port))
        connection.sendall(f"GET {path} HTTP/1.0\r\nHost: localhost\r\n\r\n".encode())
        chunks: list[bytes] = []
        size = 0
        while size <= _PAGE_LIMIT:
            connection.settimeout(max(0.001, deadline - time.monotonic()))
            chunk = connection.recv(65536)
            if not chunk:
                break
            size += len(chunk)
            chunks.append(chunk)
    head, _, body = b"".join(chunks).partition(b"\r\n\r\n")
    if size > _PAGE_LIMIT or b" 200 " not in head.split(b"\r\n", 1)[0]:
        raise ValueError("no usable page")
    return body.decode("utf-8", "replace")

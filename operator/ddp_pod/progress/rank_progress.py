"""The progress of a pod's ranks: from the script's exporter, its log, and the rank's counters."""

import math
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

from ..base.files import log, read_json
from ..base.pod import Pod
from ..base.runtime_files import STACK_LIMIT
from ..contract.names import PAGES
from ..contract.progress import RankProgress
from ..contract.records import read_record
from ..rank.counters import CounterMemory, RankCounters
from .prometheus import read_script_page

STEP_SLACK = 2.0
"""Steps by which a script may count differently."""
STEP_SHARE = 0.02
"""Share of the total by which a run may end early, or exceed it."""
PAGE_TIMEOUT = 1.0
_PAGE_LIMIT = 1 << 20
T = TypeVar("T")


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
            step = self.rank_progress(candidate).run_step
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

    def read_feature_numbers(self, rank: int, pid: int, read: Callable[[Any], T]) -> T | None:
        """Return what ``read`` finds in the numbers that a feature has written in a local rank's process.

        None: another process is its last one, or nothing is counted.
        """
        numbers = None if self._counters is None else self._counters.view_feature_numbers(rank)
        if numbers is None:
            return None
        found = read(numbers)
        counters = self.read_counters(rank)  # after the numbers: a new process resets both
        return found if counters is not None and counters.pid == pid else None

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
        known = read_json(self._path(rank, "log"))
        progress = read_record(RankProgress, known) if known else None
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


def create_counters(pod: Pod) -> CounterMemory | None:
    """Return the memory of a pod's counters; None if the job disables them, or the system has no shared memory."""
    if not pod.auto_instrument:
        return None
    try:
        return CounterMemory(pod.runtime, pod.nproc_per_node)
    except (OSError, ValueError) as error:
        log(f"optimizer steps are not counted: cannot create shared memory: {error}")
        return None


def merge_counters(known: RankProgress | None, counters: RankCounters) -> RankProgress:
    """Return a rank's progress with its counters.

    ``known``: from the log. Steps in another unit than optimizer steps, such as samples, do not change.
    """
    progress = RankProgress(is_counted=True) if known is None else replace(known)
    progress.rank = counters.rank
    if progress.step is None:
        _add_steps(progress, counters)
        _add_plan(progress, counters)
    elif progress.is_counted:
        _continue_steps(progress, counters)
        _add_plan(progress, counters)

    progress.last_step_time = time.time() - (time.monotonic() - counters.last_step_time)
    progress.world_size = float(counters.world_size)
    measured = {
        "step_seconds": counters.step_seconds or None,
        "compute_seconds": counters.work_seconds,
        "samples": counters.samples,
        "learning_rate": counters.learning_rate,
    }
    if progress.lost_loss_step is None:
        measured["loss"] = counters.loss
    for name, value in measured.items():
        if getattr(progress, name) is None:
            setattr(progress, name, value)
    if counters.lost_loss_step is not None:  # the log may show an older loss
        progress.loss = math.nan
        if progress.lost_loss_step is None:
            progress.lost_loss_step = float(counters.lost_loss_step + (counters.first_step or 0))
    progress.note_lost_loss()
    return progress


def _add_steps(progress: RankProgress, counters: RankCounters) -> None:
    progress.steps = float(counters.steps)
    # By the state of the rank's optimizer.
    progress.step = None if counters.first_step is None else float(counters.first_step + counters.steps)


def _add_plan(progress: RankProgress, counters: RankCounters) -> None:
    """Add the epoch and the totals that the rank knows; the log may show the epoch as the script counts it."""
    if progress.epoch is None and counters.epoch is not None:
        progress.epoch = float(counters.epoch)
    if progress.epochs is None and counters.epochs is not None:
        progress.epochs = float(counters.epochs)
    if counters.total_steps is not None and progress.step is not None:
        progress.total_margin = None
        progress.total_steps = float(counters.total_steps)
        progress.share = min(1.0, progress.step / counters.total_steps)


def _continue_steps(progress: RankProgress, counters: RankCounters) -> None:
    """Advance the progress to the present: it was written with the last line that showed a step."""
    assert progress.step is not None
    ahead = counters.steps - (progress.steps or 0.0)
    if ahead < 0:  # the line is of a former process in the rank's place, whose position is not that of this one
        progress.share = None
        _add_steps(progress, counters)
        return
    progress.steps = float(counters.steps)
    progress.step += ahead
    progress.is_count_full = progress.is_count_full and ahead <= STEP_SLACK
    if progress.total_steps and progress.step > progress.total_steps:
        progress.total_steps = None  # it was of another number
        progress.share = None
    elif progress.total_steps:
        progress.share = progress.step / progress.total_steps


def find_missing_steps(progress: RankProgress) -> float:
    """Return the steps between the last one and the stated total; 0: none, or so few that the total may be off.

    Scripts count differently by two steps, and skip steps whose gradients overflow. A total of samples may be that of
    all ranks: the length of a dataset that a sampler divides.
    """
    step = progress.known_step or 0.0
    total = progress.total_steps or 0.0
    margin = progress.total_margin or 0.0
    tolerance = max(STEP_SLACK, STEP_SHARE * total, margin)
    is_of_all_ranks = margin > 0 and abs(total - step * (progress.world_size or 1.0)) <= tolerance
    return 0.0 if total - step <= tolerance or is_of_all_ranks else total - step


def complete_progress(progress: RankProgress) -> RankProgress:
    """Return the progress of a script that has succeeded: its last step is the run's, unless many steps are missing."""
    step = progress.known_step
    if not step or find_missing_steps(progress):
        return progress
    completed = replace(progress, share=1.0)
    # A script that ends where its last count is full has announced nothing more, however many epochs it planned.
    if completed.total_steps is not None or completed.is_count_full:
        completed.total_steps = step
    epochs = completed.epochs or 0.0
    # The script counts epochs from 0, or its last one took less than a second.
    if completed.epoch == epochs - 1.0 or (epochs and completed.total_steps is not None):
        completed.epoch = epochs
    return completed

"""What the pods of a job share in a rendezvous round: step, snapshot, stall, and their end."""

import math
import os
import time
from typing import Any, Callable, Mapping, Optional

from ...contract.names import RUN_STEP_FILE, STALL_REPORT_FILE
from ..files import read_json
from ..pod import Pod
from ..watchdog.stall import MOST_WAITS, JobStall, RankWait, decode_activity, decode_wait
from .store import SignedStore, query_store

_LONGEST_PAUSE = 5.0  # between two exchanges of a stall
_ENDED = "ddp/ended"


class RunStep:
    """The step of the run, which pod 0 shares: most scripts report it in rank 0 only."""

    _KEY = "ddp/step"

    def __init__(self, pod: Pod) -> None:
        self._path = os.path.join(pod.runtime, RUN_STEP_FILE)
        self._read_at = -math.inf
        self._posted: tuple[Optional[SignedStore], Any] = (None, None)

    def post(self, store: SignedStore, now: float) -> None:
        """Share the step in the launcher's file of pod 0, at most once a second."""
        if now - self._read_at < 1.0:
            return
        self._read_at = now
        step = read_json(self._path).get("step")
        if step is not None and self._posted != (store, step):
            self._posted = store, step
            query_store(lambda: store.write(self._KEY, step))

    def read(self, store: SignedStore) -> Optional[float]:
        """Return the step that pod 0 has shared; None if it has not, or if the store does not respond."""
        step = query_store(lambda: store.read(self._KEY))
        return step if isinstance(step, (int, float)) and math.isfinite(step) else None


class SharedSnapshot:
    """The snapshot of ``checkpoint.url`` with which all pods start a round.

    The folder of pod 0 is the newest, because rank 0 saves there, and other pods may have shards. The other pods upload
    first. Then pod 0 uploads, and the other pods fetch that snapshot. ``synchronize`` does either, and returns the
    snapshot's name.
    """

    _KEY = "ddp/snapshot"
    _KEY_UPLOADED = "ddp/uploaded"

    def __init__(self, pod: Pod, synchronize: Callable[[Optional[str]], str]) -> None:
        self._pod = pod
        self._synchronize = synchronize

    def share(self, store: SignedStore, pods: int) -> None:
        """Agree before the workers start. The launcher ends this process if that takes too long.

        ``pods``: their number in this round.
        """
        if self._pod.checkpoint is None or not self._pod.is_multi_node:
            return
        if self._pod.node == 0:
            self._wait_for_uploads(store, pods - 1)
            store.write(self._KEY, self._synchronize(None))
            return
        self._synchronize(None)
        store.add(self._KEY_UPLOADED, 1)
        snapshot = store.read(self._KEY)
        while snapshot is None:
            time.sleep(0.1)
            snapshot = store.read(self._KEY)
        self._synchronize(snapshot)

    def _wait_for_uploads(self, store: SignedStore, pods: int) -> None:
        """Wait until that many pods have uploaded their shards; without the missing ones after the join timeout."""
        deadline = time.monotonic() + self._pod.join_timeout_seconds
        while store.add(self._KEY_UPLOADED, 0) < pods and time.monotonic() < deadline:
            time.sleep(0.05)


class SharedStall:
    """The pods' reports of a stall. Without a stall the store is not queried.

    The launcher writes this pod's report to a file; see ``StallReport``.
    """

    _KEY = "ddp/stall"
    _FLAGS = ("known", "stuck", "idle")

    def __init__(self, pod: Pod) -> None:
        self._path = os.path.join(pod.runtime, STALL_REPORT_FILE)
        self._interval = max(0.5, min(_LONGEST_PAUSE, pod.nodes / 100))
        self._read_at = -math.inf
        self._store: Optional[SignedStore] = None
        self._counted: dict[str, bool] = {}  # the flags of this pod that are counted in the store
        self._posted_cause: Optional[dict[str, Any]] = None
        self._posted_wait: Optional[dict[str, Any]] = None
        self._pending: list[bool] = []  # a store that does not respond gets no second query

    def exchange(self, store: SignedStore, pods: int, now: float) -> Optional[JobStall]:
        """Share this pod's report and return those of all; None if there is none to share, or no response."""
        if now - self._read_at < self._interval:
            return None
        self._read_at = now
        report = read_json(self._path)
        if store is not self._store:
            self._store = store
            self._counted = {}
            self._posted_cause = None
            self._posted_wait = None
            self._pending = []
        if self._pending or not (report or self._counted):
            return None
        pending = self._pending

        def exchange() -> JobStall:
            pending.append(True)
            job_stall = self._post(store, report, pods)
            pending.clear()
            return job_stall

        return query_store(exchange)

    def _post(self, store: SignedStore, report: Mapping[str, Any], pods: int) -> JobStall:
        """Update the store. ``report``: empty to withdraw this pod's."""
        counts = {}
        for flag in self._FLAGS:
            before = self._counted.get(flag, False)
            value = bool(report.get(flag))
            counts[flag] = store.add(f"{self._KEY}/{flag}", value - before)
            self._counted[flag] = value
        stored = store.read(f"{self._KEY}/cause")
        own = report.get("cause")
        if own != stored and stored in (None, self._posted_cause):
            store.write(f"{self._KEY}/cause", own)
            stored = own
        self._posted_cause = own
        waits = self._post_wait(store, report.get("wait"))
        if not report:
            self._counted = {}
        return JobStall(pods=pods, cause=decode_activity(stored), waits=waits, **counts)

    def _post_wait(self, store: SignedStore, own: Optional[dict[str, Any]]) -> tuple[RankWait, ...]:
        """Share in which collective a rank of this pod waits, if no peer waits in it. Returns what all pods share.

        Two pods may write at the same time. The one whose entry is lost writes it again at the next exchange.
        """
        stored = store.read(f"{self._KEY}/waits")
        shared = stored[:MOST_WAITS] if isinstance(stored, list) else []
        waits = [wait for wait in shared if wait == own or wait != self._posted_wait]
        known = [decode_wait(wait) for wait in waits]
        collectives = [wait.collective for wait in known if wait is not None]
        if own is not None and own["collective"] not in collectives and len(waits) < MOST_WAITS:
            waits.append(own)
        if waits != shared:
            store.write(f"{self._KEY}/waits", waits)
        self._posted_wait = own if own in waits else None
        decoded = [decode_wait(wait) for wait in waits]
        return tuple(wait for wait in decoded if wait is not None)


def count_ended_pods(store: SignedStore) -> int:
    """Return the number of pods whose ranks have all ended with exit code 0; 0 if the store does not respond."""
    return query_store(lambda: store.add(_ENDED, 0)) or 0


def wait_for_ended_pods(store: SignedStore, pods: int, patience: float) -> bool:
    """Count this pod as ended and wait for its peers. Returns False after ``patience`` seconds, or without a store."""
    deadline = time.monotonic() + patience
    pause = max(0.1, min(1.0, pods / 100))
    try:
        ended = store.add(_ENDED, 1)
        while ended < pods:
            if time.monotonic() > deadline:
                return False
            time.sleep(pause)
            ended = store.add(_ENDED, 0)
    except RuntimeError:  # the store has ended
        return False
    return True

"""The state that the pods of a job share in one rendezvous round: the step, what features find, and their end."""

import json
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from ..base.files import read_json
from ..base.pod import Pod
from ..base.runtime_files import RUN_STEP_FILE
from ..contract.failure_record import RankEnd
from ..contract.records import read_record, to_json
from ..failures.collective_places import RankPlace, find_lost_places, read_places
from ..failures.worker_failure import read_recorded_failures
from .part import RoundExchange, log_fault
from .store import SignedStore, query_store

_SHORTEST_PAUSE = 0.5  # seconds between two exchanges
_LONGEST_PAUSE = 5.0
_SECONDS_FOR_PLACES = 5.0  # within which the peers of an aborted rank notice its end
_SECONDS_FOR_OUTPUT = 1.0  # within which its last lines have arrived
_SECONDS_TO_DESCRIBE = 2.0  # that a pod waits for its peers before it describes its end


class RoundState:
    """One pod's part in the shared state of a round with ``pods`` pods.

    Pod 0 publishes the step of the run, and what features find. Other pods query the store only if a feature has
    something to share. ``exchanges``: the parts of features.
    """

    def __init__(self, pod: Pod, store: SignedStore, pods: int, exchanges: Sequence[RoundExchange] = ()) -> None:
        self._pod = pod
        self.store = store
        self.pods = pods
        self._exchanged_at = -math.inf
        self._published: Mapping[str, Any] = {}
        self._exchanges = list(exchanges)

    def exchange(self, now: float) -> Mapping[str, Any]:
        """Share this pod's part, and return the state of the job, as pod 0 publishes it: ``groups`` and ``features``.

        Empty: the store does not respond, this pod takes no part, or the last exchange was just before ``now``.
        """
        if now - self._exchanged_at < max(_SHORTEST_PAUSE, min(_LONGEST_PAUSE, self.pods / 100)):
            return {}
        self._exchanged_at = now
        collected = self._collect(now)
        if not (any(own for _, own in collected) or self._pod.node == 0):
            return {}
        return query_store(lambda: self._exchange(collected)) or {}

    def _collect(self, now: float) -> list[tuple[RoundExchange, Any]]:
        """Return what each feature has to share, without those whose part a fault has ended."""
        collected = [
            (exchange, self._call(exchange, partial(exchange.collect, now))) for exchange in [*self._exchanges]
        ]
        return [(exchange, own) for exchange, own in collected if exchange in self._exchanges]

    def _exchange(self, collected: Sequence[tuple[RoundExchange, Any]]) -> Mapping[str, Any]:
        findings = [self._call(exchange, partial(_share, exchange, own)) for exchange, own in collected]
        if self._pod.node == 0:
            self._publish(next((finding for finding in findings if finding), None))
        return self._read_job()

    def _call(self, exchange: RoundExchange, hook: Callable[[], Any]) -> Any:
        """Return what a hook returns. A fault ends this feature's part in the round. Raises: RuntimeError."""
        try:
            return hook()
        except RuntimeError:  # the store has ended
            raise
        except Exception as error:
            log_fault(type(exchange).__name__, error)
            self._exchanges.remove(exchange)
            return None

    def forget(self) -> None:
        """Delete what features have shared: the store keeps the values of all rounds."""
        for exchange in self._exchanges:
            query_store(exchange.forget)

    def _publish(self, finding: Mapping[str, Any] | None) -> None:
        summaries = {exchange.name: exchange.summary for exchange in self._exchanges if exchange.summary is not None}
        job = {
            "step": read_json(os.path.join(self._pod.runtime, RUN_STEP_FILE)).get("step"),
            "groups": finding,
            "features": summaries,
        }
        if job != self._published:
            self.store.write("job", job)
            self._published = job

    def _read_job(self) -> Mapping[str, Any]:
        return self.store.read("job") or {}

    def read_step(self) -> float | None:
        """Return the step that pod 0 has published, as most scripts report it in rank 0 only; None if it is unknown."""
        step = (query_store(self._read_job) or {}).get("step")
        return step if isinstance(step, (int, float)) and math.isfinite(step) else None

    def read_ended_pods(self) -> set[int]:
        """Return the pods whose ranks have all ended with exit code 0. Raises: RuntimeError without the store."""
        return set(self.store.read_log("ended"))

    def count_ended_pods(self) -> int:
        """Return the number of pods whose ranks have all ended with exit code 0; 0 if the store does not respond."""
        return len(query_store(self.read_ended_pods) or ())

    def find_first_end(self) -> RankEnd | None:
        """Return the first rank of the pod that ended first, within seconds; None: it has not described its end.

        That pod describes it some seconds after it has counted as ended: longer than a single question may take.
        """
        deadline = time.monotonic() + 3 * _SECONDS_TO_DESCRIBE
        while True:
            known = query_store(self._read_first_end)
            if known is not None or time.monotonic() > deadline:
                return None if known is None else read_record(RankEnd, known)
            self._pause()

    def _read_first_end(self) -> Any | None:
        ended = list(self.store.read_log("ended"))
        return self.store.read(f"end/{ended[0]}") if ended else None

    def wait_for_ended_pods(
        self, patience: float, is_interrupted: Callable[[], bool], describe: Callable[[], RankEnd | None]
    ) -> bool:
        """Count this pod as ended and wait for its peers. Returns whether all have ended.

        ``describe``: returns the end of its first rank, for peers that may still need it. It waits for ``patience``
        seconds at most, and ends early without the store, or once ``is_interrupted``.
        """

        def is_over() -> bool:
            return self._have_all_ended() or is_interrupted()

        try:
            if is_interrupted():
                return False
            # After the question: a pod in this log counts as ended for all, and never leaves it.
            self.store.append("ended", self._pod.node)
            if not self._wait(is_over, min(patience, _SECONDS_TO_DESCRIBE)):
                self._share_end(describe())  # its last lines have arrived meanwhile
                self._wait(is_over, patience)
            return self._have_all_ended()
        except RuntimeError:  # the store has ended
            return False

    def share_lost_places(self) -> None:
        """Share where ranks of this pod have lost a peer, if the store responds."""
        places = find_lost_places(read_recorded_failures(self._pod))
        if places:
            query_store(partial(self._append_places, places))

    def _append_places(self, places: Sequence[RankPlace]) -> None:
        for place in places:
            self.store.append("places", list(place))

    def await_lost_places(self, is_needed: Callable[[], bool]) -> list[RankPlace]:
        """Return where ranks of other pods have lost a peer, within seconds; empty: none has shared that.

        ``is_needed``: whether the last lines of this pod's ranks show that both sides explain the failure. A restart
        after another one does not wait.
        """
        since = time.monotonic()
        while True:
            places = read_places(query_store(partial(self.store.read_log, "places")) or (), self._pod.node)
            waited = time.monotonic() - since
            if places or waited > _SECONDS_FOR_PLACES or (waited > _SECONDS_FOR_OUTPUT and not is_needed()):
                return places
            self._pause()

    def _share_end(self, end: RankEnd | None) -> None:
        if end is not None:
            self.store.write(f"end/{self._pod.node}", to_json(end))

    def _have_all_ended(self) -> bool:
        """Pod 0 reads the log and publishes its end: the other pods read one short value."""
        if self._pod.node == 0 and self._count("ended") >= self.pods:
            self.store.write("over", True)
        return self.store.read("over") is not None

    def _count(self, log: str) -> int:
        """Return how many pods are in a log. A stranger can repeat a line, but not write one."""
        return len(set(self.store.read_log(log)))

    def _wait(self, condition: Callable[[], bool], patience: float) -> bool:
        deadline = time.monotonic() + patience
        while not condition():
            if time.monotonic() > deadline:
                return False
            self._pause()
        return True

    def _pause(self) -> None:
        """Sleep between two reads of the store, in a large job for longer."""
        time.sleep(max(0.1, min(1.0, self.pods / 100)))


def _share(exchange: RoundExchange, own: Any) -> Mapping[str, Any] | None:
    """Let a feature share its part. Raises: what it raises, or an exception for what the store could not keep."""
    finding = exchange.share(own)
    json.dumps([finding, exchange.summary])
    return finding

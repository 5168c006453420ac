"""What the pods of a job tell each other through the store of a round: how far the run is, how often it restarted."""

import json
import math
import time
from typing import Any, Callable, Optional

from ..files import read_json
from ..pod import Pod
from .rendezvous import query_store

_SECONDS_TO_POST = 2.0  # that other pods may take to start their workers after this one


class RunStep:
    """How far the run is, by pod 0, in the store of their round: most scripts report it in rank 0 alone."""

    _KEY = "ddp/step"

    def __init__(self, path: str) -> None:
        self._path = path
        self._last = -math.inf
        self._posted: tuple[Any, Any] = (None, None)

    def post(self, store: Any, now: float) -> None:
        """Let the other pods know what the launcher of pod 0 has left in its file, at most once a second."""
        if store is None or now - self._last < 1.0:
            return
        self._last = now
        step = read_json(self._path).get("step")
        if step is not None and self._posted != (store, step):
            self._posted = store, step
            query_store(lambda: store.set(self._KEY, json.dumps(step)))

    def read(self, store: Any) -> Optional[float]:
        """Return what pod 0 has posted; None where it has not, or the store does not respond."""
        found = query_store(lambda: float(store.get(self._KEY)) if store.check([self._KEY]) else None)
        return next((step for step in found if step is not None and math.isfinite(step)), None)


class RestartCount:
    """How often the workers of the group were restarted, in the store of each round.

    All pods restart together, so all of them count the same, but for one that took another's place: it learns from the
    others what they have counted, so that whoever reads the pods' counters knows which failures are new.
    """

    _KEY = "ddp/restarts"

    def __init__(self, count: int) -> None:
        self.count = count
        self._store: Any = None
        self._ask_at = math.inf

    def start_round(self, store: Any, now: float) -> None:
        """Let the others know what this pod has counted. ``now`` is of a monotonic clock."""

        def post() -> None:
            known = b""
            while int(known or -1) < self.count:
                known = store.compare_set(self._KEY, known.decode(), str(self.count))

        self._store, self._ask_at = store, now + _SECONDS_TO_POST
        query_store(post)

    def learn(self, now: float = math.inf) -> bool:
        """Ask once a round, after the others have posted, or at its end. Returns whether they have counted more."""
        if now < self._ask_at or self._ask_at == math.inf:
            return False
        self._ask_at = math.inf
        before, found = self.count, query_store(lambda: int(self._store.get(self._KEY)))
        self.count = max([before, *found])
        return self.count > before


class SharedSnapshot:
    """The snapshot of ``checkpoint.url`` from which a round begins: all ranks may read the folder, so all are alike.

    Pod 0's folder is the newest, as its rank 0 has saved there: it is uploaded first, if it is not yet, and the others
    fetch that snapshot, if they have another. ``synchronize`` does either, and returns the snapshot's name.
    """

    _KEY = "ddp/snapshot"

    def __init__(self, pod: Pod, synchronize: Callable[[Optional[str]], str]) -> None:
        self._pod, self._synchronize = pod, synchronize

    def share(self, store: Any) -> None:
        """Agree before the workers of a round start; the launcher ends this process where that takes too long."""
        if self._pod.checkpoint is None or not self._pod.is_multi_node:
            return
        if self._pod.node == 0:
            store.set(self._KEY, self._synchronize(None))
            return
        while not store.check([self._KEY]):
            time.sleep(0.1)
        self._synchronize(store.get(self._KEY).decode())

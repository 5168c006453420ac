"""The samples of all pods of a round: each shares those of its ranks, and pod 0 compares them."""

import os
from collections.abc import Mapping
from typing import Any

from ...base.files import read_json
from ...base.pod import Pod
from ...contract.records import to_json
from ...torchrun.part import AgentPart, RoundExchange, Store
from .comparison import RankSample, ReplicaComparison, decode_samples
from .samples import REPLICAS_FILE

_SECONDS_TO_COMPARE = 5.0  # between two comparisons of the ranks' samples, at least
_MOST_COMPARED = 64  # pods, in one comparison


class SampleExchange(RoundExchange):
    """One pod's part in the comparison of a round with ``pods`` pods."""

    def __init__(self, pod: Pod, store: Store, pods: int) -> None:
        self._pod = pod
        self._store = store
        self._pods = pods
        self._compared_at = float("-inf")
        self._is_shared = False
        self._first_compared = 0
        self._comparison = ReplicaComparison(pods * pod.nproc_per_node)
        self._difference: Mapping[str, Any] | None = None

    def collect(self, now: float) -> Any:
        """Return the samples of this pod's ranks; empty as long as the next comparison is not due."""
        if now - self._compared_at < max(_SECONDS_TO_COMPARE, self._pods / 10):
            return []
        self._compared_at = now
        return read_json(os.path.join(self._pod.runtime, REPLICAS_FILE)).get("samples") or []

    def share(self, own: Any) -> Mapping[str, Any] | None:
        """Share the samples. Returns in pod 0 how the replicas differ."""
        if own and not self._is_shared:
            self._store.append("sampled", self._pod.node)
            self._is_shared = True
        # A comparison may read samples of different steps: only equal steps are compared.
        if own and self._pod.node != 0:
            self._store.write(f"samples/{self._pod.node}", own)
        elif own:
            self._compare(decode_samples(0, own))
        return self._difference

    def _compare(self, samples: list[RankSample]) -> None:
        """Compare the ranks of this pod with those of other pods, in a large job with some of them in turn."""
        peers = sorted({pod for pod in self._store.read_log("sampled") if pod != 0})
        first = self._first_compared
        compared = (peers[first:] + peers[:first])[:_MOST_COMPARED]
        self._first_compared = (first + _MOST_COMPARED) % len(peers) if len(peers) > _MOST_COMPARED else 0
        for pod in compared:
            samples += decode_samples(pod, self._store.read(f"samples/{pod}"))
        facts = self._comparison.update(samples)
        self._difference = None if facts is None else to_json(facts)

    def forget(self) -> None:
        """Delete this pod's samples: the store keeps the values of all rounds."""
        if self._is_shared and self._pod.node != 0:
            self._store.delete(f"samples/{self._pod.node}")


class Replicas(AgentPart):
    """Compares the replicas of all pods."""

    name = "replicas"

    def join_round(self, pod: Pod, store: Store, pods: int) -> RoundExchange:
        """Return this pod's part in the comparison."""
        return SampleExchange(pod, store, pods)


PART = Replicas()

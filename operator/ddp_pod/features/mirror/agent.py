"""The start of all pods of a round with the same checkpoints, in torchrun's agent."""

import time

from ...base.pod import Pod
from ...torchrun.part import AgentPart, JoinedRound
from .messages import SnapshotNeeded


class SharedSnapshot(AgentPart):
    """Makes all pods of a round start with the same snapshot of ``checkpoint.url``."""

    name = "mirror"

    def is_vital(self, pod: Pod) -> bool:
        """Return True: pods with different checkpoints would train on different states."""
        return True

    def prepare_round(self, pod: Pod, current: JoinedRound) -> bool:
        """Make this pod start with the snapshot of pod 0. Returns False if the round ended before.

        The folder of pod 0 is the newest, because rank 0 saves there, and other pods may have shards. They upload
        first. Pod 0 waits for them until the join timeout, and uploads. Then the other pods fetch its snapshot. The
        launcher limits the time of each.
        """
        if not pod.is_multi_node:
            return True
        store = current.store
        if pod.node == 0:
            deadline = time.monotonic() + pod.join_timeout_seconds
            while len(set(store.read_log("uploaded"))) < current.pods - 1 and time.monotonic() < deadline:
                if current.is_over():
                    return False
                _pause(current)
            store.write("snapshot", _synchronize(current, None))
            return True
        _synchronize(current, None)
        # After the upload: pod 0 takes its snapshot when all pods are in this log. A pod that ends in between is
        # noticed by is_over. No test ends it there.
        store.append("uploaded", pod.node)
        snapshot = store.read("snapshot")
        while snapshot is None:
            if current.is_over():
                return False
            _pause(current)
            snapshot = store.read("snapshot")
        _synchronize(current, snapshot)
        return True


def _synchronize(current: JoinedRound, known: str | None) -> str:
    return str(current.request(SnapshotNeeded(known)))


def _pause(current: JoinedRound) -> None:
    """Sleep between two reads of the store, in a large job for longer."""
    time.sleep(max(0.1, min(1.0, current.pods / 100)))


PART = SharedSnapshot()

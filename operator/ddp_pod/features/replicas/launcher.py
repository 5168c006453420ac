"""The comparison of the replicas in the pod's first process."""

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from ...base.files import log, try_write_json
from ...base.launcher_part import LauncherPart
from ...base.pod import Pod, list_workers
from ...base.service import Conclusion, Service
from ...contract.group_facts import OF_REPLICAS, GroupFacts
from ...contract.records import read_record
from ...progress.rank_progress import RankReader
from ...torchrun.feature_messages import GroupFindings
from .comparison import ReplicaComparison, decode_samples, encode_samples
from .samples import REPLICAS_FILE, read_samples

_INTERVAL = 1.0  # seconds between two checks
_LONG_INTERVAL = 10.0  # the same while ranks are sampled and do not differ


class ReplicaMonitor(Service):
    """Compares this pod's ranks, or passes their samples to the agent.

    Ranks are sampled only in a process group of all ranks, so a finding replaces that about the groups.
    """

    name = "replicas"

    def __init__(self, pod: Pod, reader: RankReader) -> None:
        self._pod = pod
        self._reader = reader
        self._path = os.path.join(pod.runtime, REPLICAS_FILE)
        self._restarted_at = 0.0  # Unix time
        self._comparison = ReplicaComparison(pod.nproc_per_node)
        self._logged = ""
        self._difference: GroupFacts | None = None  # of the job, as pod 0 has published it
        self.facts: GroupFacts | None = None

    def run(self) -> None:
        """Compare continuously. Never returns."""
        while True:
            is_sampled = self.check()
            time.sleep(_LONG_INTERVAL if is_sampled and self.facts is None else _INTERVAL)

    def check(self) -> bool:
        """Update the facts. Returns whether there are samples."""
        is_sampled = self._compare()
        facts = self.facts
        if facts is not None and facts.message != self._logged:
            self._logged = facts.message
            log(f"replicas: {facts.message}" + (f"; {facts.remedy}" if facts.remedy else ""))
        return is_sampled

    def report(self) -> Mapping[str, object]:
        """Return the facts for the report."""
        return {} if self.facts is None else {"groups": self.facts}

    def conclude(self) -> Conclusion:
        """Return the facts of ranks that have ended."""
        self._compare()
        return Conclusion(groups=self.facts)

    def forget(self) -> None:
        """Forget the replicas of ranks that restart."""
        self._restarted_at = time.time()
        self._comparison = ReplicaComparison(self._pod.nproc_per_node)
        self._difference = None
        self.facts = None
        with suppress(OSError):
            os.unlink(self._path)

    def note(self, event: object) -> None:
        """Note how the job's replicas differ, as pod 0 has published it."""
        if isinstance(event, GroupFindings):
            facts = None if event.facts is None else read_record(GroupFacts, event.facts)
            self._difference = facts if facts is not None and facts.state in OF_REPLICAS else None

    def _compare(self) -> bool:
        """Compare this pod's ranks, or pass their samples to the agent. Returns whether any exist."""
        restarted_at = self._restarted_at
        workers = [worker for worker in list_workers(self._pod) if worker.started > restarted_at]
        read = {
            worker.rank: self._reader.read_feature_numbers(worker.local_rank, worker.pid, read_samples) or []
            for worker in workers
        }
        samples = encode_samples(read)
        if not self._pod.is_multi_node:
            facts = self._comparison.update(decode_samples(0, samples))
        else:
            if samples:
                try_write_json(self._path, {"samples": samples})
            facts = self._difference
        if restarted_at == self._restarted_at:
            self.facts = facts
        else:
            with suppress(OSError):
                os.unlink(self._path)
        return bool(samples)


def _create(pod: Pod, reader: Any) -> Sequence[Service]:
    return (ReplicaMonitor(pod, reader),)


PART = LauncherPart(create=_create)

"""What keeps the ranks of a job from training: each pod shares what its launcher has found, and pod 0 sums it up."""

import os
from collections.abc import Mapping
from typing import Any, NamedTuple

from ...base.files import read_json
from ...base.pod import Pod
from ...contract.records import read_record, to_json
from ...torchrun.part import AgentPart, RoundExchange, Store
from .group_waits import GROUP_WAIT_FILE, Joiner, decode_joiners, explain_wait
from .stall import FEATURE, STALL_REPORT_FILE, StallReport, combine_reports

_MOST_CHANGES = 32  # of a pod's ranks that wait, in one round: each is kept in the store


class _Part(NamedTuple):
    """What this pod has to share: the report of a stall, and its ranks in a wait; each empty if there is none."""

    report: Mapping[str, Any]
    wait: Mapping[str, Any]


class StallExchange(RoundExchange):
    """One pod's part in a round with ``pods`` pods.

    A pod whose ranks stall writes its report under its own key, and pod 0 publishes the sum of the reports. Without a
    stall or a wait the other pods do not query the store.
    """

    name = FEATURE

    def __init__(self, pod: Pod, store: Store, pods: int) -> None:
        self._pod = pod
        self._store = store
        self._pods = pods
        self._has_stalled = False
        self._report: Mapping[str, Any] = {}  # of a stall of this pod, as its peers know it
        self._joiners: Any = []
        self._shared_joiners = 0

    def collect(self, now: float) -> Any:
        """Return what this pod has to share; None: nothing, and it has not stalled in this round."""
        report = read_json(os.path.join(self._pod.runtime, STALL_REPORT_FILE))
        wait = read_json(os.path.join(self._pod.runtime, GROUP_WAIT_FILE))
        return _Part(report, wait) if report or wait or self._has_stalled else None

    def share(self, own: _Part | None) -> Mapping[str, Any] | None:
        """Share it. Returns in pod 0 why ranks of the job wait for their process group, if they do."""
        report, wait = own or _Part({}, {})
        if report and not self._has_stalled:
            self._store.append("stalled", self._pod.node)
            self._has_stalled = True
        # That a stall is over replaces the former value. Pod 0 may read the log before this value exists; an absent
        # report counts as none.
        if report != self._report:
            self._store.write(f"stall/{self._pod.node}", report)
            self._report = report
        joiners = wait.get("joiners", [])
        if joiners != self._joiners and self._shared_joiners < _MOST_CHANGES:
            self._store.append("joiners", [self._pod.node, joiners])
            self._joiners = joiners
            self._shared_joiners += 1
        if self._pod.node != 0:
            return None
        self.summary = self._sum_up()
        return self._explain_wait() if wait else None

    def _sum_up(self) -> Any:
        stalled = sorted(set(self._store.read_log("stalled")))
        reports = [read_record(StallReport, self._store.read(f"stall/{pod}")) for pod in stalled]
        return to_json(combine_reports(reports, self._pods)) if stalled else None

    def _explain_wait(self) -> dict[str, Any] | None:
        joiners: list[Joiner] = []
        for parts in dict(self._store.read_log("joiners")).values():
            joiners += decode_joiners(parts)
        world_size = self._pods * self._pod.nproc_per_node
        wait = explain_wait(joiners, world_size, is_local=self._pod.local)
        return None if wait is None else to_json(wait)


class Watchdog(AgentPart):
    """Shares stalls and waits with the other pods."""

    name = FEATURE

    def join_round(self, pod: Pod, store: Store, pods: int) -> RoundExchange:
        """Return this pod's part in the round."""
        return StallExchange(pod, store, pods)


PART = Watchdog()

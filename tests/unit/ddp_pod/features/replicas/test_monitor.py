"""The comparison of the replicas in the pod's first process, and what it reports."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from ddp_pod.base.files import write_json
from ddp_pod.contract.group_facts import DIFFERENT, WAITING, GroupFacts
from ddp_pod.contract.records import to_json
from ddp_pod.features.replicas.launcher import ReplicaMonitor
from ddp_pod.features.replicas.samples import REPLICAS_FILE, ReplicaSample, write_sample
from ddp_pod.progress.rank_progress import RankReader
from ddp_pod.rank import counters
from ddp_pod.rank.counter_slots import open_slot
from ddp_pod.rank.counters import CounterMemory
from ddp_pod.torchrun.feature_messages import GroupFindings
from tests.support.launcher_config import launcher_pod


class SampledRanks:
    """Two ranks of a pod. ``digests``: of their parameters after each of two steps."""

    def __init__(self, folder: Path, *digests: int, nodes: int = 1) -> None:
        (folder / "workers").mkdir()
        memory = CounterMemory(str(folder), 2)
        self.slots = [open_slot(str(folder), rank) for rank in range(2)]
        for rank, digest in enumerate(digests):
            about = {"pid": os.getpid(), "rank": rank, "localRank": rank, "restart": 0, "started": 1.0}
            write_json(str(folder / "workers" / f"{rank}.json"), about)
            self.slots[rank][counters.PID] = os.getpid()
            for step in (2, 3):
                write_sample(self.slots[rank], ReplicaSample(step, 0, digest, 7, 0, 0, 1))
        pod = launcher_pod(folder, nodes=nodes, nproc_per_node=2)
        self.monitor = ReplicaMonitor(pod, RankReader(str(folder), memory))


def test_equal_ranks_are_not_reported(tmp_path: Path) -> None:
    monitor = SampledRanks(tmp_path, 5, 5).monitor
    assert monitor.check()
    assert monitor.report() == {}
    assert monitor.conclude().groups is None


def test_different_ranks_of_one_pod_are_reported_until_they_restart(tmp_path: Path) -> None:
    monitor = SampledRanks(tmp_path, 5, 6).monitor
    monitor.check()
    facts = monitor.report()["groups"]
    assert isinstance(facts, GroupFacts)
    assert facts.state == DIFFERENT
    assert monitor.conclude().groups == facts
    monitor.forget()
    assert not monitor.check(), "the former processes have these samples"
    assert monitor.report() == {}


def test_samples_of_another_process_are_left_out(tmp_path: Path) -> None:
    ranks = SampledRanks(tmp_path, 5, 6)
    ranks.slots[1][counters.PID] = 1
    ranks.monitor.check()
    assert ranks.monitor.report() == {}


def test_pod_shares_its_samples_and_reports_what_pod_0_has_found(tmp_path: Path) -> None:
    monitor = SampledRanks(tmp_path, 5, 6, nodes=2).monitor
    monitor.check()
    path = tmp_path / REPLICAS_FILE
    assert len(json.loads(path.read_text())["samples"]) == 4
    assert monitor.report() == {}
    monitor.note(GroupFindings(to_json(GroupFacts(DIFFERENT, 4, "rank 3 differs"))))
    monitor.check()
    assert monitor.report() == {"groups": GroupFacts(DIFFERENT, 4, "rank 3 differs")}
    monitor.forget()
    assert not path.exists()


@pytest.mark.parametrize("event", [GroupFindings(None), GroupFindings(to_json(GroupFacts(WAITING, 4, "late")))])
def test_other_findings_end_a_difference(tmp_path: Path, event: GroupFindings) -> None:
    monitor = SampledRanks(tmp_path, 5, 5, nodes=2).monitor
    monitor.note(GroupFindings(to_json(GroupFacts(DIFFERENT, 4, "rank 3 differs"))))
    monitor.note(event)
    monitor.check()
    assert monitor.report() == {}

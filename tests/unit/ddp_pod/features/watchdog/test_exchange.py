"""Stalls and waits, as the pods of a job share them in a rendezvous round."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]

from ddp_pod.base.files import write_json
from ddp_pod.contract.group_facts import GroupFacts
from ddp_pod.contract.records import read_record, to_json
from ddp_pod.features.watchdog.agent import PART
from ddp_pod.features.watchdog.group_waits import GROUP_WAIT_FILE, Joiner
from ddp_pod.features.watchdog.stall import (
    FEATURE,
    STALL_REPORT_FILE,
    JobStall,
    RankActivity,
    RankStall,
    RankWait,
    StallReport,
    report_stall,
)
from ddp_pod.rank.groups import JOINING
from ddp_pod.torchrun.round_state import RoundState
from ddp_pod.torchrun.store import SignedStore
from tests.support.launcher_config import launcher_pod

WAITS = RankActivity(0, 0, "Waiting", "rank 0 waits for other ranks in all_reduce")
SLEEPS = RankActivity(1, 0, "Behind", "rank 1 is in sleep (train.py:3)")
SILENT = RankStall(100.0, "no step for 10 s", certain=False, known=True, idle=frozenset({0}))
IDLE = RankStall(100.0, "no CPU for 10 s", certain=False, known=False, idle=frozenset({0}))


def round_store() -> SignedStore:
    return SignedStore(HashStore(), "secret", "run/0")


class NoStore:
    """A store whose server has ended."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("connection reset")


LOST = SignedStore(NoStore(), "secret", "run/0")


class RoundPods:
    """Two pods in one round."""

    def __init__(self, folder: Path, store: SignedStore) -> None:
        self.folders = [folder / "pod-0", folder / "pod-1"]
        self.states = []
        for index, path in enumerate(self.folders):
            path.mkdir(exist_ok=True)
            pod = launcher_pod(path, nodes=2, node=index)
            self.states.append(RoundState(pod, store, 2, [PART.join_round(pod, store, 2)]))

    def report(self, index: int, report: StallReport) -> None:
        """Write the stall report of a pod's launcher."""
        write_json(str(self.folders[index] / STALL_REPORT_FILE), to_json(report))

    def withdraw(self, index: int) -> None:
        """Delete the stall report of a pod's launcher."""
        (self.folders[index] / STALL_REPORT_FILE).unlink()

    def exchange(self, index: int, now: float) -> JobStall | None:
        """Return the stall of the job as one pod receives it."""
        stall = self.states[index].exchange(now).get("features", {}).get(FEATURE)
        return None if stall is None else read_record(JobStall, stall)


@pytest.fixture
def pods(tmp_path: Path) -> RoundPods:
    return RoundPods(tmp_path, round_store())


class TestStall:
    def test_pods_share_the_root_cause_and_withdraw_it(self, pods: RoundPods) -> None:
        assert pods.exchange(0, 0) is None, "nothing to report"
        pods.report(0, report_stall(SILENT, [WAITS]))
        assert pods.exchange(0, 1) == JobStall(1, 1, 1, 2, None)
        pods.report(1, report_stall(IDLE, [SLEEPS]))
        pods.exchange(1, 1)
        assert pods.exchange(0, 2) == pods.exchange(1, 2) == JobStall(1, 2, 2, 2, SLEEPS)
        pods.withdraw(1)
        pods.exchange(1, 3)
        assert pods.exchange(0, 3) == pods.exchange(1, 4) == JobStall(1, 1, 1, 2, None)

    def test_pod_without_stall_does_not_query_the_store(self, tmp_path: Path) -> None:
        store = round_store()
        pods = RoundPods(tmp_path, store)
        pods.report(0, report_stall(SILENT, [WAITS]))
        pods.exchange(0, 1)
        assert pods.exchange(1, 1) is None

    def test_pods_share_one_rank_for_each_collective(self, pods: RoundPods) -> None:
        reduces = RankWait(0, "all_reduce 7 of the default group")
        broadcasts = RankWait(1, "broadcast 3 of group 1")
        pods.report(0, report_stall(SILENT, [WAITS], [reduces]))
        pods.report(1, report_stall(SILENT, [WAITS], [dataclasses.replace(reduces, rank=1)]))
        pods.exchange(1, 1)
        shared = pods.exchange(0, 1)
        assert shared is not None
        assert shared.waits == (dataclasses.replace(reduces, ranks=2),)
        pods.report(1, report_stall(SILENT, [WAITS], [broadcasts]))
        pods.exchange(1, 2)
        shared = pods.exchange(0, 2)
        assert shared is not None
        assert shared.waits == (reduces, broadcasts)

    def test_pod_that_took_anothers_place_keeps_the_reports_of_its_peers(self, tmp_path: Path) -> None:
        store = round_store()
        pods = RoundPods(tmp_path, store)
        pods.report(1, report_stall(IDLE, [SLEEPS]))
        pods.exchange(1, 1)
        assert RoundPods(tmp_path, store).exchange(0, 2) == JobStall(0, 1, 1, 2, SLEEPS)

    @pytest.mark.parametrize("report", [{"cause": {"rank": 1}, "waits": 3}, {}, None])
    def test_invalid_report_of_a_peer_counts_as_none(self, tmp_path: Path, report: Any) -> None:
        store = round_store()
        store.append("stalled", 1)
        store.write("stall/1", report)
        assert RoundPods(tmp_path, store).exchange(0, 1) == JobStall(0, 0, 0, 2, None)

    def test_lost_store_reports_nothing(self, tmp_path: Path) -> None:
        pods = RoundPods(tmp_path, LOST)
        pods.report(0, report_stall(SILENT, [WAITS]))
        assert pods.exchange(0, 1) is None


class TestWait:
    """Ranks that wait for the process group, as the launchers of two pods share them."""

    def share(self, pods: RoundPods, index: int, *joiners: Joiner) -> None:
        write_json(str(pods.folders[index] / GROUP_WAIT_FILE), {"joiners": joiners})

    def test_pods_learn_the_late_rank_and_forget_it(self, pods: RoundPods) -> None:
        waits = Joiner(0, 0, JOINING, 5.0, 0, 2, "job:1", "train.py:9", job_store="job:1")
        self.share(pods, 0, waits)
        self.share(pods, 1)
        pods.states[1].exchange(1)
        assert pods.states[0].exchange(1)["groups"]["isMistake"] is False
        assert pods.states[1].exchange(2)["groups"] is not None, "so it looks where its own rank is"
        self.share(pods, 1, Joiner(1, 1, place="load (data.py:3)", job_store="job:1"))
        pods.states[1].exchange(3)
        wait = read_record(GroupFacts, pods.states[0].exchange(3)["groups"])
        assert wait is not None
        assert (wait.rank, wait.pod, wait.is_mistake, wait.world_size) == (1, 1, True, 2)
        assert "data.py:3" in wait.message
        self.share(pods, 0)
        assert pods.states[0].exchange(4)["groups"] is None

    @pytest.mark.parametrize("joiners", [{"rank": 0}, [3], [[0]], [[0, 0, "Joining"]], None])
    def test_invalid_part_of_a_peer_is_ignored(self, tmp_path: Path, joiners: Any) -> None:
        store = round_store()
        store.append("joiners", [1, joiners])
        pods = RoundPods(tmp_path, store)
        self.share(pods, 0)
        assert pods.states[0].exchange(1)["groups"] is None

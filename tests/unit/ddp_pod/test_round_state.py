"""The state that the pods of a job share in a rendezvous round."""

from __future__ import annotations

import dataclasses
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]

from ddp_pod.base.files import write_json
from ddp_pod.contract.failure_record import RankEnd
from ddp_pod.contract.group_facts import GroupFacts
from ddp_pod.contract.names import GROUP_WAIT_FILE, RUN_STEP_FILE, STALL_REPORT_FILE
from ddp_pod.contract.records import read_record, to_json
from ddp_pod.rank.groups import JOINING
from ddp_pod.torchrun.part import RoundExchange
from ddp_pod.torchrun.round_state import RoundState
from ddp_pod.torchrun.store import SignedStore
from ddp_pod.watchdog.group_waits import Joiner
from ddp_pod.watchdog.stall import (
    JobStall,
    RankActivity,
    RankStall,
    RankWait,
    StallReport,
    report_stall,
)
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
        self.states = [RoundState(launcher_pod(path, nodes=2, node=index), store, 2) for index, path in self._pods()]
        for path in self.folders:
            path.mkdir(exist_ok=True)

    def _pods(self) -> list[tuple[int, Path]]:
        return list(enumerate(self.folders))

    def report(self, index: int, report: StallReport) -> None:
        """Write the stall report of a pod's launcher."""
        write_json(str(self.folders[index] / STALL_REPORT_FILE), to_json(report))

    def withdraw(self, index: int) -> None:
        """Delete the stall report of a pod's launcher."""
        (self.folders[index] / STALL_REPORT_FILE).unlink()

    def write_step(self, step: Any) -> None:
        """Write the step of the run in pod 0."""
        write_json(str(self.folders[0] / RUN_STEP_FILE), {"step": step})

    def exchange(self, index: int, now: float) -> JobStall | None:
        """Return the stall of the job as one pod receives it."""
        stall = self.states[index].exchange(now).get("stall")
        return None if stall is None else read_record(JobStall, stall)


@pytest.fixture
def pods(tmp_path: Path) -> RoundPods:
    return RoundPods(tmp_path, round_store())


class TestStep:
    def test_peers_read_the_step_of_pod_0(self, pods: RoundPods) -> None:
        assert pods.exchange(0, 1.0) is None
        assert pods.states[1].read_step() is None, "nothing is known yet"
        pods.write_step(40.0)
        pods.exchange(0, 1.4)
        assert pods.states[1].read_step() is None, "the last exchange was just before"
        pods.exchange(0, 1.5)
        assert pods.states[1].read_step() == 40

    @pytest.mark.parametrize("step", ["text of a script", float("inf"), None])
    def test_invalid_step_is_ignored(self, pods: RoundPods, step: Any) -> None:
        pods.write_step(step)
        pods.exchange(0, 1.0)
        assert pods.states[1].read_step() is None

    def test_step_is_unknown_without_store(self, tmp_path: Path) -> None:
        pods = RoundPods(tmp_path, LOST)
        assert pods.exchange(0, 1.0) is None
        assert pods.states[1].read_step() is None


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


def never() -> bool:
    return False


def no_end() -> None:
    return None


class TestEndedPods:
    def test_pod_waits_until_all_have_ended(self, pods: RoundPods) -> None:
        first, second = pods.states
        assert first.count_ended_pods() == 0
        with ThreadPoolExecutor(1) as threads:
            waiting = threads.submit(first.wait_for_ended_pods, 60.0, never, no_end)
            assert second.wait_for_ended_pods(60.0, never, no_end)
            assert waiting.result(60.0)
        assert first.read_ended_pods() == {0, 1}
        assert first.count_ended_pods() == 2

    def test_pod_that_trains_on_ends_the_wait(self, pods: RoundPods) -> None:
        answers = iter([False, False, True])
        assert not pods.states[0].wait_for_ended_pods(60.0, lambda: next(answers), no_end)
        assert not pods.states[1].wait_for_ended_pods(60.0, lambda: True, no_end)
        assert pods.states[1].read_ended_pods() == {0}, "a pod that restarts at once has not ended"

    def test_unsigned_and_repeated_lines_end_no_pod(self, tmp_path: Path) -> None:
        store = HashStore()
        shared = SignedStore(store, "secret", "run/0")
        pods = RoundPods(tmp_path, shared)
        shared.append("ended", 1)
        for name in ("run/0/ended", "run/0/uploaded"):
            store.append(name, shared._fetch("ended") + "0\n2\n")
        SignedStore(store, "", "run/0").append("ended", 0)
        store.set("run/0/over", "true")
        assert pods.states[0].count_ended_pods() == 1
        assert not pods.states[1].wait_for_ended_pods(0.0, never, no_end)

    def test_patience_has_an_end(self, pods: RoundPods) -> None:
        assert not pods.states[0].wait_for_ended_pods(0.0, never, no_end)

    def test_pod_that_waits_for_its_peers_tells_them_how_its_rank_ended(
        self, pods: RoundPods, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("ddp_pod.torchrun.round_state._SECONDS_TO_DESCRIBE", 0.05)
        end = RankEnd(1, 25.0, pod=1, line="giving up")
        assert pods.states[0].find_first_end() is None, "no pod has ended"
        answers = iter([False] * 9 + [True] * 9)
        assert not pods.states[1].wait_for_ended_pods(60.0, lambda: next(answers), lambda: end)
        assert pods.states[0].find_first_end() == end

    def test_lost_store_ends_the_wait(self, tmp_path: Path) -> None:
        state = RoundPods(tmp_path, LOST).states[0]
        assert not state.wait_for_ended_pods(60.0, never, no_end)
        assert state.count_ended_pods() == 0


class OddExchange(RoundExchange):
    """A feature's part. ``answer``: what its hook ``share`` returns or raises; ``fault``: what ``collect`` raises."""

    def __init__(self, answer: Any, fault: Exception | None = None) -> None:
        self.answer = answer
        self.fault = fault
        self.calls = 0

    def collect(self, now: float) -> Any:
        self.calls += 1
        if self.fault is not None:
            raise self.fault
        return [now]

    def share(self, own: Any) -> Any:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


class TestExchanges:
    """What features share in a round."""

    def exchange(self, folder: Path, *exchanges: RoundExchange) -> Any:
        state = RoundState(launcher_pod(folder, nodes=2), round_store(), 2, exchanges)
        return [state.exchange(now).get("groups") for now in (1, 2)]

    def test_first_finding_is_published(self, tmp_path: Path) -> None:
        found = {"state": "Different"}
        assert self.exchange(tmp_path, OddExchange(None), OddExchange(found), OddExchange({})) == [found, found]

    def test_fault_ends_part_of_its_feature(self, tmp_path: Path) -> None:
        odd = OddExchange(ZeroDivisionError("a bug"))
        assert self.exchange(tmp_path, odd, OddExchange({"state": "Different"}))[1] == {"state": "Different"}
        assert odd.calls == 1

    def test_fault_before_sharing_leaves_the_same_exchange_to_the_others(self, tmp_path: Path) -> None:
        odd = OddExchange({"state": "Separate"}, fault=ZeroDivisionError("a bug"))
        found = {"state": "Different"}
        assert self.exchange(tmp_path, odd, OddExchange(found)) == [found, found]
        assert odd.calls == 1

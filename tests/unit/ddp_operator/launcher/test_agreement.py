"""What the pods of a job share in a rendezvous round."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]

from ddp_operator.launcher.files import write_json
from ddp_operator.launcher.pod import CheckpointStoreConfig
from ddp_operator.launcher.torchrun.agreement import (
    RunStep,
    SharedSnapshot,
    SharedStall,
    count_ended_pods,
    wait_for_ended_pods,
)
from ddp_operator.launcher.torchrun.store import SignedStore
from ddp_operator.launcher.watchdog.stall import JobStall, RankActivity, RankStall, RankWait, report_stall
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


def test_peers_learn_the_step_of_the_run_from_pod_0(tmp_path: Path) -> None:
    store = round_store()
    path = tmp_path / "step.json"
    first = RunStep(launcher_pod(tmp_path))
    second = RunStep(launcher_pod(tmp_path / "other"))
    first.post(store, 1.0)
    assert second.read(store) is None, "nothing is known yet"
    write_json(str(path), {"step": 40.0})
    first.post(store, 1.5)
    assert second.read(store) is None, "not so soon again"
    first.post(store, 2.0)
    assert second.read(store) == 40
    following = round_store()
    first.post(following, 4.0)
    assert second.read(following) == 40, "a new round starts with an empty store"
    assert second.read(LOST) is None


@pytest.mark.parametrize("step", ["what a script has written", float("inf"), None])
def test_invalid_step_is_ignored(tmp_path: Path, step: Any) -> None:
    store = round_store()
    store.write("ddp/step", step)
    assert RunStep(launcher_pod(tmp_path)).read(store) is None


@pytest.mark.parametrize("newest", ["000000001-000000007", ""])
def test_all_pods_start_a_round_from_the_snapshot_of_pod_0(tmp_path: Path, newest: str) -> None:
    store = round_store()
    requested = []
    job = {"nodes": 2, "checkpoint": CheckpointStoreConfig("s3://b/p", 3)}

    def synchronize(known: str | None) -> str:
        requested.append(known)
        return newest

    with ThreadPoolExecutor() as pool:
        shares = [
            pool.submit(SharedSnapshot(launcher_pod(tmp_path, node=node, **job), synchronize).share, store, 2)
            for node in (0, 1)
        ]
        for share in shares:
            share.result(timeout=60)
    assert requested == [None, None, newest], "pod 1 uploads before pod 0, and fetches after it"


def test_pod_0_does_not_wait_longer_for_uploads_than_for_pods(tmp_path: Path) -> None:
    job = {"nodes": 3, "checkpoint": CheckpointStoreConfig("s3://b/p", 3), "join_timeout_seconds": 0.2}
    store = round_store()
    SharedSnapshot(launcher_pod(tmp_path, node=0, **job), lambda known: "newest").share(store, 3)
    assert store.read("ddp/snapshot") == "newest"


def test_single_pod_and_job_without_a_store_share_no_snapshot(tmp_path: Path) -> None:
    def synchronize(known: str | None) -> str:
        raise AssertionError

    for job in ({"nodes": 2}, {"nodes": 1, "checkpoint": CheckpointStoreConfig("s3://b/p", 3)}):
        SharedSnapshot(launcher_pod(tmp_path, node=0, **job), synchronize).share(LOST, 2)


class TestSharedStall:
    def pods(self, folder: Path) -> list[tuple[Path, SharedStall]]:
        folders = [folder / "pod-0", folder / "pod-1"]
        for path in folders:
            path.mkdir()
        return [(path / "stall.json", SharedStall(launcher_pod(path, nodes=2))) for path in folders]

    def test_pods_share_the_root_cause_and_withdraw_it(self, tmp_path: Path) -> None:
        store = round_store()
        (own, first), (others, second) = self.pods(tmp_path)
        assert first.exchange(store, 2, 0) is None, "nothing to report"
        write_json(str(own), report_stall(SILENT, [WAITS]).encode())
        assert first.exchange(store, 2, 1) == JobStall(1, 1, 1, 2, None)
        assert first.exchange(store, 2, 1.1) is None, "not so soon again"
        write_json(str(others), report_stall(IDLE, [SLEEPS]).encode())
        second.exchange(store, 2, 1)
        assert first.exchange(store, 2, 2) == JobStall(1, 2, 2, 2, SLEEPS)
        others.unlink()
        second.exchange(store, 2, 2)
        assert first.exchange(store, 2, 3) == JobStall(1, 1, 1, 2, None)

    def test_pods_share_one_rank_for_each_collective(self, tmp_path: Path) -> None:
        store = round_store()
        (own, first), (others, second) = self.pods(tmp_path)
        reduces = RankWait(0, "all_reduce 7 of the default group")
        write_json(str(own), report_stall(SILENT, [WAITS], [reduces]).encode())
        write_json(str(others), report_stall(SILENT, [WAITS], [reduces._replace(rank=1)]).encode())
        first.exchange(store, 2, 1)
        shared = second.exchange(store, 2, 1)
        assert shared is not None
        assert shared.waits == (reduces,)
        broadcasts = RankWait(1, "broadcast 3 of group 1")
        write_json(str(others), report_stall(SILENT, [WAITS], [broadcasts]).encode())
        shared = second.exchange(store, 2, 2)
        assert shared is not None
        assert shared.waits == (reduces, broadcasts)
        own.unlink()
        shared = first.exchange(store, 2, 3)
        assert shared is not None
        assert shared.waits == (broadcasts,)

    def test_new_round_starts_with_an_empty_state(self, tmp_path: Path) -> None:
        (own, first), _ = self.pods(tmp_path)
        write_json(str(own), report_stall(SILENT, [WAITS]).encode())
        first.exchange(round_store(), 2, 1)
        job_stall = first.exchange(round_store(), 2, 2)
        assert job_stall is not None
        assert job_stall.known == 1

    def test_lost_store_reports_nothing(self, tmp_path: Path) -> None:
        (own, first), _ = self.pods(tmp_path)
        write_json(str(own), report_stall(SILENT, [WAITS]).encode())
        assert first.exchange(LOST, 2, 1) is None


class TestEndedPods:
    def test_pod_waits_until_all_have_ended(self) -> None:
        store = round_store()
        assert count_ended_pods(store) == 0
        with ThreadPoolExecutor(1) as threads:
            first = threads.submit(wait_for_ended_pods, store, 2, 60.0)
            assert wait_for_ended_pods(store, 2, 60.0)
            assert first.result(60.0)
        assert count_ended_pods(store) == 2

    def test_patience_has_an_end(self) -> None:
        assert not wait_for_ended_pods(round_store(), 2, 0.0)

    def test_lost_store_ends_the_wait(self) -> None:
        assert not wait_for_ended_pods(LOST, 2, 60.0)
        assert count_ended_pods(LOST) == 0

"""All pods of a round start with the same snapshot of checkpoint.url."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]

from ddp_pod.features.mirror.agent import SharedSnapshot
from ddp_pod.features.mirror.messages import SnapshotNeeded
from ddp_pod.torchrun.part import LocalRank
from ddp_pod.torchrun.store import SignedStore
from tests.support.launcher_config import launcher_pod


class Round:
    """A round of ``pods`` pods. ``requested``: by all that share the list; ``over``: whether a pod was lost."""

    number = 0
    ranks: Sequence[LocalRank] = ()

    def __init__(self, store: SignedStore, pods: int, requested: list[str | None], *, over: bool = False) -> None:
        self.store = store
        self.pods = pods
        self.requested = requested
        self.newest = "newest"
        self._over = over

    def is_over(self) -> bool:
        return self._over

    def report(self, event: object) -> None:
        raise AssertionError("nothing is reported")

    def request(self, request: Any) -> str:
        assert isinstance(request, SnapshotNeeded)
        self.requested.append(request.known)
        return self.newest


def round_store() -> SignedStore:
    return SignedStore(HashStore(), "secret", "run/0")


@pytest.mark.parametrize("newest", ["000000001-000000007", ""])
def test_all_pods_start_a_round_from_the_snapshot_of_pod_0(tmp_path: Path, newest: str) -> None:
    store = round_store()
    requested: list[str | None] = []
    with ThreadPoolExecutor() as pool:
        shares = []
        for node in range(2):
            current = Round(store, 2, requested)
            current.newest = newest
            pod = launcher_pod(tmp_path, nodes=2, node=node)
            shares.append(pool.submit(SharedSnapshot().prepare_round, pod, current))
        for share in shares:
            assert share.result(timeout=60)
    assert requested == [None, None, newest], "pod 1 uploads before pod 0, and fetches after it"


def test_pod_0_does_not_wait_longer_for_uploads_than_for_pods(tmp_path: Path) -> None:
    store = round_store()
    pod = launcher_pod(tmp_path, nodes=3, join_timeout_seconds=0.2)
    assert SharedSnapshot().prepare_round(pod, Round(store, 3, []))
    assert store.read("snapshot") == "newest"


@pytest.mark.parametrize("node", [0, 1])
def test_end_of_the_round_ends_the_wait_for_a_lost_pod(tmp_path: Path, node: int) -> None:
    store = round_store()
    requested: list[str | None] = []
    pod = launcher_pod(tmp_path, nodes=3, node=node, join_timeout_seconds=600.0)
    with ThreadPoolExecutor() as pool:
        share = pool.submit(SharedSnapshot().prepare_round, pod, Round(store, 3, requested, over=True))
        assert not share.result(timeout=60)
    assert requested == ([] if node == 0 else [None])
    assert store.read("snapshot") is None


def test_single_pod_asks_for_nothing(tmp_path: Path) -> None:
    requested: list[str | None] = []
    assert SharedSnapshot().prepare_round(launcher_pod(tmp_path), Round(round_store(), 1, requested))
    assert requested == []

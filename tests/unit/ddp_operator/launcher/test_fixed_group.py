"""How the pods of a job of a fixed size meet."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from ddp_operator.launcher.torchrun.fixed_group import FixedGroup, GroupClosed
from tests.support.launcher_config import launcher_pod

RUN = "torch.rendezvous.train"
SOON = 60.0


class Store(dict[str, bytes]):
    """As much of torch's store as a rendezvous needs, for threads."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method, one at a time."""
        with self.lock:
            return getattr(self, f"do_{method}")(*arguments)

    def do_set(self, key: str, value: str) -> None:
        self[key] = value.encode()

    def do_get(self, key: str) -> bytes:
        return self[key]

    def do_check(self, keys: list[str]) -> bool:
        return all(key in self for key in keys)

    def do_add(self, key: str, amount: int) -> int:
        self[key] = str(int(self.get(key, b"0")) + amount).encode()
        return int(self[key])

    def do_delete_key(self, key: str) -> bool:
        return self.pop(key, None) is not None


class Job:
    """Three pods, each of which joins in a thread of its own."""

    def __init__(self, folder: Path) -> None:
        self.store, self.folder, self.threads = Store(), folder, ThreadPoolExecutor(8)
        self.pods = [self.pod(index) for index in range(3)]
        self.now = 0.0

    def pod(self, index: int) -> FixedGroup:
        return FixedGroup(launcher_pod(self.folder, nodes=3, node=index), 0.001)

    def join(self, index: int, seconds: float = SOON) -> Future[tuple[int, list[str]]]:
        deadline = time.monotonic() + seconds
        return self.threads.submit(self.pods[index].meet, self.store.call, RUN, f"pod-{index}", deadline)

    def all_join(self, *indices: int) -> list[tuple[int, list[str]]]:
        return [joined.result(SOON) for joined in [self.join(index) for index in indices]]

    def wants(self, index: int, seconds: float = 1.0) -> bool:
        self.now += seconds
        return self.pods[index].is_another_round_wanted(self.store.call, RUN, self.now)


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


def until(probe: Callable[[], Any]) -> None:
    deadline = time.monotonic() + SOON
    while not probe():
        assert time.monotonic() < deadline
        time.sleep(0.001)


ALL = ["pod-0", "pod-1", "pod-2"]


def test_a_round_is_complete_when_the_last_pod_has_come(job: Job) -> None:
    early = [job.join(0), job.join(2)]
    until(lambda: {f"{RUN}/0/0", f"{RUN}/0/2"} <= set(job.store))
    assert not any(joined.done() for joined in early)
    assert job.all_join(1) == [(0, ALL)]
    assert [joined.result(SOON) for joined in early] == [(0, ALL)] * 2


def test_who_joins_again_asks_the_others_to(job: Job) -> None:
    job.all_join(2, 1, 0)
    assert not job.wants(0)
    first = job.join(1)
    until(lambda: job.wants(0))
    assert not job.wants(0, 0.0), "it has looked just now"
    assert job.wants(0)
    assert [*job.all_join(0, 2), first.result(SOON)] == [(1, ALL)] * 3
    assert not job.wants(0)


def test_a_pod_that_takes_anothers_place_joins_the_round_that_is_not_complete(job: Job) -> None:
    lost = job.join(1)
    until(lambda: f"{RUN}/0/1" in job.store)
    job.pods[1] = job.pod(1)
    assert job.all_join(0, 1, 2) == [(0, ALL)] * 3
    job.pods[0] = job.pod(0)
    del job.store[f"{RUN}/rounds"]  # pod 0 ended before it counted the round
    assert job.all_join(0, 1, 2) == [(1, ALL)] * 3
    assert lost.result(SOON) == (0, ALL)


def test_a_pod_that_gives_up_is_not_counted(job: Job) -> None:
    with pytest.raises(TimeoutError):
        job.join(1, seconds=-1).result(SOON)
    assert f"{RUN}/0/1" not in job.store
    waiting = job.join(0)
    job.pods[2].close(job.store.call, RUN)
    with pytest.raises(GroupClosed):
        waiting.result(SOON)

"""What the pods of a job tell each other through the rendezvous' store."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddp_operator.launcher.files import write_json
from ddp_operator.launcher.pod import CheckpointStoreConfig
from ddp_operator.launcher.torchrun.agreement import RestartCount, RunStep, SharedSnapshot
from tests.support.launcher_config import launcher_pod


class Store(dict[str, bytes]):
    """As much of torch's store as pods need to agree."""

    def set(self, key: str, value: str) -> None:
        self[key] = value.encode()

    def check(self, keys: list[str]) -> bool:
        return all(key in self for key in keys)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        if self.get(key, b"") == expected.encode():
            self[key] = desired.encode()
        return self.get(key) or expected.encode()


def test_pods_learn_from_pod_0_how_far_the_run_is(tmp_path: Path) -> None:
    store, path = Store(), tmp_path / "step.json"
    mine, theirs = RunStep(str(path)), RunStep("")
    mine.post(store, 1.0)
    assert theirs.read(store) is None, "nothing is known yet"
    write_json(str(path), {"step": 40.0})
    mine.post(store, 1.5)
    assert theirs.read(store) is None, "not so soon again"
    mine.post(store, 2.0)
    assert theirs.read(store) == 40
    mine.post(Store(), 2.5)
    other = Store()
    mine.post(other, 4.0)
    assert theirs.read(other) == 40, "a new round begins with an empty store"
    store.set("ddp/step", "what a script has written")
    assert (theirs.read(store), theirs.read(object())) == (None, None)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_pod_that_took_anothers_place_goes_on_from_what_the_others_have_counted(order: tuple[int, int]) -> None:
    store, counts = Store(), (RestartCount(5), RestartCount(0))
    for index in order:
        counts[index].start_round(store, 10.0)
    stayed, came = counts
    assert not came.learn(11.0), "the others may still start their workers"
    assert (came.learn(12.5), stayed.learn(12.5)) == (True, False)
    assert (came.count, stayed.count) == (5, 5)
    store.clear()
    assert not came.learn(), "once a round"


def test_a_pod_learns_the_count_before_its_next_restart_and_keeps_its_own_where_the_store_is_gone() -> None:
    store, came = Store(), RestartCount(1)
    came.start_round(store, 10.0)
    RestartCount(4).start_round(store, 10.1)
    assert (came.learn(), came.count) == (True, 4)
    came.start_round(None, 20.0)
    assert (came.learn(), came.count) == (False, 4)


@pytest.mark.parametrize("newest", ["000000001-000000007", ""])
def test_all_pods_begin_a_round_from_the_snapshot_of_pod_0(tmp_path: Path, newest: str) -> None:
    store, asked = Store(), []
    job = {"nodes": 2, "checkpoint": CheckpointStoreConfig("s3://b/p", 3)}

    def synchronize(known: str | None) -> str:
        asked.append(known)
        return newest

    for node in (0, 1):
        SharedSnapshot(launcher_pod(tmp_path, node=node, **job), synchronize).share(store)
    assert asked == [None, newest]


def test_a_pod_alone_and_a_job_without_a_store_agree_on_nothing(tmp_path: Path) -> None:
    def synchronize(known: str | None) -> str:
        raise AssertionError

    for job in ({"nodes": 2}, {"nodes": 1, "checkpoint": CheckpointStoreConfig("s3://b/p", 3)}):
        SharedSnapshot(launcher_pod(tmp_path, node=0, **job), synchronize).share(None)

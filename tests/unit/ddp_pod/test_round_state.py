"""The state that the pods of a job share in a rendezvous round."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]

from ddp_pod.base.files import write_json
from ddp_pod.base.runtime_files import RUN_STEP_FILE
from ddp_pod.contract.failure_record import RankEnd
from ddp_pod.failures.collective_places import RankPlace
from ddp_pod.torchrun import round_state
from ddp_pod.torchrun.part import RoundExchange
from ddp_pod.torchrun.round_state import RoundState
from ddp_pod.torchrun.store import SignedStore
from tests.support.launcher_config import launcher_pod


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

    def write_step(self, step: Any) -> None:
        """Write the step of the run in pod 0."""
        write_json(str(self.folders[0] / RUN_STEP_FILE), {"step": step})

    def exchange(self, index: int, now: float) -> Any:
        """Return the state of the job as one pod receives it."""
        return self.states[index].exchange(now)


@pytest.fixture
def pods(tmp_path: Path) -> RoundPods:
    return RoundPods(tmp_path, round_store())


class TestStep:
    def test_peers_read_the_step_of_pod_0(self, pods: RoundPods) -> None:
        assert pods.exchange(0, 1.0)["groups"] is None
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
        assert pods.exchange(0, 1.0) == {}
        assert pods.states[1].read_step() is None


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
    """A feature's part. ``answer``: what its hook ``share`` returns or raises; ``fault``: what ``collect`` raises.

    ``own``: what it has to share.
    """

    name = "odd"

    def __init__(self, answer: Any, fault: Exception | None = None, summary: Any = None, own: Any = "its part") -> None:
        self.answer = answer
        self.fault = fault
        self.summary = summary
        self.own = own
        self.calls = 0

    def collect(self, now: float) -> Any:
        self.calls += 1
        if self.fault is not None:
            raise self.fault
        return self.own

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

    @pytest.mark.parametrize(("answer", "summary"), [({1, 2}, None), (None, {1, 2})])
    def test_part_that_the_store_cannot_keep_leaves_the_exchange_to_the_others(
        self, tmp_path: Path, answer: Any, summary: Any
    ) -> None:
        odd = OddExchange(answer, summary=summary)
        found = {"state": "Different"}
        assert self.exchange(tmp_path, odd, OddExchange(found)) == [found, found]
        assert odd.calls == 1

    def test_pods_that_take_part_learn_the_summary_of_pod_0(self, tmp_path: Path) -> None:
        store = round_store()

        def join(index: int, summary: Any, own: Any) -> RoundState:
            part = OddExchange(None, summary=summary, own=own)
            return RoundState(launcher_pod(tmp_path, nodes=2, node=index), store, 2, [part])

        assert join(0, {"pods": 2}, "").exchange(1)["features"] == {"odd": {"pods": 2}}
        assert join(1, "its own", "its part").exchange(1)["features"] == {"odd": {"pods": 2}}
        assert join(1, None, "").exchange(1) == {}, "it does not query the store"
        assert join(0, None, "").exchange(2)["features"] == {}


class TestPlaces:
    TRACEBACK = """\
Traceback (most recent call last):
  File "/app/train.py", line 46, in main
    dist.barrier()
  File "/venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", line 5000, in barrier
RuntimeError: [/gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:1: Connection reset by peer
"""

    def fail(self, folder: Path, message: str) -> None:
        """Write the error file of a rank."""
        (folder / "errors").mkdir()
        error = {"type": "RuntimeError", "message": message, "traceback": self.TRACEBACK}
        numbers = {"exitCode": 1, "rank": 1, "localRank": 0}
        write_json(str(folder / "errors" / "0.json"), {**error, **numbers})

    def test_lost_rank_is_known_to_the_pod_of_its_peer(self, pods: RoundPods) -> None:
        self.fail(pods.folders[1], self.TRACEBACK.splitlines()[-1].partition(": ")[2])
        pods.states[1].share_lost_places()
        assert len(pods.states[1].store.read_log("places")) == 1
        assert pods.states[0].await_lost_places(lambda: True) == [RankPlace(1, 1, "main (train.py:46) in barrier")]

    def test_own_failure_of_a_rank_is_no_lost_peer(self, pods: RoundPods, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(round_state, "_SECONDS_FOR_PLACES", 0.0)
        self.fail(pods.folders[1], "shape '[3, 5]' is invalid for input of size 16")
        pods.states[1].share_lost_places()
        assert pods.states[1].store.read_log("places") == []
        assert pods.states[0].await_lost_places(lambda: True) == []

    def test_restart_does_not_wait_for_places_that_explain_nothing(
        self, pods: RoundPods, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(round_state, "_SECONDS_FOR_OUTPUT", 0.0)
        monkeypatch.setattr(round_state, "_SECONDS_FOR_PLACES", 3600.0)
        assert pods.states[0].await_lost_places(lambda: False) == []

    def test_places_are_unknown_without_store(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(round_state, "_SECONDS_FOR_PLACES", 0.0)
        pods = RoundPods(tmp_path, LOST)
        self.fail(pods.folders[1], "Connection reset by peer")
        assert pods.states[0].await_lost_places(lambda: True) == []

"""How the pods of a job join rendezvous rounds, over a real store."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic.rendezvous import api

from ddp_pod.torchrun import rendezvous
from ddp_pod.torchrun.rendezvous import STATIC, PodRendezvous, PodReplacedError, TrainingOver, Unfinished
from ddp_pod.torchrun.store import host_store
from tests.support.launcher_config import launcher_pod

SOON = 60.0
RUN = "run-1"


class Job:
    """The pods of a job. Each joins in a separate thread."""

    def __init__(self, folder: Path, nodes: int, **options: Any) -> None:
        self.store = host_store("127.0.0.1", 0)
        self.folder = folder
        self.options = {"nodes": nodes, "port": self.store.port, "secret": "secret", "run_id": RUN, **options}
        elastic = options.get("elastic", False)
        if elastic:
            self.options |= {"min_nodes": 1, "max_nodes": 4}
        self.threads = ThreadPoolExecutor(16)
        pods = 4 if elastic else nodes + options.get("spares", 0)
        self.started: list[PodRendezvous] = []
        self.pods = [self.start(index) for index in range(pods)]

    def start(self, index: int, **options: Any) -> PodRendezvous:
        """Start the agent of a pod, or one that takes its place."""
        pod = launcher_pod(self.folder, node=index, **{**self.options, **options})
        self.started.append(PodRendezvous(pod))
        return self.started[-1]

    def close(self) -> None:
        """Stop all threads that call a store whose server has ended."""
        for pod in self.started:
            pod.shutdown()
            pod._has_left.set()
        self.threads.shutdown()

    def join(self, *indices: int) -> list[Future[Any]]:
        return [self.threads.submit(self.pods[index].next_rendezvous) for index in indices]

    def meet(self, *indices: int) -> list[tuple[int, int]]:
        """Return rank and number of pods for each of these pods."""
        return [read(joined) for joined in self.join(*indices)]

    def waits(self, index: int) -> bool:
        self.pods[index]._read_at = 0.0
        return bool(self.pods[index].num_nodes_waiting())

    def is_registered(self, index: int, number: int) -> bool:
        entries = self.pods[0]._shared.read_log(f"{number}/pods")
        return any(entry[0] == index for entry in entries)


def read(joined: Future[Any]) -> tuple[int, int]:
    info = joined.result(SOON)
    return info.rank, info.world_size


def until(probe: Callable[[], Any]) -> None:
    deadline = time.monotonic() + SOON
    while not probe():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.fixture(autouse=True)
def beats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "_SHORTEST_BEAT", 0.05)
    monkeypatch.setattr(rendezvous, "_MISSED_BEATS", 12)


@pytest.fixture
def fixed(tmp_path: Path) -> Iterator[Job]:
    job = Job(tmp_path, 3)
    yield job
    job.close()


def test_round_is_complete_when_the_last_pod_has_joined(fixed: Job) -> None:
    early = fixed.join(2, 0)
    until(lambda: fixed.is_registered(2, 0) and fixed.is_registered(0, 0))
    assert not any(joined.done() for joined in early)
    assert fixed.meet(1) == [(1, 3)]
    assert [read(joined) for joined in early] == [(2, 3), (0, 3)]
    assert [pod.current.number for pod in fixed.pods] == [0, 0, 0]


def test_members_get_the_address_of_rank_0_and_a_store_of_the_round(fixed: Job) -> None:
    infos = [joined.result(SOON) for joined in fixed.join(0, 1, 2)]
    addresses = {(info.bootstrap_store_info.master_addr, info.bootstrap_store_info.master_port) for info in infos}
    ((address, port),) = addresses
    assert (address, port > 0) == ("127.0.0.1", True)
    infos[0].store.set("key", "of the first round")
    assert infos[1].store.get("key") == b"of the first round"
    following = [joined.result(SOON) for joined in fixed.join(0, 1, 2)]
    assert following[0].store.add("key", 1) == 1


def test_pod_that_joins_again_makes_the_others_join(fixed: Job) -> None:
    fixed.meet(0, 1, 2)
    assert not fixed.waits(0)
    (first,) = fixed.join(1)
    until(lambda: fixed.waits(0) and fixed.waits(2))
    assert fixed.pods[0].num_nodes_waiting() == 0, "it reads the store once in a pause"
    assert [*fixed.meet(0, 2), read(first)] == [(0, 3), (2, 3), (1, 3)]
    assert not fixed.waits(0)


@pytest.mark.parametrize("knows", [True, False])
def test_pods_learn_whether_the_cause_of_a_restart_is_known(fixed: Job, knows: bool) -> None:
    fixed.meet(0, 1, 2)
    assert [pod.current.explained for pod in fixed.pods] == [True] * 3, "the first round"
    for pod in fixed.pods:
        pod.knows_cause = False
        pod.restarts = 1
    fixed.pods[1].knows_cause = knows
    (failed,) = fixed.join(1)
    until(lambda: fixed.waits(0))
    assert fixed.pods[0].is_cause_known is knows
    fixed.meet(0, 2)
    failed.result(SOON)
    assert [pod.current.explained for pod in fixed.pods] == [knows] * 3
    assert not fixed.waits(0)
    assert not fixed.pods[0].is_cause_known


def ended(*pods: int) -> Callable[[], set[int]]:
    return lambda: set(pods)


def test_stop_of_member_is_known_to_its_peers_in_the_same_round(fixed: Job) -> None:
    fixed.pods[1].announce_stop()  # before the first round, which its ranks have not joined
    fixed.meet(0, 1, 2)
    assert [pod.find_interruption(ended()) for pod in fixed.pods] == ["", "", ""]
    fixed.pods[1].announce_stop()  # the store does not acknowledge it
    until(lambda: fixed.pods[0].find_interruption(ended()) == "pod 1 was asked to stop")
    assert fixed.pods[0].find_unfinished(ended(0)) == Unfinished(1, "pod 1 was asked to stop", explained=True)
    assert fixed.pods[1].find_interruption(ended()) == "", "its own stop is none of a peer"
    assert fixed.pods[0].find_interruption(ended(1)) == "", "its ranks had ended before"
    assert fixed.pods[0].find_unfinished(ended(0, 1)) is None
    fixed.pods[2].announce_stop()
    until(lambda: fixed.pods[0].find_interruption(ended()) == "pod 1 and 1 more were asked to stop")
    assert not fixed.waits(0), "the others train until the pod has left"
    for pod in fixed.pods:
        pod.restarts = 1
    fixed.meet(0, 1, 2)
    assert [pod.find_interruption(ended()) for pod in fixed.pods] == ["", "", ""]


@pytest.mark.parametrize("is_new", [True, False])
def test_pod_that_joins_interrupts_and_one_that_restarts_its_ranks_does_not(fixed: Job, is_new: bool) -> None:
    fixed.meet(0, 1, 2)
    if is_new:
        fixed.pods[1] = fixed.start(1)
    fixed.pods[1].knows_cause = False
    (joined,) = fixed.join(1)
    until(lambda: fixed.waits(0))
    assert fixed.pods[0].find_interruption(ended()) == ("pods join or leave the job" if is_new else "")
    unfinished = Unfinished(1, "pod 1 restarts its ranks", explained=is_new)
    assert fixed.pods[0].find_unfinished(ended(0, 2)) == unfinished
    assert fixed.pods[0].find_unfinished(ended(0, 1, 2)) is None
    fixed.meet(0, 2)
    joined.result(SOON)


def test_pod_that_joins_late_does_not_restart_ranks_that_have_ended(tmp_path: Path) -> None:
    job = Job(tmp_path, 2, elastic=True)
    job.meet(0, 1)
    (late,) = job.join(2)
    until(lambda: job.waits(0))
    assert job.pods[0].find_interruption(ended()) == "pods join or leave the job"
    assert job.pods[0].find_unfinished(ended(0)) is None
    job.meet(0, 1)
    late.result(SOON)
    job.close()


def test_pod_that_took_anothers_place_explains_a_restart(fixed: Job) -> None:
    fixed.meet(0, 1, 2)
    for pod in fixed.pods:
        pod.knows_cause = False
        pod.restarts = 1
    fixed.pods[1] = fixed.start(1)
    fixed.pods[1].knows_cause = False
    fixed.meet(0, 1, 2)
    assert fixed.pods[0].current.explained


def test_agent_that_takes_anothers_place_joins_the_open_round(fixed: Job) -> None:
    (lost,) = fixed.join(1)
    until(lambda: fixed.is_registered(1, 0))
    fixed.pods[1] = fixed.start(1)
    assert fixed.meet(0, 1, 2) == [(0, 3), (1, 3), (2, 3)]
    assert read(lost) == (1, 3)


def test_new_agent_of_pod_0_leads_the_round_after_the_published_ones(fixed: Job) -> None:
    fixed.meet(0, 1, 2)
    fixed.meet(0, 1, 2)
    fixed.pods[0] = fixed.start(0)
    assert fixed.meet(0, 1, 2) == [(0, 3), (1, 3), (2, 3)]
    assert [pod.current.number for pod in fixed.pods] == [2, 2, 2]


def test_pod_that_took_anothers_place_learns_the_restarts_of_its_peers(fixed: Job) -> None:
    fixed.meet(0, 1, 2)
    for pod in fixed.pods:
        pod.restarts = 5
    fixed.pods[1] = fixed.start(1)
    fixed.meet(0, 1, 2)
    assert [pod.current.restarts for pod in fixed.pods] == [5, 5, 5]


@pytest.fixture
def replaced(tmp_path: Path) -> Iterator[Job]:
    """Return a job whose pod 1 was lost without a word, and has a successor that has not joined yet."""
    job = Job(tmp_path, 3)
    for index in range(3):
        job.pods[index] = job.start(index, identity=f"first-{index}")
    job.meet(0, 1, 2)
    yield job
    job.close()


def test_pod_that_returns_after_its_replacement_joins_no_round_and_ends(replaced: Job) -> None:
    lost = replaced.pods[1]
    replaced.pods[1] = replaced.start(1, identity="second")
    assert replaced.meet(0, 1, 2) == [(0, 3), (1, 3), (2, 3)]
    with pytest.raises(PodReplacedError):
        replaced.threads.submit(lost.next_rendezvous).result(SOON)
    again = replaced.start(1, identity="first-1")  # the next agent of that pod
    with pytest.raises(PodReplacedError):
        replaced.threads.submit(again.next_rendezvous).result(SOON)
    assert not replaced.waits(0), "the peers train on"
    assert replaced.meet(0, 1, 2) == [(0, 3), (1, 3), (2, 3)]


@pytest.mark.parametrize("returns_first", [True, False])
def test_successor_takes_the_seat_if_the_lost_pod_joins_the_same_round(replaced: Job, returns_first: bool) -> None:
    lost = replaced.pods[1]
    successor = replaced.start(1, identity="second")
    order = [lost, successor] if returns_first else [successor, lost]
    joins = []
    for number, pod in enumerate(order, start=1):
        joins.append(replaced.threads.submit(pod.next_rendezvous))
        until(lambda: len(replaced.pods[0]._shared.read_log("1/pods")) == number)  # noqa: B023
    replaced.meet(0, 2)
    assert read(joins[order.index(successor)]) == (1, 3)
    with pytest.raises(PodReplacedError):
        joins[order.index(lost)].result(SOON)


def test_lost_member_is_told_from_one_that_stops_and_one_that_restarts(replaced: Job) -> None:
    (restarted,) = replaced.join(1)
    until(lambda: replaced.is_registered(1, 1))
    assert not replaced.pods[0].has_lost_member()
    successor = replaced.start(1, identity="second")
    joined = replaced.threads.submit(successor.next_rendezvous)
    until(lambda: len(replaced.pods[0]._shared.read_log("1/pods")) == 2)
    assert replaced.pods[0].has_lost_member()
    replaced.pods[1].current = replaced.pods[0].current
    replaced.pods[1].announce_stop()
    assert not replaced.pods[0].has_lost_member()
    replaced.meet(0, 2)
    joined.result(SOON)
    with pytest.raises(PodReplacedError):
        restarted.result(SOON)


def test_static_rendezvous_uses_the_store_of_the_pods(fixed: Job) -> None:
    for index in range(3):
        fixed.pods[index] = fixed.start(index, rendezvous_backend=STATIC)
    infos = [joined.result(SOON) for joined in fixed.join(0, 1, 2)]
    assert [(info.rank, info.bootstrap_store_info.master_port) for info in infos] == [
        (rank, fixed.store.port) for rank in range(3)
    ]
    assert all((pod.use_agent_store, pod.get_backend()) == (True, STATIC) for pod in fixed.pods)


def test_pod_that_leaves_incomplete_round_is_no_member(fixed: Job) -> None:
    fixed.pods[1] = fixed.start(1, join_timeout_seconds=-1)
    with pytest.raises(api.RendezvousTimeoutError):
        fixed.join(1)[0].result(SOON)
    fixed.pods[1].leave()
    waiting = fixed.join(0, 2)
    fixed.pods[1] = fixed.start(1)
    assert fixed.meet(1) == [(1, 3)]
    assert [read(joined) for joined in waiting] == [(0, 3), (2, 3)]


def test_ended_run_has_no_further_round(fixed: Job) -> None:
    (waiting,) = fixed.join(0)
    assert fixed.pods[2].shutdown()
    with pytest.raises(api.RendezvousClosedError):
        waiting.result(SOON)


def test_lost_store_is_reported_after_the_ranks_had_time_to_end(fixed: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(key: str) -> None:
        raise RuntimeError("connection reset")

    pod = fixed.pods[1]
    now = [1000.0]
    with monkeypatch.context() as patched:
        patched.setattr(rendezvous.time, "monotonic", lambda: now[0])
        patched.setattr(pod._shared, "read", fail)
        for _ in range(6):
            assert pod.num_nodes_waiting() == 0
            now[0] += 1.0
        with pytest.raises(api.RendezvousConnectionError, match="connection reset"):
            pod.num_nodes_waiting()


def test_single_pod_needs_no_store(tmp_path: Path) -> None:
    pod = PodRendezvous(launcher_pod(tmp_path, nodes=1, run_id=RUN))
    infos = [pod.next_rendezvous() for _ in range(2)]
    assert [(info.rank, info.world_size) for info in infos] == [(0, 1), (0, 1)]
    assert pod.current.number == 1
    infos[0].store.set("key", "value")
    assert infos[1].store.add("key", 1) == 1
    assert not pod.num_nodes_waiting()


class TestElastic:
    @pytest.fixture
    def job(self, tmp_path: Path) -> Iterator[Job]:
        job = Job(tmp_path, 2, elastic=True)
        yield job
        job.close()

    def test_pod_that_joins_makes_the_group_grow(self, job: Job) -> None:
        assert job.meet(0, 1) == [(0, 2), (1, 2)]
        (newcomer,) = job.join(3)
        until(lambda: job.waits(0) and job.waits(1))
        assert [*job.meet(0, 1), read(newcomer)] == [(0, 3), (1, 3), (2, 3)]

    def test_pod_that_leaves_is_not_waited_for(self, job: Job) -> None:
        job.meet(0, 1)
        job.pods[1].leave()
        until(lambda: job.waits(0))
        assert job.meet(0) == [(0, 1)]

    def test_living_member_is_waited_for_and_a_dead_one_is_not(self, job: Job) -> None:
        job.meet(0, 1)
        (waiting,) = job.join(0)
        time.sleep(1.0)  # long enough to give up a dead pod
        assert not waiting.done()
        job.pods[1]._has_left.set()
        assert read(waiting) == (0, 1)


class TestSpares:
    @pytest.fixture
    def job(self, tmp_path: Path) -> Iterator[Job]:
        job = Job(tmp_path, 2, spares=1)
        yield job
        job.close()

    def test_spare_waits_without_a_restart_and_takes_the_seat_of_a_pod_that_left(self, job: Job) -> None:
        (spare,) = job.join(2)
        assert job.meet(0, 1) == [(0, 2), (1, 2)]
        until(lambda: job.is_registered(2, 1))
        assert not job.waits(0)
        job.pods[1].leave()
        until(lambda: job.waits(0))
        assert job.meet(0) == [(0, 2)]
        assert read(spare) == (1, 2)

    def test_spare_takes_the_seat_of_a_dead_pod_and_makes_the_others_restart(self, job: Job) -> None:
        (spare,) = job.join(2)
        job.meet(0, 1)
        until(lambda: job.is_registered(2, 1))
        job.pods[1]._has_left.set()
        until(lambda: job.waits(0))
        assert job.meet(0) == [(0, 2)]
        assert read(spare) == (1, 2)

    def test_successor_of_a_lost_pod_becomes_the_spare(self, job: Job) -> None:
        (spare,) = job.join(2)
        job.meet(0, 1)
        job.pods[1].leave()
        job.meet(0)
        spare.result(SOON)
        job.pods[1] = job.start(1)
        (successor,) = job.join(1)
        until(lambda: job.is_registered(1, 2))
        assert not job.waits(0)
        job.pods[2].shutdown()
        with pytest.raises(TrainingOver):
            successor.result(SOON)

    def test_spare_has_no_time_limit_while_the_others_train(self, job: Job) -> None:
        job.pods[2] = job.start(2, join_timeout_seconds=0.3)
        (spare,) = job.join(2)
        job.meet(0, 1)
        until(lambda: job.is_registered(2, 1))
        time.sleep(0.6)
        assert not spare.done()
        job.pods[0].request_restart(knows_cause=True)
        with pytest.raises(api.RendezvousTimeoutError):
            spare.result(SOON)


class TestAttack:
    """A client that reaches the store's port without the attempt's secret."""

    @pytest.mark.parametrize("secret", ["", "another one"])
    def test_pod_without_the_secret_is_no_member(self, fixed: Job, secret: str) -> None:
        stranger = fixed.start(1, secret=secret)
        joined = fixed.threads.submit(stranger.next_rendezvous)
        waiting = fixed.join(0, 2)
        until(lambda: f"{RUN}/0/pods" and fixed.is_registered(2, 0))
        time.sleep(0.2)
        assert not any(future.done() for future in (joined, *waiting))
        fixed.meet(1)
        assert [read(future) for future in waiting] == [(0, 3), (2, 3)]
        assert not joined.done()
        stranger.set_closed()
        with pytest.raises(api.RendezvousClosedError):
            joined.result(SOON)
        assert not fixed.pods[0].is_closed()

"""How pod 0 of `ddp dev` concludes runs and holds the pods, with runs and peers that the test moves."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from ddp_pod.contract.failure_record import Failure
from ddp_pod.contract.plan import DevConfig
from ddp_pod.contract.pod_end import PodEnd
from ddp_pod.contract.report import PodReport
from ddp_pod.features.dev import holder
from ddp_pod.features.dev.contract import Order
from ddp_pod.features.dev.holder import Leader
from ddp_pod.features.dev.peers import PeerState
from ddp_pod.features.dev.processes import RunEnd
from ddp_pod.features.dev.runs import RunPlan
from ddp_pod.progress.metrics import MetricsEndpoint
from ddp_pod.progress.rank_progress import RankReader
from tests.support.launcher_config import launcher_pod

SUCCESS = RunEnd(0, PodEnd())
STOPPED = RunEnd(85, PodEnd())
FIRST = RunPlan(1, ("train.py",))
FAILURE = Failure("OOM", rank=1, message="CUDA out of memory")
SOON = 60.0


async def until(condition: Callable[[], object]) -> None:
    """Let other tasks run until a condition holds."""
    deadline = time.monotonic() + SOON
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.001)


class Runs:
    """The runs of pod 0, which the test ends."""

    def __init__(self, on_end: Callable[[RunEnd], None]) -> None:
        self.plan = FIRST
        self.end: RunEnd | None = None
        self.is_running = True
        self.started = self.ended = None
        self.port: int | None = None
        self._on_end = on_end

    def has_code(self, digest: str) -> bool:
        """Return whether the pod has the code: it is part of the image."""
        return not digest

    def adopt(self, plan: RunPlan) -> None:
        """Take a run that has ended elsewhere."""
        self.plan = plan

    async def start(self, plan: RunPlan) -> None:
        """Start a run."""
        await asyncio.sleep(0)  # other tasks run before the run has started
        self.plan = plan
        self.end = None
        self.is_running = True

    async def stop(self) -> None:
        """End the present run, if there is one."""
        if self.is_running:
            self.finish(STOPPED)

    def finish(self, end: RunEnd = SUCCESS) -> None:
        """End the present run."""
        self.end = end
        self.is_running = False
        self._on_end(end)


class Peer:
    """Another pod, connected or lost."""

    def __init__(self, on_start: Callable[[], Awaitable[None]], index: int = 1) -> None:
        self.index = index
        self.seen = asyncio.Event()
        self.seen.set()
        self.state: PeerState | None = PeerState(FIRST, running=True)
        self._on_start = on_start

    async def start(self, plan: RunPlan, *, hold: bool = False) -> None:
        """Start a run, after what happens meanwhile."""
        await self._on_start()
        self.state = PeerState(plan, running=not hold)

    async def note_as_spare(self, plan: RunPlan) -> None:
        """Note a run."""
        self.state = PeerState(plan, running=False, end=SUCCESS, spare=True)

    async def request(self, kind: str) -> None:
        """End the present run."""
        assert self.state is not None
        self.state = PeerState(self.state.plan, running=False, end=STOPPED)


class Stream:
    """An order's connection that records the events."""

    def __init__(self) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.over = asyncio.Event()

    def send(self, kind: str, **values: Any) -> None:
        """Record an event."""
        self.events.append((kind, values))


class Job:
    """Pod 0 under test and one peer."""

    def __init__(self, folder: Path, hold_seconds: float = 600.0, spares: int = 0) -> None:
        pod = launcher_pod(folder, nodes=2, spares=spares, dev=DevConfig(hold_seconds))
        self.leader = Leader(pod, ["train.py"])
        self.runs = Runs(self.leader.on_end)
        self.during_start: Callable[[], Awaitable[None]] = self._do_nothing
        self.peer = Peer(lambda: self.during_start())
        self.leader.runs = self.runs  # type: ignore[assignment]
        self.spares = [Peer(self._do_nothing, 2 + number) for number in range(spares)]
        self.leader._peers = [self.peer, *self.spares]  # type: ignore[list-item]
        self.leader._begun.set()
        self.over: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.leader._over = self.over
        self.orders: list[asyncio.Task[None]] = []

    async def _do_nothing(self) -> None:
        pass

    def send(self, kind: str) -> Stream:
        """Send an order to pod 0."""
        stream = Stream()
        carried_out = self.leader._carry_out(Order(kind), stream)  # type: ignore[arg-type]
        self.orders.append(asyncio.create_task(carried_out))
        return stream

    async def run_again(self) -> None:
        """Replace the present run."""
        run = self.runs.plan.run
        self.send("run")
        await until(lambda: self.runs.plan.run > run and not self.leader._is_busy)

    def finish_peer(self) -> None:
        """End the present run in the other pod, which does not report it yet."""
        assert self.peer.state is not None
        self.peer.state = PeerState(self.peer.state.plan, running=False, end=SUCCESS)

    async def report_peer(self) -> None:
        """Let the other pod report its state."""
        await self.leader._on_peer(self.peer)  # type: ignore[arg-type]

    def list_running_spares(self) -> list[int]:
        """Return the spares in which the present run has started."""
        return [peer.index for peer in self.spares if peer.state is not None and peer.state.running]

    def list_timers(self) -> list[asyncio.Task[Any]]:
        """Return the timers that will release the pods."""
        return [task for task in asyncio.all_tasks() if "_release_later" in repr(task) and not task.cancelling()]


async def test_new_run_leaves_no_timer_of_a_former_one(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.peer.state = None
    job.runs.finish()
    refused = job.send("run")  # as the other pod cannot be reached; the pods are held from then on
    await until(lambda: job.list_timers())
    assert [kind for kind, _ in refused.events] == ["refused"]
    job.peer.state = PeerState(FIRST, running=False, end=SUCCESS)
    await job.report_peer()
    assert len(job.list_timers()) == 1
    await job.run_again()
    assert job.list_timers() == []


async def test_taken_over_run_of_a_peer_stops_the_timer(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.finish_peer()
    job.runs.finish()
    assert len(job.list_timers()) == 1
    job.peer.state = PeerState(RunPlan(5, ("train.py",)), running=True)
    await job.report_peer()
    assert job.runs.plan.run == 5
    assert job.list_timers() == []
    description = job.leader.describe()
    assert description is not None
    assert description.result == "", "it has not ended"


async def test_late_conclusion_does_not_end_the_next_run_without_its_lost_peer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(holder, "_SECONDS_FOR_ENDS", 0.0)
    job = Job(tmp_path)
    job.finish_peer()
    job.runs.finish()
    monkeypatch.setattr(holder, "_SECONDS_FOR_ENDS", 3600.0)
    job.runs.plan = RunPlan(2, ("train.py",))
    job.leader._result = ""
    job.peer.state = None  # it is lost, and may report a failure when it is back
    job.runs.finish()
    await asyncio.sleep(0.05)
    assert job.leader._result == ""


async def test_late_report_of_a_peer_does_not_end_the_next_run(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.during_start = job.report_peer  # its end of run 1, while run 2 starts
    await job.run_again()
    assert (job.runs.plan.run, job.leader._result) == (2, "")
    job.finish_peer()
    job.runs.finish()
    assert job.leader._result == "Succeeded"
    assert len(job.list_timers()) == 1, "the pods are held"


async def test_follower_of_a_replaced_run_learns_why_it_ended(tmp_path: Path) -> None:
    job = Job(tmp_path)
    follower = job.send("follow")
    await asyncio.sleep(0)
    await job.run_again()
    ((kind, values),) = follower.events
    assert (kind, values["run"], values["result"]) == ("ended", 1, "Stopped")
    assert "replaced" in values["message"]


async def test_reports_on_former_runs_are_listed_with_their_results(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.leader._failure = FAILURE
    job.leader._result = "Failed"
    await job.run_again()
    await job.run_again()
    listed = job.send("list")
    await until(lambda: bool(listed.events) and listed.events[-1][0] == "listed")
    reports = [values["report"].dev for kind, values in listed.events if kind == "former"]
    assert [(report.run, report.result, report.failure) for report in reports] == [
        (1, "Failed", FAILURE),
        (2, "Stopped", None),
    ]
    for _ in range(20):
        await job.run_again()
    assert len(job.leader._former) == 10


async def test_order_at_the_last_moment_keeps_the_pods_until_it_is_done(tmp_path: Path) -> None:
    job = Job(tmp_path, hold_seconds=0.01)
    job.finish_peer()
    job.leader._is_busy = True
    job.runs.finish()
    job.leader._hold()
    await asyncio.sleep(0.2)
    assert not job.over.done()
    job.leader._is_busy = False
    assert await asyncio.wait_for(job.over, SOON) == 0


async def test_order_is_refused_while_the_pods_are_released(tmp_path: Path) -> None:
    job = Job(tmp_path, hold_seconds=0.01)
    refusals: list[Stream] = []

    async def release(kind: str) -> None:
        refusals.append(job.send("run"))
        await asyncio.sleep(0.05)

    job.finish_peer()
    job.peer.request = release  # type: ignore[method-assign]
    job.runs.finish()
    await asyncio.wait_for(job.over, SOON)
    assert [kind for kind, _ in refusals[0].events] == ["refused"]


async def test_held_pod_serves_pages_of_its_run_and_no_witness_of_lost_nodes(tmp_path: Path) -> None:
    job = Job(tmp_path)
    endpoint = MetricsEndpoint(RankReader(""), lambda ranks: PodReport(), lambda path, query: b"of the run")
    job.runs.port = await asyncio.to_thread(endpoint.serve, 0, "127.0.0.1")
    assert await asyncio.to_thread(job.leader.read_page, "/points", "") == b"of the run"
    for query in ("wait=8", "wait=0", "silent=1"):  # the operator would ask again and again for an answer without wait
        assert job.leader.read_page("/peers", query) is None
    job.runs.port = None
    assert job.leader.read_page("/points", "") is None


async def test_spares_take_part_one_after_the_other(tmp_path: Path) -> None:
    job = Job(tmp_path, spares=3)
    await job.run_again()
    assert job.list_running_spares() == [2]
    for lost, called in ((job.peer, [2, 3]), (job.spares[0], [3, 4])):
        lost.state = None
        await job.leader._on_peer(lost)  # type: ignore[arg-type]
        await job.leader._on_peer(lost)  # type: ignore[arg-type]  # as several tasks may notice it
        assert job.list_running_spares() == called


async def test_spares_that_are_called_at_once_start_once_each(tmp_path: Path) -> None:
    job = Job(tmp_path, spares=4)
    await job.run_again()
    started: list[int] = []

    def record(spare: Peer) -> Callable[[], Awaitable[None]]:
        async def start() -> None:
            started.append(spare.index)
            await asyncio.sleep(0.01)

        return start

    for spare in job.spares:
        spare._on_start = record(spare)
    job.peer.state = job.spares[0].state = None
    lost: list[Any] = [job.peer, job.spares[0]]
    await asyncio.gather(*map(job.leader._on_peer, lost))
    assert started == [3, 4]


async def test_spare_that_is_lost_while_another_starts_is_not_called(tmp_path: Path) -> None:
    job = Job(tmp_path, spares=3)
    await job.run_again()

    async def lose_next() -> None:
        job.spares[2].state = None

    job.spares[1]._on_start = lose_next
    job.peer.state = job.spares[0].state = None
    await job.leader._on_peer(job.peer)  # type: ignore[arg-type]
    assert job.list_running_spares() == [3]


async def test_spare_is_stopped_with_the_run_for_which_it_starts(tmp_path: Path) -> None:
    job = Job(tmp_path, spares=2)
    await job.run_again()
    started = asyncio.Event()
    stopped: list[str] = []
    spare = job.spares[1]

    async def request(kind: str) -> None:
        stopped.append(kind)

    spare._on_start = started.wait  # type: ignore[assignment]
    spare.request = request  # type: ignore[method-assign]
    job.peer.state = None
    calling = asyncio.create_task(job.leader._on_peer(job.peer))  # type: ignore[arg-type]
    await asyncio.sleep(0.01)
    job.send("stop")
    await until(lambda: not job.runs.is_running)
    assert stopped == ["stop"]
    started.set()
    await calling


async def test_spare_that_comes_after_the_end_does_not_fail_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(holder, "_SECONDS_FOR_ENDS", 0.01)
    job = Job(tmp_path, spares=2)
    await job.run_again()
    job.peer.state = None
    await job.leader._on_peer(job.peer)  # type: ignore[arg-type]
    assert job.list_running_spares() == [2, 3]
    job.spares[0].state = PeerState(job.runs.plan, running=False, end=SUCCESS)
    late = job.spares[1]
    stop = late.request

    async def report(kind: str) -> None:
        await stop(kind)
        await job.leader._on_peer(late)  # type: ignore[arg-type]  # its end by the signal, before it is a spare again

    late.request = report  # type: ignore[method-assign]
    job.runs.finish()
    await until(lambda: late.state is not None and late.state.spare)
    assert job.leader._result == "Succeeded"


async def test_run_goes_on_in_a_pod_that_comes_after_its_spares(tmp_path: Path) -> None:
    job = Job(tmp_path, spares=1)
    second = RunPlan(2, ("train.py",))
    job.runs.is_running = False
    job.peer.state = None
    job.spares[0].state = PeerState(second, running=False, end=SUCCESS, spare=True)
    await job.leader._on_peer(job.spares[0])  # type: ignore[arg-type]
    assert len(job.list_timers()) == 1
    job.peer.state = PeerState(second, running=True)
    await job.report_peer()
    assert job.peer.state.running
    assert (job.runs.plan, job.runs.is_running) == (second, True)
    assert job.list_timers() == []


async def test_run_of_spares_alone_is_taken_as_ended(tmp_path: Path) -> None:
    job = Job(tmp_path, spares=1)
    job.leader._begun.clear()
    second = RunPlan(2, ("train.py",))
    job.peer.state = None
    job.spares[0].state = PeerState(second, running=False, end=SUCCESS, spare=True)
    await job.leader._on_peer(job.spares[0])  # type: ignore[arg-type]
    assert job.runs.plan == FIRST  # a pod that trains may still come
    await job.leader._adopt_of_spare()
    assert job.runs.plan == second
    assert not job.runs.is_running

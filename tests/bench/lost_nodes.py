"""Simulate a job's nodes on a bad day, and count the healthy pods that are declared lost; then nodes are lost.

The operator's service, its rules and the pods' probes are the real code, on an event loop whose clock jumps to the next
event. Invented are the network (each packet is lost with a probability, and the kernel repeats it), the delays of a
machine with a load of 30, and pauses of whole processes. Nothing is asserted:

    python -m tests.bench.lost_nodes                     # 24 hours of 8 nodes, then 200 lost nodes
    python -m tests.bench.lost_nodes --nodes 2 --hours 240 --loss 0.05
"""

from __future__ import annotations

import argparse
import asyncio
import random
import socket
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from ddp_operator.api.cluster import Key, Snapshot
from ddp_operator.api.constants import KIND
from ddp_operator.api.status import Status
from ddp_operator.features.lost_nodes.contacts import CONNECT_SECONDS, RESPONSE_SECONDS, Contact
from ddp_operator.features.lost_nodes.evidence import LeaseAge
from ddp_operator.features.lost_nodes.leases import LeaseReading
from ddp_operator.features.lost_nodes.nodes import NodeReading
from ddp_operator.features.lost_nodes.watch import NodeWatch
from ddp_operator.kube.cache import ObjectCache
from ddp_pod.features.lost_nodes import peers
from tests.support.builders import child_job, child_pod, job_manifest
from tests.support.launcher_config import launcher_pod

JOB: Final = Key("default", "train")
START: Final = datetime(2026, 1, 1, tzinfo=UTC)
RENEWAL: Final = 10.0
"""Seconds between two renewals of a Lease, to which the kubelet adds up to 4 %."""
PROBE_SECONDS: Final = 2.0
REPEATS: Final = (0.0, 1.0, 3.0)
"""When the kernel sends the first packet of a connection."""
WARM_UP: Final = 120.0


class JumpingLoop(asyncio.SelectorEventLoop):
    """An event loop that waits for nothing: when all tasks sleep, its clock jumps to the next one that wakes."""

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0

    def time(self) -> float:
        """Return the simulated seconds."""
        return self._now

    def _run_once(self) -> None:
        loop: Any = self
        if not loop._ready and loop._scheduled:
            self._now = max(self._now, loop._scheduled[0]._when)
        super()._run_once()  # type: ignore[misc]


class SimulatedTime:
    """Stands for the module ``time`` in the pods' probes."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.monotonic = loop.time
        self.sleep = time.sleep


@dataclass(frozen=True, slots=True)
class Day:
    """How bad the day is. ``loss``: probability with which a packet is lost; ``pauses``: per process and hour."""

    nodes: int
    loss: float
    pauses: float
    pause: float
    delay: float
    """Mean seconds by which a busy machine delays each work of a process."""


@dataclass
class Process:
    """A process that pauses. ``resumes``: when the present pause ends."""

    resumes: float = 0.0

    async def wait(self) -> None:
        """Wait until the process runs."""
        left = self.resumes - asyncio.get_running_loop().time()
        if left > 0:
            await asyncio.sleep(left)


@dataclass
class World:
    """The nodes of one job, each with a pod and a kubelet, and the operator."""

    day: Day
    draw: random.Random
    folder: str
    down: set[int] = field(default_factory=set)
    lost: list[tuple[float, int]] = field(default_factory=list)
    suspected: int = 0
    hints: set[asyncio.Task[None]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.operator = Process()
        self.pods = [Process() for _ in range(self.day.nodes)]
        self.kubelets = [Process() for _ in range(self.day.nodes)]
        self.renewed = [self.loop.time()] * self.day.nodes
        self.watches = [self._start_watch(index) for index in range(self.day.nodes)]
        self.store = ObjectCache()
        self._fill_store()
        self.service = NodeWatch(
            self.store, self._note, self.fetch, self.read_lease, self.read_node, clock=self.read_clock
        )

    def read_clock(self) -> datetime:
        """Return the simulated time."""
        return START + timedelta(seconds=self.loop.time())

    def _start_watch(self, index: int) -> peers.PeerWatch:
        host = "10.0.0.{}"
        pod = launcher_pod(
            self.folder, nodes=self.day.nodes, node=index, master=host.format(0), pod_host=host, metrics_port=9400
        )
        resolve = lambda name: peers.Address(socket.AF_INET, name)  # noqa: E731
        watch = peers.PeerWatch(pod, resolve=resolve, probe=lambda address, port: self.outcome)
        watch._tell_listeners = lambda silent: self.tell_listeners(index, silent)  # type: ignore[method-assign]
        return watch

    def tell_listeners(self, source: int, silent: int) -> None:
        """Let a pod tell others that one is silent, each in its own time."""
        for listener in self.watches[source].list_listeners(silent):
            task = self.loop.create_task(self._tell(source, listener, silent))
            self.hints.add(task)
            task.add_done_callback(self.hints.discard)

    async def _tell(self, source: int, listener: int, silent: int) -> None:
        reached, seconds = self.connect(source, listener, PROBE_SECONDS)
        await asyncio.sleep(seconds + self.draw_delay())
        await self.pods[listener].wait()
        if reached and listener not in self.down:
            self.watches[listener].take_hint(silent)

    def _fill_store(self) -> None:
        resource = job_manifest(JOB.name, nodes=self.day.nodes)
        resource["metadata"] |= {"uid": "uid-1", "resourceVersion": "1", "namespace": JOB.namespace}
        resource["status"] = {"attempt": 1}
        self.resource = resource
        self.store.apply(KIND, resource)
        pods = [
            child_pod(index, node=f"{index}", status={"podIP": f"10.0.0.{index}"}) for index in range(self.day.nodes)
        ]
        for number, (kind, child) in enumerate([("Job", child_job()), *(("Pod", pod) for pod in pods)]):
            child["metadata"]["resourceVersion"] = str(number + 2)
            self.store.apply(kind, child)

    def _note(self, key: Key) -> None:
        self.suspected += 1
        for uid, suspicion in self.service.list_suspicions(key).items():
            if suspicion.is_lost:
                index = next(pod["spec"]["nodeName"] for pod in self.snapshot().pods if pod["metadata"]["uid"] == uid)
                self.lost.append((self.loop.time(), int(index)))

    def snapshot(self) -> Snapshot:
        """Return the job as the operator's cache has it."""
        snapshot = self.store.snapshot(JOB)
        assert snapshot is not None
        return snapshot

    # -- the network and the machines

    def connect(self, source: int | None, target: int, limit: float) -> tuple[bool, float]:
        """Return whether a machine answers, and after how many seconds. ``source``: None for the operator's."""
        for sent in REPEATS:
            arrives = self.draw.random() > self.day.loss and self.draw.random() > self.day.loss
            after = sent + self.draw.expovariate(100.0)
            if after > limit:
                break
            if arrives and not self.down.intersection((source, target)):
                return True, after
        return False, limit

    def draw_delay(self) -> float:
        """Return by how many seconds a busy machine delays a process."""
        return self.draw.expovariate(1 / self.day.delay)

    async def probe(self, index: int) -> None:
        """Let a pod probe its peers without end, as its thread does."""
        watch = self.watches[index]
        while True:
            await self.pods[index].wait()
            now = watch._tick()
            peer = min(watch._peers, key=lambda peer: peer.due)
            if peer.due > now:
                await asyncio.sleep(min(peer.due - now, 0.5) + self.draw_delay())
                continue
            answers, seconds = self.connect(index, peer.index, PROBE_SECONDS)
            await asyncio.sleep(seconds)
            self.outcome = answers
            watch.check(peer, now)

    async def renew(self, index: int) -> None:
        """Renew a node's Lease without end, as its kubelet does."""
        while True:
            await asyncio.sleep(RENEWAL * self.draw.uniform(1.0, 1.04) + self.draw_delay())
            await self.kubelets[index].wait()
            reached, seconds = self.connect(index, index, 10.0)
            await asyncio.sleep(seconds)
            if reached:
                self.renewed[index] = self.loop.time()

    async def pause(self) -> None:
        """Pause one process after the other, without end."""
        processes = [self.operator, *self.pods, *self.kubelets]
        while True:
            await asyncio.sleep(self.draw.expovariate(self.day.pauses * len(processes) / 3600))
            self.draw.choice(processes).resumes = self.loop.time() + self.day.pause

    # -- what the operator reads

    async def fetch(self, address: str, port: int, wait: int) -> Contact:
        """Return what a pod knows of its peers."""
        index = int(address.rpartition(".")[2])
        await self.operator.wait()
        reached, seconds = self.connect(None, index, CONNECT_SECONDS)
        await asyncio.sleep(seconds + self.draw_delay())
        if not reached:
            return Contact("Silent")
        deadline = self.loop.time() + wait + RESPONSE_SECONDS
        await self.pods[index].wait()
        await asyncio.sleep(self.draw_delay())
        watch = self.watches[index]
        if not wait:
            watch.report_peers(0.0)  # all peers are probed soon
        for _ in range(4 * wait):
            if watch.has_news():
                break
            await asyncio.sleep(0.25)
        report = watch.report_peers(-1.0)
        if index in self.down or self.loop.time() > deadline:
            return Contact("Frozen")
        await self.operator.wait()
        return Contact("Answers", report)

    async def read_lease(self, node: str) -> LeaseReading:
        """Return the age of a Lease."""
        await self.operator.wait()
        age = self.loop.time() - self.renewed[int(node)]
        await asyncio.sleep(self.draw_delay())
        return LeaseReading(LeaseAge(age, RENEWAL))

    async def read_node(self, node: str) -> NodeReading:
        """Return a node, whose boot is always the same."""
        return NodeReading(node)

    # -- the day

    async def run(self, seconds: float, fails: int | None = None) -> float | None:
        """Let the time pass. ``fails``: a node that loses its power; returns after how many seconds it is known."""
        works = [self.pause(), *map(self.probe, range(self.day.nodes)), *map(self.renew, range(self.day.nodes))]
        tasks = [asyncio.ensure_future(work) for work in works]
        self.service.note_status(Snapshot(self.resource), Status(), Status(phase="Running", attempt=1), START)
        found = None
        try:
            if fails is None:
                await asyncio.sleep(seconds)
            else:
                await asyncio.sleep(WARM_UP + self.draw.uniform(0, RENEWAL))
                began = self.loop.time()
                self.down.add(fails)
                tasks[1 + fails].cancel()
                tasks[1 + self.day.nodes + fails].cancel()
                while found is None and self.loop.time() - began < seconds:
                    await asyncio.sleep(0.1)
                    found = next((at - began for at, index in self.lost if index == fails), None)
        finally:
            await self.service.close()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return found


def simulate(day: Day, seed: int, seconds: float, fails: int | None = None) -> tuple[World, float | None]:
    """Return a world at the end of its day, and when a planted failure was known."""

    async def live() -> tuple[World, float | None]:
        with tempfile.TemporaryDirectory() as folder:
            world = World(day, random.Random(seed), folder)
            return world, await world.run(seconds, fails)

    loop = JumpingLoop()
    peers.time = SimulatedTime(loop)  # type: ignore[assignment, attr-defined]
    peers.log = lambda text: None
    try:
        return loop.run_until_complete(live())
    finally:
        peers.time = time  # type: ignore[attr-defined]
        loop.close()


def main(argv: Sequence[str] | None = None) -> None:
    """Simulate and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, nargs="+", default=[2, 8])
    parser.add_argument("--hours", type=float, default=24.0)
    parser.add_argument("--loss", type=float, default=0.01, help="probability with which a packet is lost")
    parser.add_argument("--pauses", type=float, default=12.0, help="of each process in an hour")
    parser.add_argument("--pause", type=float, default=5.0, help="seconds of a pause")
    parser.add_argument("--delay", type=float, default=0.3, help="mean seconds by which a machine delays each work")
    parser.add_argument("--failures", type=int, default=200, help="lost nodes, one in each world")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(argv)
    for nodes in options.nodes:
        day = Day(nodes, options.loss, options.pauses, options.pause, options.delay)
        world, _ = simulate(day, options.seed, options.hours * 3600)
        print(
            f"{nodes} nodes, {options.hours:g} h, {options.loss:.0%} of packets lost, {options.pauses:g} pauses of "
            f"{options.pause:g} s in each process and hour: suspicions changed {world.suspected} times, "
            f"{len(world.lost)} healthy pods declared lost",
            flush=True,
        )
        times = []
        wrong = 0
        for number in range(options.failures):
            world, found = simulate(day, options.seed + number, 120.0, number % nodes)
            wrong += sum(index != number % nodes for _, index in world.lost)
            times.append(float("inf") if found is None else found)
        if times:
            times.sort()
            print(
                f"  {len(times)} lost nodes: known after {statistics.median(times):.1f} s (median), "
                f"{times[int(0.9 * len(times))]:.1f} s (90 %), {times[-1]:.1f} s at most; wrong pods: {wrong}",
                flush=True,
            )


if __name__ == "__main__":
    main()

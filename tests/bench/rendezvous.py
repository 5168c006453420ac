"""The time that many agents need to join a rendezvous round, and the next one after a worker was killed.

All agents are on this machine, each at a separate loopback address as with ``ddp run``: forked after one import of
torch, with the launcher's store, and a ``sleep`` as their worker. Asserts nothing:

    python -m tests.bench.rendezvous --agents 64 256 1000
    python -m tests.bench.rendezvous --agents 64 256 --elastic
    python -m tests.bench.rendezvous --agents 64 256 --spares 4
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import resource
import select
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final, NamedTuple

import psutil

from ddp_cli.local.ports import hold_free_port
from ddp_pod.contract.plan import TorchrunOptions, loopback_address
from ddp_pod.network.master import count_connections
from ddp_pod.torchrun.channel import AgentRequest, PhaseEntered, RanksFailed, Restarting, Verdict
from tests.support.launcher_config import launcher_pod

MEMORY_EACH: Final = 13 << 20
"""Bytes of an agent's private memory; memory shared with the other agents is not counted."""
WORKER: Final = ("sleep", "3600")


class AgentJob(NamedTuple):
    """The pods of a job: ``nodes`` train, ``spares`` are on standby."""

    nodes: int
    spares: int = 0
    elastic: bool = False

    @property
    def pods(self) -> int:
        """All pods."""
        return self.nodes + self.spares

    @property
    def victim(self) -> int:
        """The index of the agent whose worker is killed."""
        return self.nodes // 2

    @property
    def name(self) -> str:
        """The description of the job."""
        kind = "elastic" if self.elastic else f"{self.spares} spares" if self.spares else "fixed size"
        return f"{self.pods} agents, {kind}"


class Gate:
    """Holds agents in a phase until this process opens it."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe()

    def wait(self) -> None:
        """Wait until it is open."""
        os.read(self._read, 1)

    def disown(self) -> None:
        """Leave it to the other process: an agent's own copy would keep it closed."""
        os.close(self._write)

    def open(self) -> None:
        """Open it for good."""
        if self._write >= 0:
            os.close(self._write)
            self._write = -1

    def close(self) -> None:
        """Release it."""
        self.open()
        os.close(self._read)


class Gates(NamedTuple):
    """``first``: before the first round; ``second``: between the second round and the start of its workers.

    The workers of agents on separate machines start beside each other, and here would delay the last agents' round.
    """

    first: Gate
    second: Gate


class Channel:
    """The agent's end of the channel to a launcher that restarts the workers after every failure."""

    def __init__(self, index: int, reports: int, gates: Gates) -> None:
        self._index = index
        self._reports = reports
        self._gates = gates
        self._rounds = 0

    def report(self, event: object) -> None:
        """Report a phase, and wait at the gate behind it."""
        if not isinstance(event, PhaseEntered):
            return
        os.write(self._reports, f"{self._index} {event.phase}\n".encode())
        if event.phase == "Rendezvous":
            self._gates.first.wait()
        if event.phase == "Met":
            self._rounds += 1
            if self._rounds > 1:
                self._gates.second.wait()

    def request(self, event: object) -> object:
        """Let the agent restart the workers."""
        if isinstance(event, RanksFailed):
            return Verdict(restart=True, knows_cause=True)
        return 0.0 if isinstance(event, Restarting) else True


def run_agent(gates: Gates, index: int, job: AgentJob, port: int, folder: str, reports: int) -> None:
    """Run the agent of one pod until it is killed. Write each phase that it reaches to ``reports``."""
    from ddp_pod.torchrun import agent

    logging.disable(logging.ERROR)  # a line of each agent for each round
    # A thousand agents that check their workers ten times a second, as real ones do, would use all CPU time of this
    # machine, so only the agent whose worker is killed does. All read the store once a second.
    interval = 0.1 if index == job.victim else max(0.1, job.pods / 1000)
    options = TorchrunOptions(monitor_interval=interval)
    pod = launcher_pod(
        folder, nodes=job.nodes, spares=job.spares, elastic=job.elastic, node=index, port=port, in_place_restarts=100,
        min_nodes=max(1, job.nodes // 2) if job.elastic else 0, max_nodes=job.pods if job.elastic else 0,
        restarts_without_progress=100, master=loopback_address(0), secret="bench", run_id="bench", torchrun=options,
    )  # fmt: skip
    channel = Channel(index, reports, gates)
    join = agent.PodAgent._rendezvous

    def join_and_report(*arguments: Any) -> None:
        join(*arguments)
        channel.report(PhaseEntered("Met"))

    agent.PodAgent._rendezvous = join_and_report  # type: ignore[method-assign]
    agent.run_torchrun(AgentRequest(pod, list(WORKER), 0, 100), channel, None, [])  # type: ignore[arg-type]


def fork_agent(gates: Gates, *arguments: Any) -> int:
    """Fork an agent and return its process id."""
    pid = os.fork()
    if pid:
        return pid
    for gate in gates:
        gate.disown()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        os.nice(5)  # the store has its pod's CPUs to itself, and these agents share this machine's
        run_agent(gates, *arguments)
    except BaseException:
        traceback.print_exc()
    os._exit(1)


class Reports:
    """The agents' reports in the order of their arrival."""

    def __init__(self, agents: int) -> None:
        self._agents = agents
        self.read, self.write = os.pipe()
        self._unread = b""
        self._counts: Counter[tuple[str, str]] = Counter()
        self._reached: Counter[tuple[str, int]] = Counter()
        """How many agents have been in a phase so often."""

    def wait_for(self, phase: str, times: int, limit: float, *, agents: int | None = None) -> float:
        """Return the seconds until ``agents``, by default all, have been in a phase so often. Raises: TimeoutError."""
        needed = agents or self._agents
        since = time.monotonic()
        while True:
            there = self._reached[phase, times]
            left = limit - (time.monotonic() - since)
            if there >= needed:
                return limit - left
            if left <= 0 or not select.select([self.read], [], [], left)[0]:
                raise TimeoutError(f"{there} of {needed} in phase {phase} after {limit:.0f} s")
            self._unread += os.read(self.read, 1 << 16)
            *lines, self._unread = self._unread.split(b"\n")
            for line in lines:
                index, name = line.decode().split()
                self._counts[index, name] += 1
                self._reached[name, self._counts[index, name]] += 1


def measure(job: AgentJob, limit: float, seconds: float) -> None:
    """Make the agents join a round, observe the store, and make them join another one."""
    from ddp_pod.torchrun.store import fork_store

    agents = job.pods
    port = hold_free_port()
    ours, theirs = socket.socketpair()
    guard, hold = os.pipe()
    store = psutil.Process(fork_store(loopback_address(0), port, guard, theirs))
    gates = Gates(Gate(), Gate())  # the store has no copy of them
    reports = Reports(agents)
    pids: list[int] = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            for index in range(agents):
                for name in ("metrics", "workers"):
                    os.makedirs(f"{folder}/{index}/{name}")
                pids.append(fork_agent(gates, index, job, port, f"{folder}/{index}", reports.write))
            ready = reports.wait_for("Rendezvous", 1, limit)
            meter = Meter(store, pids)
            gates.first.open()
            met = reports.wait_for("Met", 1, limit, agents=job.nodes)
            print(f"{job.name} (ready after {ready:.0f} s): first round {met:.1f} s; {meter.read()}", flush=True)
            reports.wait_for("Running", 1, limit, agents=job.nodes)
            meter = Meter(store, pids)
            time.sleep(seconds)
            rss = store.memory_info().rss / 2**20
            print(f"  at rest, {seconds:.0f} s: {meter.read()}; the store has {rss:.0f} MiB", end=" and ")
            print(f"{count_connections(port)} connections", flush=True)
            (worker,) = psutil.Process(pids[job.victim]).children()
            meter = Meter(store, pids)
            worker.kill()
            again = reports.wait_for("Met", 2, limit, agents=job.nodes)
            print(f"  next round {again:.1f} s after a worker was killed; {meter.read()}", flush=True)
        except TimeoutError as error:
            print(f"{job.name}: {error}; {Meter(store, pids, since=0).read()}", flush=True)
        finally:
            end([*pids, store.pid])
    for number in (guard, hold, reports.read, reports.write):
        os.close(number)
    for gate in gates:
        gate.close()
    ours.close()
    theirs.close()


class Meter:
    """Return the CPU seconds of the store and of all agents from now on; with ``since=0``, from their start on."""

    def __init__(self, store: psutil.Process, pids: Sequence[int], since: float | None = None) -> None:
        self._store = store
        self._pids = pids
        self._before = self._spent() if since is None else (since, since)

    def _spent(self) -> tuple[float, float]:
        agents = 0.0
        for pid in self._pids:
            with suppress(psutil.Error):
                agents += sum(psutil.Process(pid).cpu_times()[:2])
        return sum(self._store.cpu_times()[:2]), agents

    def read(self) -> str:
        """Return them as text."""
        store, agents = (now - before for now, before in zip(self._spent(), self._before, strict=True))
        return f"CPU seconds: store {store:.2f}, agents {agents:.1f}"


def end(pids: Sequence[int]) -> None:
    """End these agents and their workers."""
    for pid in pids:
        with suppress(psutil.Error):
            for process in [*psutil.Process(pid).children(recursive=True), psutil.Process(pid)]:
                with suppress(psutil.Error):
                    process.kill()
    for pid in pids:
        os.waitpid(pid, 0)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agents", type=int, nargs="+", default=[64, 256, 1000])
    parser.add_argument("--elastic", action="store_true", help="the size may be anything from half of the agents on")
    parser.add_argument("--spares", type=int, default=0, help="further agents on standby")
    parser.add_argument("--limit", type=float, default=120, help="seconds until a rendezvous counts as failed")
    parser.add_argument("--seconds", type=float, default=10, help="how long the store is looked at in between")
    options = parser.parse_args(argv)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # for the store's connections
    import ddp_pod.torchrun.agent  # noqa: F401 - once, for all agents

    gc.collect()
    gc.freeze()  # a collection in a child would write to all pages that it shares
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    for agents in options.agents:
        free = psutil.virtual_memory().available
        if agents * MEMORY_EACH > free:
            print(f"{agents} agents: not run: they need {agents * MEMORY_EACH >> 30} GiB, {free >> 30} GiB are free")
            continue
        measure(AgentJob(agents, options.spares, options.elastic), options.limit, options.seconds)


if __name__ == "__main__":
    main()

"""How long many torchrun agents take to meet at one store, and to meet again after a worker was killed.

All agents are on this machine, each at a loopback address of its own as with ``ddp run``: forked after one import of
torch, with the launcher's store and patches, and a ``sleep`` as their worker. Asserts nothing:

    python -m tests.bench.rendezvous --agents 64 256 1000
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
from typing import Any, Final

import psutil

from ddp_operator.launcher.pod import add_pod_flags, loopback_address
from ddp_operator.launcher.torchrun.rendezvous import count_connections, fork_store
from ddp_operator.launcher.torchrun.torchrun_patches import TorchrunPatches, adapt_torchrun
from ddp_operator.local.adapt import hold_free_port
from ddp_operator.manifests.torchrun import TorchrunPlan, UserCommand, build_torchrun_args
from tests.support.launcher_config import launcher_pod

MEMORY_EACH: Final = 13 << 20
"""Bytes that an agent needs of its own; what it shares with the others is not counted."""
WORKER: Final = ("sleep", "3600")


def run_agent(index: int, agents: int, port: int, folder: str, reports: int, gate: int) -> None:
    """Be the agent of one pod, until killed; write to ``reports`` when it is ready, has met, and runs its worker.

    Its first rendezvous begins when the other end of ``gate`` is closed.
    """
    import torch.distributed.run as torchrun

    logging.disable(logging.ERROR)  # a line of each agent for each round
    pod = launcher_pod(
        folder, nodes=agents, node=index, port=port, in_place_restarts=100, restarts_without_progress=100,
        master=loopback_address(0),
    )  # fmt: skip

    def report(event: dict[str, Any]) -> None:
        if "phase" in event:
            os.write(reports, f"{index} {event['phase']}\n".encode())
        if event.get("phase") == "Rendezvous":
            os.read(gate, 1)

    def meet(*arguments: Any) -> Any:
        met = meet_as_ever(*arguments)
        report({"phase": "Met"})
        return met

    meet_as_ever, TorchrunPatches._meet = TorchrunPatches._meet, meet  # type: ignore[method-assign]

    adapt_torchrun(pod, report, lambda event: True, None)
    plan = TorchrunPlan(agents, 1, "c10d", loopback_address(0), port, loopback_address(index), "bench")
    flags = add_pod_flags(build_torchrun_args(plan, UserCommand(WORKER[0], WORKER, program=True)), pod)
    # A thousand agents that look at their workers ten times a second would have this machine for themselves.
    flags.append(f"--monitor-interval={max(0.1, agents / 500)}")
    torchrun.run(torchrun.parse_args([*flags, "--max-restarts=100", f"--log-dir={folder}", *WORKER]))


def fork_agent(release: int, *arguments: Any) -> int:
    """Fork an agent, which closes its copy of ``release``, and return its process id."""
    pid = os.fork()
    if pid:
        return pid
    os.close(release)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        os.nice(5)  # the store has its pod's CPUs to itself, and these agents share this machine's
        run_agent(*arguments)
    except BaseException:
        traceback.print_exc()
    os._exit(1)


class Reports:
    """What the agents report, as it comes."""

    def __init__(self, agents: int) -> None:
        self._agents = agents
        self.read, self.write = os.pipe()
        self._unread = b""
        self._counts: Counter[tuple[str, str]] = Counter()

    def wait_for(self, phase: str, times: int, limit: float) -> float:
        """Return how many seconds pass until all agents have been in a phase so often. Raises: TimeoutError."""
        since = time.monotonic()
        while True:
            there = sum(self._counts[str(index), phase] >= times for index in range(self._agents))
            left = limit - (time.monotonic() - since)
            if there == self._agents:
                return limit - left
            if left <= 0 or not select.select([self.read], [], [], left)[0]:
                raise TimeoutError(f"{there} of {self._agents} in phase {phase} after {limit:.0f} s")
            self._unread += os.read(self.read, 1 << 16)
            *lines, self._unread = self._unread.split(b"\n")
            self._counts.update((index, what) for index, what in (line.decode().split() for line in lines))


def measure(agents: int, limit: float, seconds: float) -> None:
    """Let so many agents meet, look at what the store needs, and let them meet again."""
    import torch

    port = hold_free_port()
    ours, theirs = socket.socketpair()
    guard, hold = os.pipe()
    store = psutil.Process(fork_store(torch, "localhost", port, guard, theirs))
    gate, release = os.pipe()  # of which the store has no copy
    reports, pids = Reports(agents), []
    with tempfile.TemporaryDirectory() as folder:
        try:
            for index in range(agents):
                os.makedirs(f"{folder}/{index}/metrics")
                pids.append(fork_agent(release, index, agents, port, f"{folder}/{index}", reports.write, gate))
            ready = reports.wait_for("Rendezvous", 1, limit)
            meter = Meter(store, pids)
            os.close(release)
            met = reports.wait_for("Met", 1, limit)
            print(f"{agents} agents (ready after {ready:.0f} s): first round {met:.1f} s; {meter.read()}", flush=True)
            reports.wait_for("Running", 1, limit)
            meter = Meter(store, pids)
            time.sleep(seconds)
            rss = store.memory_info().rss / 2**20
            print(f"  at rest, {seconds:.0f} s: {meter.read()}; the store has {rss:.0f} MiB", end=" and ")
            print(f"{count_connections(port)} connections", flush=True)
            (worker,) = psutil.Process(pids[agents // 2]).children()
            meter = Meter(store, pids)
            worker.kill()
            again = reports.wait_for("Met", 2, limit)
            print(f"  next round {again:.1f} s after a worker was killed; {meter.read()}", flush=True)
        except TimeoutError as error:
            print(f"{agents} agents: {error}; {Meter(store, pids, since=0).read()}", flush=True)
        finally:
            end([*pids, store.pid])
    for number in (guard, hold, gate, reports.read, reports.write):
        os.close(number)
    with suppress(OSError):
        os.close(release)
    ours.close()
    theirs.close()


class Meter:
    """CPU seconds of the store and of all agents from now on; ``since=0``: from their start on."""

    def __init__(self, store: psutil.Process, pids: Sequence[int], since: float | None = None) -> None:
        self._store, self._pids = store, pids
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
    parser.add_argument("--torchrun", action="store_true", help="meet as torchrun does, by one document")
    parser.add_argument("--limit", type=float, default=120, help="seconds until a rendezvous counts as failed")
    parser.add_argument("--seconds", type=float, default=10, help="how long the store is looked at in between")
    options = parser.parse_args(argv)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # for the store's connections
    import torch.distributed.elastic.agent.server.local_elastic_agent
    import torch.distributed.elastic.rendezvous.c10d_rendezvous_backend
    import torch.distributed.run  # noqa: F401 - once, for all agents

    if options.torchrun:
        TorchrunPatches._has_fixed_group = property(lambda self: False)  # type: ignore[method-assign,assignment]
    gc.collect()
    gc.freeze()  # a collection in a child would write to all pages that it shares
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    for agents in options.agents:
        free = psutil.virtual_memory().available
        if agents * MEMORY_EACH > free:
            print(f"{agents} agents: not run: they need {agents * MEMORY_EACH >> 30} GiB, {free >> 30} GiB are free")
            continue
        measure(agents, options.limit, options.seconds)


if __name__ == "__main__":
    main()

"""A job of a thousand pods, and a thousand jobs of eight, at a real control plane with simulated nodes.

etcd, kube-apiserver and kube-controller-manager from $KUBEBUILDER_ASSETS. This program is the scheduler and the
kubelets, and responds to scrapes. Prints values beside their targets, and asserts nothing:

    KUBEBUILDER_ASSETS=… python -m tests.bench.large_jobs
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, Final

import psutil

from ddp_operator.api.constants import EXIT_RETRYABLE, KIND
from ddp_operator.kube.resources import path
from ddp_operator.kube.watch import watch
from tests.bench.operator_scale import (
    ScaleRow,
    calls,
    cpu_seconds,
    difference,
    in_parallel,
    metric,
    until,
    writes_of_status,
)
from tests.support import ROOT
from tests.support.builders import job_manifest, rank_json
from tests.support.builders import page as build_report
from tests.support.control_plane import ControlPlane, free_ports
from tests.support.kubernetes_binaries import find_binary
from tests.support.operator_process import OperatorProcess
from tests.support.pretend_nodes import PretendNodes
from tests.support.standin import ClusterActors

RANKS: Final = 8
"""Of each pod."""


def rank_numbers(seconds: float, rank: int = 0) -> dict[str, float]:
    """Return a rank's numbers after this many seconds: as many as the trainer's."""
    step = int(10 * seconds) + 1
    work = step / 12 * (1 + rank % 7 / 100)
    return {
        "samples": 32 * step, "steps": step, "step": step, "total_steps": 10**6, "share": step / 10**6, "epoch": 1,
        "epochs": 90, "step_seconds": step / 10, "data_seconds": step / 100, "loss": 1 + rank / step,
        "compute_seconds": work, "learning_rate": 0.1, "world_size": 8 * RANKS, "heartbeats": step,
        "last_step_time": time.time(), "val_loss": 1, "val_accuracy": 0.5, "saving": 0, "checkpoint_step": step,
    }  # fmt: skip


def page(seconds: float) -> str:
    """Return the report of a pod whose ranks have trained for this many seconds."""
    ranks = [rank_json(rank, **rank_numbers(seconds, rank)) for rank in range(RANKS)] if seconds else []
    return build_report(phase="Running" if seconds else "Rendezvous", restarts=0, ranks=ranks)


class Seen:
    """Watch the resources of a namespace, and record when each attempt first has each phase."""

    def __init__(self, actors: ClusterActors) -> None:
        self._actors = actors
        self.times: dict[tuple[str, str, int], float] = {}
        """By name, phase and attempt."""
        self.status: dict[str, Any] = {}

    async def __aenter__(self) -> Seen:
        client = self._actors.client
        namespace = self._actors.namespace
        self._task = asyncio.create_task(watch(client, KIND, namespace, "", self._on_event))
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    def _on_event(self, kind: str, event: str | None, job: Any) -> None:
        name = job["metadata"]["name"]
        status = job.get("status", {})
        self.status[name] = status
        self.times.setdefault((name, status.get("phase", ""), status.get("attempt", 0)), time.perf_counter())

    @property
    def trained(self) -> float:
        """Seconds since a job first ran."""
        began = min((when for (_, phase, _), when in self.times.items() if phase == "Running"), default=None)
        return 0.0 if began is None else time.perf_counter() - began

    async def phase(self, count: int, phase: str, attempt: int = 1) -> float:
        """Wait until this many resources have had a phase in an attempt. Return when the last one first had it."""

        def times() -> list[float]:
            return [
                when for (_, phase_name, which), when in self.times.items() if (phase_name, which) == (phase, attempt)
            ]

        await until(lambda: len(times()) >= count, 0.05)
        return max(times())


class UsageMeter:
    """The cost of a time span: the CPU time of each program, and the operator's memory and calls."""

    def __init__(self, operator: OperatorProcess) -> None:
        assert operator.process is not None
        self._operator = operator
        self._process = psutil.Process(operator.process.pid)

    async def __aenter__(self) -> UsageMeter:
        self._calls = await calls(self._operator)
        self._cpu = cpu_seconds()
        self._own = self._process.cpu_times()
        self._since = time.perf_counter()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.seconds = time.perf_counter() - self._since
        own = self._process.cpu_times()
        self.cpu = own.user + own.system - self._own.user - self._own.system
        """Seconds, of the operator."""
        self.others = difference(self._cpu, cpu_seconds())
        self.calls = difference(self._calls, await calls(self._operator))
        self.statuses = writes_of_status(self.calls)

    @property
    def share(self) -> float:
        """Per cent of a core, of the operator."""
        return 100 * self.cpu / self.seconds

    @property
    def peak(self) -> float:
        """The operator's peak memory so far, in MiB."""
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        return int(status.split("VmHWM:")[1].split()[0]) / 1024

    def report(self, title: str) -> None:
        """Print what all programs used."""
        shares = ", ".join(f"{name} {value:.1f}" for name, value in self.others.items() if value > 0.1)
        print(f"{title}: {self.seconds:.1f} s; CPU seconds: operator {self.cpu:.1f}; of all by name: {shares}")
        made = ", ".join(f"{verb} {kind} {value:.0f} ({code})" for (verb, kind, code), value in self.calls.items())
        print(f"  the operator's calls: {made}", flush=True)


class LargeJobs:
    """One control plane, and the namespace of the current scenario."""

    def __init__(self, plane: ControlPlane, folder: Path) -> None:
        self._plane = plane
        self._folder = folder
        self._operators = 0
        (self._port,) = free_ports(1)
        self.rows: list[ScaleRow] = []

    @contextlib.asynccontextmanager
    async def namespace(self, name: str) -> AsyncIterator[tuple[ClusterActors, PretendNodes, Seen]]:
        """Create a namespace with simulated nodes."""
        self._plane.kubectl("create", "namespace", name)
        self._plane.kubectl("wait", "--for=create", "serviceaccount/default", "-n", name)
        async with (
            ClusterActors(self._plane.admin, name) as actors,
            Seen(actors) as seen,
            PretendNodes(actors, port=self._port, page=lambda: page(seen.trained)) as nodes,
        ):
            yield actors, nodes, seen

    def operator(self, namespace: str) -> OperatorProcess:
        """Return an operator for that namespace."""
        self._operators += 1
        (port,) = free_ports(1)
        env = {"DDP_OPERATOR_NAMESPACES": namespace, "DDP_OPERATOR_LEASE_NAME": namespace}
        return OperatorProcess(self._plane.admin, self._folder / f"operator-{self._operators}.log", port=port, env=env)

    def manifest(self, name: str, nodes: int) -> dict[str, Any]:
        """Return a job whose pods are scraped here."""
        return job_manifest(name, nodes=nodes, metrics={"port": self._port}, recovery={"maxRestarts": 20})

    async def one(self, nodes: int, seconds: float) -> None:
        """Start one job of many pods. Fail a pod, fail another one and kill the leader, restart the operator."""
        name = f"1 x {nodes}"
        async with self.namespace("one") as (actors, pretended, seen):
            with self.operator("one") as operator:
                async with UsageMeter(operator) as starting:
                    since = time.perf_counter()
                    await actors.create(self.manifest("train", nodes))
                    await actors.child_job("train-1")
                    made = time.perf_counter() - since
                    ran = await seen.phase(1, "Running") - since
                starting.report(f"{name}, to Running")
                async with UsageMeter(operator) as steady:
                    await asyncio.sleep(seconds)
                steady.report(f"{name}, training")
                since = time.perf_counter()
                await self._fail(actors, nodes // 2, 1)
                await until(lambda: "lastFailure" in seen.status["train"], 0.02)
                report = time.perf_counter() - since
                async with UsageMeter(operator) as failing:
                    again = await seen.phase(1, "Running", 2) - since
                failing.report(f"{name}, failure to Running")
                peak = starting.peak
                with self.operator("one") as standby:
                    await self._fail(actors, 1, 2)
                    await until(lambda: pretended.started["train-3"] > nodes // 2, 0.02)
                    since = time.perf_counter()
                    operator.kill()
                    await until(lambda: leads(standby), 0.05)
                    took_over = time.perf_counter() - since
                    third = await seen.phase(1, "Running", 3) - since
            back, _ = await self._restart("one", 1)
        self.rows += [
            ScaleRow(f"{name}: resource to Job", made, "s", 1),
            ScaleRow(f"{name}: resource to Running", ran, "s", 60),
            ScaleRow(f"{name}: operator's CPU until then, of a core", starting.share, "%", 10),
            ScaleRow(f"{name}: the same in seconds", starting.cpu, "s", 5),
            ScaleRow(f"{name}: status writes until then", starting.statuses, "", 12),
            ScaleRow(f"{name}: operator's CPU while it trains, of a core", steady.share, "%", 2),
            ScaleRow(f"{name}: a pod's failure to lastFailure", report, "s", 5),
            ScaleRow(f"{name}: a pod's failure to Running again", again, "s", 90),
            ScaleRow(f"{name}: operator's CPU until then, of a core", failing.share, "%", 10),
            ScaleRow(f"{name}: status writes until then", failing.statuses, "", 12),
            ScaleRow(f"{name}: most memory", peak, "MiB", 150),
            ScaleRow(f"{name}: leader killed while pods start, to its successor", took_over, "s", 20),
            ScaleRow(f"{name}: leader killed while pods start, to Running", third, "s", 90),
            ScaleRow(f"{name}: restart until the job is looked at", back, "s", 15),
        ]

    async def many(self, count: int, nodes: int, seconds: float) -> None:
        """Start many jobs at once, wait until they train, kill the leader, restart the operator."""
        name = f"{count} x {nodes}"
        async with self.namespace("many") as (actors, _, seen):
            with self.operator("many") as operator:
                async with UsageMeter(operator) as starting:
                    since = time.perf_counter()
                    await in_parallel(
                        [lambda n=number: actors.create(self.manifest(f"job-{n}", nodes)) for number in range(count)]
                    )
                    await until(lambda: jobs_there(actors, count), 0.5)
                    made = time.perf_counter() - since
                    ran = await seen.phase(count, "Running") - since
                starting.report(f"{name}, to Running")
                async with UsageMeter(operator) as steady:
                    await asyncio.sleep(seconds)
                steady.report(f"{name}, training")
                peak = steady.peak
                with self.operator("many") as standby:
                    since = time.perf_counter()
                    operator.kill()
                    await until(lambda: has_passed_over(standby, count), 0.5)
                    took_over = time.perf_counter() - since
                    successor = UsageMeter(standby).peak
                    versions = await self._jobs(actors)
            back, restarted = await self._restart("many", count)
            touched = sum(versions[name] != version for name, version in (await self._jobs(actors)).items())
        self.rows += [
            ScaleRow(f"{name}: resources to Jobs", made, "s", 60),
            ScaleRow(f"{name}: resources to Running", ran, "s", 600),
            ScaleRow(f"{name}: status writes a job until then", starting.statuses / count, "", 6),
            ScaleRow(f"{name}: operator's CPU until then, of a core", starting.share, "%", 50),
            ScaleRow(f"{name}: operator's CPU while they train, of a core", steady.share, "%", 50),
            ScaleRow(f"{name}: status writes a second while they train", steady.statuses / steady.seconds, "1/s", 100),
            ScaleRow(f"{name}: most memory", peak, "MiB", 250),
            ScaleRow(f"{name}: leader killed, until its successor has looked at all", took_over, "s", 30),
            ScaleRow(f"{name}: the successor's most memory", successor, "MiB", 250),
            ScaleRow(f"{name}: restart until all are looked at", back, "s", 15),
            ScaleRow(f"{name}: its most memory", restarted, "MiB", 250),
            ScaleRow(f"{name}: Jobs touched by it", touched, "", 0),
        ]

    async def _fail(self, actors: ClusterActors, index: int, attempt: int) -> None:
        await actors.finish_pod(f"train-{attempt}", index, exit_code=EXIT_RETRYABLE, message='{"category":"OOM"}')

    async def _restart(self, namespace: str, count: int) -> tuple[float, float]:
        """Start an operator. Return the seconds until it has read all jobs, and its peak memory until then in MiB."""
        again = self.operator(namespace)
        since = time.perf_counter()
        with again:
            await until(lambda: has_passed_over(again, count), 0.1)
            return time.perf_counter() - since, UsageMeter(again).peak

    async def _jobs(self, actors: ClusterActors) -> dict[str, str]:
        return {job["metadata"]["name"]: job["metadata"]["generation"] for job in await actors.list("Job")}


async def leads(operator: OperatorProcess) -> bool:
    """Return whether the operator runs."""
    return bool(await metric(operator, "ddp_operator_leader"))


async def has_passed_over(operator: OperatorProcess, count: int) -> bool:
    """Return whether the operator has reconciled this many resources. It reconciles running jobs repeatedly."""
    return await metric(operator, "ddp_operator_reconcile_duration_seconds_count") >= count


async def jobs_there(actors: ClusterActors, count: int) -> bool:
    """Return whether this many Jobs exist."""
    result = await actors.client.request("GET", path("Job", actors.namespace), params={"limit": "1"})
    return len(result["items"]) + int(result["metadata"].get("remainingItemCount", 0)) >= count


async def measure(options: argparse.Namespace) -> None:
    """Run the selected scenarios and print the table."""
    with tempfile.TemporaryDirectory() as name, ControlPlane(Path(name), scheduler=False) as plane:
        plane.kubectl("apply", "--server-side", "-f", str(ROOT / "deploy" / "crds" / "ddptrainingjobs.yaml"))
        plane.kubectl("wait", "--for=condition=Established", "crd/ddptrainingjobs.ddp-operator.dev")
        bench = LargeJobs(plane, Path(name))
        load = os.getloadavg()[0]
        if "one" in options.only:
            await bench.one(options.pods, options.seconds)
        if "many" in options.only:
            await bench.many(options.jobs, options.nodes, options.seconds)
    width = max(len(row.what) for row in bench.rows)
    print(f"load before {load:.1f}, after {os.getloadavg()[0]:.1f}, {os.cpu_count()} CPUs")
    print("\n".join(row.line(width) for row in bench.rows))


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--pods", type=int, default=1000, help="of the one job")
    parser.add_argument("--jobs", type=int, default=1000, help="of few pods each")
    parser.add_argument("--nodes", type=int, default=8, help="of each of those")
    parser.add_argument("--seconds", type=float, default=60, help="how long training is looked at")
    parser.add_argument("--only", nargs="+", choices=["one", "many"], default=["one", "many"])
    options = parser.parse_args(argv)
    missing = [name for name in ("etcd", "kube-apiserver", "kube-controller-manager") if find_binary(name) is None]
    if missing:
        sys.exit(f"not run: {', '.join(missing)} not found; set KUBEBUILDER_ASSETS to the folder that has them")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))  # so that no process remains
    asyncio.run(measure(options))


if __name__ == "__main__":
    main()

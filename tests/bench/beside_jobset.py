"""A burst of jobs, alternately by this operator and by the JobSet controller of the cluster of DDP_E2E_KUBECONFIG.

Each time ends when every job has its Job and its Service. No node can run the pods, so that nothing else is measured.
Prints the times, and the ratios within each pair; asserts nothing. Ends with a message if the cluster has no JobSet:

    DDP_E2E_KUBECONFIG=… python -m tests.bench.beside_jobset --pid $(pgrep -f jobset)
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from pathlib import Path
from typing import Any, Final

import psutil

from ddp_operator.kube.client import ResponseError
from ddp_operator.kube.resources import path
from tests.bench.figures import ratio, table
from tests.bench.operator_scale import calls, difference, in_parallel, until
from tests.support.builders import job_manifest, template, trainer
from tests.support.control_plane import free_ports
from tests.support.operator_process import OperatorProcess
from tests.support.standin import ClusterActors

NAMESPACES: Final = "/api/v1/namespaces"
JOBSETS: Final = "/apis/jobset.x-k8s.io/v1alpha2"
NODES: Final = 2
NOWHERE: Final = {"example.com/no-node-has": "this"}
PAUSE: Final = 10.0
"""Seconds after the last child whose CPU time counts: the controller writes then about waiting pods."""


def training_job(name: str) -> dict[str, Any]:
    """Return a job of this operator whose pods no node can run."""
    return job_manifest(name, nodes=NODES, template=template(trainer(), nodeSelector=NOWHERE))


def job_set(name: str) -> dict[str, Any]:
    """Return a JobSet of one such Job."""
    pod = training_job(name)["spec"]["template"]["spec"] | {"restartPolicy": "Never"}
    job = {"parallelism": NODES, "completions": NODES, "completionMode": "Indexed", "template": {"spec": pod}}
    group = {"name": "node", "replicas": 1, "template": {"spec": job | {"backoffLimit": 0}}}
    spec = {"network": {"enableDNSHostnames": True}, "replicatedJobs": [group]}
    return {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": {"name": name}, "spec": spec}


@asynccontextmanager
async def a_namespace(kubeconfig: Path, labels: Mapping[str, str]) -> AsyncIterator[ClusterActors]:
    """Create a namespace, and wait for its deletion afterwards, so that none overlaps the next round."""
    name = f"burst-{uuid.uuid4().hex[:8]}"
    async with ClusterActors(kubeconfig, name) as actors:
        request = actors.client.request
        await request("POST", NAMESPACES, body={"metadata": {"name": name, "labels": dict(labels)}})

        async def gone() -> bool:
            try:
                await request("GET", f"{NAMESPACES}/{name}")
            except ResponseError as error:
                return error.status == 404
            return False

        try:
            yield actors
        finally:
            await request("DELETE", f"{NAMESPACES}/{name}")
            await until(gone, 1)


async def count(actors: ClusterActors, kind: str) -> int:
    """Return the number of objects of a kind."""
    page = await actors.client.request("GET", path(kind, actors.namespace), params={"limit": "1"})
    return len(page["items"]) + int(page["metadata"].get("remainingItemCount") or 0)


async def burst(actors: ClusterActors, where: str, make: Callable[[str], dict[str, Any]], number: int) -> float:
    """Create this many at once. Return the seconds until each has its Job and its Service."""
    since = time.perf_counter()
    await in_parallel([lambda n=n: actors.client.request("POST", where, body=make(f"job-{n}")) for n in range(number)])

    async def all_there() -> bool:
        return [await count(actors, kind) for kind in ("Job", "Service")] == [number, number]

    await until(all_there, 0.1)
    return time.perf_counter() - since


def cpu_of(pid: int | None) -> float:
    """Return the CPU seconds of a process so far; 0 if no process is named."""
    times = psutil.Process(pid).cpu_times() if pid else None
    return times.user + times.system if times else 0.0


async def measure(options: argparse.Namespace, kubeconfig: Path) -> None:
    """Run the rounds and print the values."""
    ours = "this operator"
    theirs = "JobSet"
    took: dict[str, list[float]] = {ours: [], theirs: []}
    spent: dict[str, list[float]] = {ours: [], theirs: []}
    apiserver = next(
        (item.pid for item in psutil.process_iter(["name"]) if item.info["name"] == "kube-apiserver"), None
    )
    loads: dict[str, list[float]] = {ours: [], theirs: []}
    labels = dict(pair.split("=", 1) for pair in options.label)
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(2 * options.rounds):
            contender = (ours, theirs)[(turn + turn // 2) % 2]  # each is first as often as second
            async with a_namespace(kubeconfig, labels) as actors:
                place = actors.namespace
                (port,) = free_ports(1)
                env = {"DDP_OPERATOR_NAMESPACES": place, "DDP_OPERATOR_LEASE_NAME": place}
                operator = OperatorProcess(kubeconfig, Path(folder) / f"{place}.log", port=port, env=env)
                running: AbstractContextManager[Any] = operator if contender == ours else nullcontext()
                with running:
                    pid = operator.process.pid if operator.process else options.pid
                    before = cpu_of(pid)
                    load = cpu_of(apiserver)
                    where = (
                        path("DDPTrainingJob", place) if contender == ours else f"{JOBSETS}/namespaces/{place}/jobsets"
                    )
                    took[contender].append(
                        await burst(actors, where, training_job if contender == ours else job_set, options.burst)
                    )
                    await asyncio.sleep(PAUSE)
                    spent[contender].append(cpu_of(pid) - before)
                    loads[contender].append(cpu_of(apiserver) - load)
                    if contender == ours:
                        made = difference({}, await calls(operator))
            cost = f"{took[contender][-1]:.2f} s, {spent[contender][-1]:.2f} s of CPU"
            print(f"{contender}: {cost}, load {os.getloadavg()[0]:.1f}")
    each = {
        f"{verb} {resource}": value / options.burst
        for (verb, resource, code), value in sorted(made.items())
        if code < "3"
    }
    print("calls a job:", ", ".join(f"{name} {value:.2f}" for name, value in each.items() if value > 0.1))
    print(table(f"{options.burst} jobs to all Jobs and Services", took))
    print(ratio(f"{ours} against {theirs}", took[ours], took[theirs]))
    if options.pid:
        print(table("CPU of the controller", spent))
        print(ratio(f"{ours} against {theirs}", spent[ours], spent[theirs]))
    if apiserver:
        print(table("CPU of kube-apiserver", loads))
        print(ratio(f"{ours} against {theirs}", loads[ours], loads[theirs]))


async def start(options: argparse.Namespace) -> None:
    """Measure if the cluster has a JobSet controller."""
    kubeconfig = os.environ.get("DDP_E2E_KUBECONFIG")
    if not kubeconfig:
        print("not run: DDP_E2E_KUBECONFIG names no cluster")
        return
    async with ClusterActors(Path(kubeconfig)) as actors:
        try:
            await actors.client.request("GET", JOBSETS)
        except ResponseError:
            print("not run: the cluster has no JobSet")
            return
    await measure(options, Path(kubeconfig))


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--burst", type=int, default=100, help="jobs that are submitted at once")
    parser.add_argument("--rounds", type=int, default=3, help="pairs of bursts")
    parser.add_argument("--pid", type=int, help="JobSet's manager, where it runs on this machine: for its CPU")
    parser.add_argument("--label", action="append", default=[], help="NAME=VALUE for the namespaces; repeatable")
    asyncio.run(start(parser.parse_args(argv)))


if __name__ == "__main__":
    main()

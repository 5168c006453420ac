"""The operator with many jobs, at a real API server: etcd and kube-apiserver from $KUBEBUILDER_ASSETS.

No controller and no scheduler run beside it, so that only the operator is measured. If pods are needed, this program
creates them, as the Job controller would. The baseline of every burst is a plain asynchronous client that writes the
same objects with as many connections, in the same run. Prints values beside their targets, and asserts nothing:

    KUBEBUILDER_ASSETS=… python -m tests.bench.operator_scale
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import inspect
import os
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

import aiohttp
import psutil
from prometheus_client.parser import text_string_to_metric_families

from ddp_operator.api.constants import API_VERSION, EXIT_RETRYABLE, KIND, LABEL_JOB_NAME, PLURAL
from ddp_operator.api.parse import parse_resource
from ddp_operator.features import SCHEMA
from ddp_operator.kube.resources import path
from ddp_operator.manifests.children import build_children, build_pod
from tests.support import ROOT
from tests.support.builders import job_manifest
from tests.support.control_plane import ControlPlane, free_ports
from tests.support.operator_process import OperatorProcess
from tests.support.standin import ClusterActors

PARALLEL: Final = 16
"""Concurrent calls, of the plain client as of the operator's workers."""
PATIENCE: Final = 900.0
CHILDREN: Final = ("Service", "ConfigMap", "Job")

Id = TypeVar("Id")
Samples = dict[tuple[str, str, str], float]
"""Calls by verb, resource and status."""


@dataclass(frozen=True)
class ScaleRow:
    """One value and its target."""

    what: str
    value: float
    unit: str
    target: float
    most: bool = True
    """Whether the target is an upper bound; otherwise it is a lower bound."""

    def line(self, width: int) -> str:
        """Return the row as text."""
        good = self.value <= self.target if self.most else self.value >= self.target
        sign = "<=" if self.most else ">="
        verdict = "met" if good else "MISSED"
        return f"  {self.what:{width}}  {self.value:9.3f} {self.unit:8} {sign} {self.target:<7g} {verdict}"


async def in_parallel(jobs: Iterable[Callable[[], Awaitable[Any]]]) -> None:
    """Make these calls, PARALLEL at a time."""
    waiting = iter(jobs)

    async def work() -> None:
        for call in waiting:
            await call()

    await asyncio.gather(*(work() for _ in range(PARALLEL)))


class Bench:
    """One API server and one namespace at a time."""

    def __init__(self, plane: ControlPlane, folder: Path) -> None:
        self.plane = plane
        self.folder = folder
        self.rows: list[ScaleRow] = []

    def actors(self, namespace: str) -> ClusterActors:
        """Return users of a new namespace, in which they may create pods."""
        self.plane.kubectl("create", "namespace", namespace)
        self.plane.kubectl("create", "serviceaccount", "default", "-n", namespace)
        return ClusterActors(self.plane.admin, namespace)

    def operator(self, namespace: str, name: str) -> OperatorProcess:
        """Return an operator for that namespace."""
        (port,) = free_ports(1)
        env = {"DDP_OPERATOR_NAMESPACES": namespace, "DDP_OPERATOR_LEASE_NAME": namespace}
        return OperatorProcess(self.plane.admin, self.folder / f"{name}.log", port=port, env=env)

    async def burst(self, count: int) -> None:
        """Submit many jobs at once, then write the same objects with a plain client."""
        async with self.actors("first") as actors:
            # A new API server is slow at the first call of each kind: that time is not measured.
            since = time.perf_counter()
            await write_by_hand(actors, "job", 1, {"attempt": 1})
            print(f"the first job, by hand: {time.perf_counter() - since:.2f} s")
        async with self.actors("burst") as actors:
            with self.operator("burst", "burst") as operator:
                before = await calls(operator)
                since = time.perf_counter()
                spent = cpu_seconds()
                await submit(actors, count)
                ours = time.perf_counter() - since
                spent = difference(spent, cpu_seconds())
                made = difference(before, await calls(operator))
            statuses = round(writes_of_status(made) / count)
            status = (await actors.resource("job-0", lambda resource: "status" in resource))["status"]
        async with self.actors("bare") as actors:
            since = time.perf_counter()
            spent_bare = cpu_seconds()
            await in_parallel(
                [lambda n=number: write_by_hand(actors, f"job-{n}", statuses, status) for number in range(count)]
            )
            bare = time.perf_counter() - since
            spent_bare = difference(spent_bare, cpu_seconds())
        writes = count * (1 + len(CHILDREN) + statuses)
        each = {
            f"{verb} {target}": value / count for (verb, target, code), value in sorted(made.items()) if code[0] == "2"
        }
        print(f"burst of {count} jobs, {writes} writes: operator {ours:.1f} s, bare client {bare:.1f} s")
        listed = ", ".join(f"{name} {value:.2f}" for name, value in each.items() if value > 0.1)
        for name, shares in (("operator", spent), ("bare client", spent_bare)):
            print(f"CPU seconds, {name}: {', '.join(f'{program} {value:.1f}' for program, value in shares.items())}")
        print(f"calls a job, dry runs and events included: {listed}")
        self.rows += [
            ScaleRow(f"burst of {count}: writes a second", writes / ours, "1/s", 0, most=False),
            ScaleRow(f"burst of {count}: the same against the bare client", bare / ours, "", 0.7, most=False),
            ScaleRow("burst: status updates a job until its Job is there", writes_of_status(made) / count, "", 3),
        ]

    async def latency(self, count: int) -> None:
        """Submit one job after another, and wait for each one's Job."""
        async with self.actors("idle") as actors:
            with self.operator("idle", "idle"):
                seen: dict[str, float] = {}
                watching = asyncio.create_task(note_jobs(actors, seen))
                took = []
                for number in range(count + 3):
                    await asyncio.sleep(0.15)
                    since = time.perf_counter()
                    await actors.create(job_manifest(f"job-{number}"))
                    await until(lambda: f"job-{number}-1" in seen, 0.001)  # noqa: B023
                    if number >= 3:
                        took.append((seen[f"job-{number}-1"] - since) * 1000)
                watching.cancel()
                await asyncio.gather(watching, return_exceptions=True)
        took.sort()
        self.rows.append(ScaleRow("one job at a time: resource to Job, median", took[len(took) // 2], "ms", 100))
        self.rows.append(
            ScaleRow("one job at a time: resource to Job, 99 of 100", took[int(len(took) * 0.99)], "ms", 500)
        )

    async def life(self, count: int) -> None:
        """Run jobs of two pods, make them fail, and count the writes until they run."""
        async with self.actors("life") as actors:
            with self.operator("life", "life") as operator:
                before = await calls(operator)
                for number in range(count):
                    await actors.create(job_manifest(f"job-{number}"))
                    await make_pods(actors, await actors.child_job(f"job-{number}-1"))
                    await actors.phase(f"job-{number}", "Running")
                made = difference(before, await calls(operator))
                updates = writes_of_status(made)
                created = 0
                for kind in CHILDREN:
                    created += len(await actors.list(kind, LABEL_JOB_NAME))
                took = []
                for number in range(count):
                    since = time.perf_counter()
                    await actors.finish_pod(
                        f"job-{number}-1", 1, exit_code=EXIT_RETRYABLE, message='{"category":"OOM"}'
                    )
                    await actors.resource(f"job-{number}", lambda resource: "lastFailure" in resource.get("status", {}))
                    took.append(time.perf_counter() - since)
        self.rows.append(ScaleRow("create to Running: objects created a job", created / count, "", 4))
        self.rows.append(ScaleRow("create to Running, two pods: status updates a job", updates / count, "", 3))
        self.rows.append(ScaleRow("a pod's end to lastFailure in status, longest", max(took), "s", 2))

    async def rest(self, count: int, seconds: float) -> None:
        """Keep many jobs, and measure the operator at rest, and after a restart."""
        async with self.actors("rest") as actors:
            with self.operator("rest", "rest") as operator:
                await submit(actors, count)
                since = time.perf_counter()
                await until(lambda: is_quiet(operator), 0)
                print(f"{count} jobs: all quiet {time.perf_counter() - since:.0f} s after the last Job")
                assert operator.process is not None
                process = psutil.Process(operator.process.pid)
                before = await calls(operator)
                cpu = process.cpu_times()
                await asyncio.sleep(seconds)
                after = await calls(operator)
                now = process.cpu_times()
                used = (now.user + now.system - cpu.user - cpu.system) / seconds
                rss = process.memory_info().rss / 2**20
                made = writes_in(difference(before, after))
                written = sum(made.values())
                print(f"writes at rest: {made or 'none'}")
            versions = await versions_of(actors)
            again = self.operator("rest", "again")
            since = time.perf_counter()
            with again:
                await until(lambda: looked_at(again, count), 0.05)
                settled = time.perf_counter() - since
                assert again.process is not None
                spent = psutil.Process(again.process.pid).cpu_times()
            touched = sum(versions[name] != version for name, version in (await versions_of(actors)).items())
        self.rows.append(ScaleRow(f"{count} jobs at rest: resident memory", rss, "MiB", 120))
        self.rows.append(ScaleRow(f"{count} jobs at rest: CPU of one core", used * 100, "%", 2))
        self.rows.append(ScaleRow(f"{count} jobs at rest: writes but the Lease", written, "", 0))
        self.rows.append(ScaleRow(f"restart with {count} jobs: until all are looked at", settled, "s", 30))
        self.rows.append(ScaleRow(f"restart with {count} jobs: CPU until then", spent.user + spent.system, "s", 30))
        self.rows.append(ScaleRow(f"restart with {count} jobs: objects touched", touched, "", 0))


async def until(probe: Callable[[], Any], pause: float) -> None:
    """Repeat a query until it returns true."""
    async with asyncio.timeout(PATIENCE):
        while True:
            answer = probe()
            if await answer if inspect.isawaitable(answer) else answer:
                return
            await asyncio.sleep(pause)


async def submit(actors: ClusterActors, count: int) -> None:
    """Create this many jobs, and wait for the Job of each."""
    await in_parallel([lambda n=number: actors.create(job_manifest(f"job-{n}")) for number in range(count)])

    async def all_there() -> bool:
        # A page of one contains the total: cheaper than a watch, which ends when it does not keep up.
        page = await actors.client.request("GET", path("Job", actors.namespace), params={"limit": "1"})
        return len(page["items"]) + int(page["metadata"].get("remainingItemCount", 0)) == count

    await until(all_there, 0.25)


async def looked_at(operator: OperatorProcess, count: int) -> bool:
    """Return whether the operator has reconciled this many resources, and none waits."""
    if await metric(operator, "ddp_operator_reconcile_duration_seconds_count") < count:
        return False
    return not await metric(operator, "ddp_operator_queue_depth")


async def is_quiet(operator: OperatorProcess) -> bool:
    """Watch the operator for five seconds. Return whether it has written only its Lease."""
    before = await calls(operator)
    await asyncio.sleep(5)
    return not writes_in(difference(before, await calls(operator)))


def writes_in(made: Samples) -> Samples:
    """Return the writing calls, without the Lease's renewals."""
    return {key: value for key, value in made.items() if key[0] != "get" and key[1] != "leases"}


async def write_by_hand(actors: ClusterActors, name: str, statuses: int, status: Mapping[str, Any]) -> None:
    """Write a job, its children and as many statuses, as a client without any logic would."""
    resource = await actors.create(job_manifest(name))
    for child in build_children(parse_resource(resource, SCHEMA), attempt=1, nodes=2):
        if child["kind"] == "ConfigMap":
            if "data" in child:
                continue  # the launcher is written once
            child = {**child, "metadata": child["metadata"] | {"name": name}}  # for the operator's patch
        await actors.client.request("POST", path(child["kind"], actors.namespace), body=child)
    for number in range(statuses):
        meta = resource["metadata"]
        body = {
            "apiVersion": API_VERSION, "kind": KIND,
            "metadata": {key: meta[key] for key in ("name", "namespace", "resourceVersion")},
            "status": {**status, "jobName": f"{name}-{number}"},
        }  # fmt: skip
        resource = await actors.client.request("PUT", path(KIND, actors.namespace, name, "status"), body=body)


async def make_pods(actors: ClusterActors, job: Mapping[str, Any]) -> None:
    """Create the pods of a Job and make them run."""
    for index in range(job["spec"]["completions"]):
        pod = dict(build_pod(job, index, suffix="abcde"))
        pod["metadata"] = {key: value for key, value in pod["metadata"].items() if key != "finalizers"}
        await actors.create({"apiVersion": "v1", "kind": "Pod"} | pod)
    for index in range(job["spec"]["completions"]):
        await actors.run_pod(job["metadata"]["name"], index)


async def note_jobs(actors: ClusterActors, seen: dict[str, float]) -> None:
    """Record when each Job is first observed."""
    async for job in actors.watch("Job"):
        seen.setdefault(job["metadata"]["name"], time.perf_counter())


async def versions_of(actors: ClusterActors) -> dict[tuple[str, str], str]:
    """Return the resourceVersion of every resource and child."""
    results = {}
    for kind in (KIND, *CHILDREN):
        for item in await actors.list(kind):
            results[kind, item["metadata"]["name"]] = item["metadata"]["resourceVersion"]
    return results


async def scrape(operator: OperatorProcess) -> list[Any]:
    """Return the families of an operator's page."""
    async with aiohttp.ClientSession() as session, session.get(f"{operator.url}/metrics") as answer:
        return list(text_string_to_metric_families(await answer.text()))


def cpu_seconds() -> dict[str, float]:
    """Return the CPU time of this program and of its processes so far, by their names."""
    spent: dict[str, float] = {}
    this = psutil.Process()
    for process in (this, *this.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            name = "this program" if process == this else process.name()
            spent[name] = spent.get(name, 0.0) + times.user + times.system
    return spent


async def calls(operator: OperatorProcess) -> Samples:
    """Return the calls to the API server so far."""
    return {
        (sample.labels["verb"], sample.labels["resource"], sample.labels["code"]): sample.value
        for family in await scrape(operator)
        for sample in family.samples
        if sample.name == "ddp_operator_api_requests_total"
    }


def difference(before: Mapping[Id, float], after: Mapping[Id, float]) -> dict[Id, float]:
    """Return the increase of each value in between."""
    return {key: value - before.get(key, 0) for key, value in after.items() if value > before.get(key, 0)}


def writes_of_status(made: Samples) -> float:
    """Return the number of writes of a status."""
    return made.get(("update", PLURAL, "200"), 0)


async def metric(operator: OperatorProcess, name: str) -> float:
    """Return the sum of a series."""
    return sum(s.value for family in await scrape(operator) for s in family.samples if s.name == name)


async def measure(options: argparse.Namespace) -> None:
    """Run the selected scenarios and print the table."""
    with tempfile.TemporaryDirectory() as name, ControlPlane(Path(name), controllers=False) as plane:
        plane.kubectl("apply", "--server-side", "-f", str(ROOT / "deploy" / "crds" / "ddptrainingjobs.yaml"))
        plane.kubectl("wait", "--for=condition=Established", "crd/ddptrainingjobs.ddp-operator.dev")
        bench = Bench(plane, Path(name))
        load = os.getloadavg()[0]
        steps: dict[str, Callable[[], Awaitable[None]]] = {
            "latency": lambda: bench.latency(options.samples),
            "life": lambda: bench.life(options.lives),
            "burst": lambda: bench.burst(options.burst),
            "rest": lambda: bench.rest(options.jobs, options.seconds),
        }
        for step in options.only or steps:
            await steps[step]()
    width = max(len(row.what) for row in bench.rows)
    print(f"load before {load:.1f}, after {os.getloadavg()[0]:.1f}, {os.cpu_count()} CPUs")
    print("\n".join(row.line(width) for row in bench.rows))


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--burst", type=int, default=500, help="jobs that are submitted at once")
    parser.add_argument("--jobs", type=int, default=1000, help="jobs that are kept at rest")
    parser.add_argument("--seconds", type=float, default=60, help="how long the rest is looked at")
    parser.add_argument("--samples", type=int, default=100, help="jobs that are submitted one at a time")
    parser.add_argument("--lives", type=int, default=10, help="jobs that run and fail")
    parser.add_argument("--only", action="append", choices=["latency", "life", "burst", "rest"], help="repeatable")
    asyncio.run(measure(parser.parse_args(argv)))


if __name__ == "__main__":
    main()

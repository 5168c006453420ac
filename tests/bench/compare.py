"""This operator beside JobSet, Kubeflow Trainer and KubeRay, in turn on one real control plane.

etcd, kube-apiserver, kube-controller-manager and kube-scheduler come from $KUBEBUILDER_ASSETS, the neighbours from the
variables of ``neighbours``; without a binary its column says so. This program is the kubelet. Prints one table, and the
rows in which this operator is not the best; asserts nothing:

    KUBEBUILDER_ASSETS=… JOBSET_BIN=… JOBSET_SRC=… make compare

Each round creates many jobs of two pods at once on cordoned nodes, until all pods exist. Then one job runs, and its
last pod is deleted. The time until both pods run again contains no container start and no training.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, NamedTuple

import psutil

from ddp_operator.kube.client import ResponseError
from tests.bench.neighbours import OURS, TOOLS, NotStarted, Site, Tool
from tests.bench.operator_scale import in_parallel, until
from tests.support.control_plane import NODES, ControlPlane
from tests.support.kubernetes_binaries import find_binary
from tests.support.standin import ClusterActors
from tests.support.standin.actors import running

PODS: Final = 2
"""Of each job."""
SETTLE: Final = 10.0
"""Seconds after the last pod of a burst whose CPU and calls count, and before a pod is killed."""
STABLE: Final = 15.0
"""Seconds for which all pods must run after a loss; longer than the Job controller's first back-off."""
RECOVERY_LIMIT: Final = 180.0
AUDIT_POLICY: Final = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "omitStages": ["RequestReceived", "ResponseStarted"],
    "rules": [{"level": "Metadata"}],
}


@dataclass(frozen=True)
class Row:
    """A measurement, with its unit, and whether more of it is better."""

    key: str
    title: str
    digits: int = 1
    more_is_better: bool = False


ROWS: Final = (
    Row("rate", "jobs per second until all pods exist", more_is_better=True),
    Row("cpu", "CPU of the controllers per 100 jobs, s", digits=2),
    Row("memory", "memory of the controllers after the burst, MiB", digits=0),
    Row("calls", "API calls of the controllers per job"),
    Row("recovery", "a deleted pod until all pods run again, s"),
    Row("lines", "lines of YAML for the same job", digits=0),
)


class ProcessUsage(NamedTuple):
    """What a tool's processes have used: CPU seconds, and resident MiB."""

    cpu: float
    memory: float


def read_usage(pids: Sequence[int]) -> ProcessUsage:
    """Return what processes have used so far."""
    cpu = 0.0
    memory = 0.0
    for pid in pids:
        process = psutil.Process(pid)
        times = process.cpu_times()
        cpu += times.user + times.system
        memory += process.memory_info().rss / 2**20
    return ProcessUsage(cpu, memory)


class AuditLog:
    """The API server's audit log, read from where the last reader stopped."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def count_calls(self, account: str) -> int:
        """Return the calls of a service account since the last count, without watches and leases."""
        user = f"system:serviceaccount:default:{account}"
        count = 0
        with self._path.open("rb") as log:
            log.seek(self._offset)
            for line in log:
                if not line.endswith(b"\n"):
                    break
                self._offset += len(line)
                event = json.loads(line)
                is_lease = (event.get("objectRef") or {}).get("resource") == "leases"
                count += event["user"]["username"] == user and event["verb"] != "watch" and not is_lease
        return count


class Comparison:
    """The measurements of all tools on one control plane."""

    def __init__(self, site: Site, audit: AuditLog, burst: int) -> None:
        self._site = site
        self._audit = audit
        self._burst = burst
        self.results: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        """Values by tool and row."""

    async def measure(self, tool: Tool) -> None:
        """Run one round of a tool."""
        results = self.results[tool.key]
        results["lines"] = [float(tool.count_lines())]
        with self._site.run(tool) as pids:
            self._site.plane.kubectl("cordon", *NODES)
            async with self._namespace() as actors:
                await self._measure_burst(tool, actors, pids)
            self._site.plane.kubectl("uncordon", *NODES)
            async with self._namespace() as actors:
                results["recovery"].append(await self._measure_recovery(tool, actors))
        print(f"{tool.title}: { ({key: round(values[-1], 2) for key, values in results.items()}) }", flush=True)

    async def _measure_burst(self, tool: Tool, actors: ClusterActors, pids: Sequence[int]) -> None:
        results = self.results[tool.key]
        before = read_usage(pids)
        self._audit.count_calls(tool.key)
        where = tool.jobs_path.format(actors.namespace)
        since = time.perf_counter()
        await in_parallel(
            [
                lambda number=number: actors.client.request("POST", where, body=tool.load_job(f"job-{number}"))
                for number in range(self._burst)
            ]
        )

        async def are_pods_created() -> bool:
            return await count_pods(actors) >= PODS * self._burst

        await until(are_pods_created, 0.1)
        results["rate"].append(self._burst / (time.perf_counter() - since))
        await asyncio.sleep(SETTLE)
        after = read_usage(pids)
        results["cpu"].append((after.cpu - before.cpu) * 100 / self._burst)
        results["memory"].append(after.memory)
        results["calls"].append(self._audit.count_calls(tool.key) / self._burst)

    async def _measure_recovery(self, tool: Tool, actors: ClusterActors) -> float:
        """Return the seconds from the deletion of a job's last pod until all of its pods run and stay."""
        kubelet = asyncio.create_task(run_placed_pods(actors))
        try:
            await actors.client.request("POST", tool.jobs_path.format(actors.namespace), body=tool.load_job("job"))

            async def do_all_run() -> bool:
                return len(await list_running(actors, tool)) == PODS

            await until(do_all_run, 0.1)
            await asyncio.sleep(SETTLE)
            lost = (await list_running(actors, tool))[-1]
            since = time.perf_counter()
            await actors.delete("Pod", lost)
            recovered = None
            while time.perf_counter() - since < RECOVERY_LIMIT:
                names = await list_running(actors, tool)
                now = time.perf_counter()
                if len(names) != PODS or lost in names:
                    recovered = None
                elif recovered is None:
                    recovered = now
                elif now - recovered >= STABLE:
                    return recovered - since
                await asyncio.sleep(0.05)
            return float("inf")
        finally:
            kubelet.cancel()
            await asyncio.gather(kubelet, return_exceptions=True)

    @asynccontextmanager
    async def _namespace(self) -> AsyncIterator[ClusterActors]:
        """Create a namespace, and remove it with its pods afterwards."""
        name = f"round-{time.monotonic_ns()}"
        kubectl = self._site.plane.kubectl
        kubectl("create", "namespace", name)
        async with ClusterActors(self._site.plane.admin, name) as actors:
            try:
                yield actors
            finally:
                kubectl("delete", "namespace", name, "--wait=false")
                async with actors.kubelet():
                    await until(lambda: is_gone(actors), 0.5)


async def is_gone(actors: ClusterActors) -> bool:
    """Return whether the namespace is deleted."""
    try:
        await actors.client.request("GET", f"/api/v1/namespaces/{actors.namespace}")
    except ResponseError as error:
        return error.status == 404
    return False


async def count_pods(actors: ClusterActors) -> int:
    """Return the number of pods in the namespace."""
    page = await actors.client.request("GET", f"/api/v1/namespaces/{actors.namespace}/pods", params={"limit": "1"})
    return len(page["items"]) + int(page["metadata"].get("remainingItemCount") or 0)


async def list_running(actors: ClusterActors, tool: Tool) -> list[str]:
    """Return the sorted names of a tool's pods that run and are not being deleted."""
    return sorted(
        pod["metadata"]["name"]
        for pod in await actors.list("Pod", tool.node_label)
        if pod["status"].get("phase") == "Running" and "deletionTimestamp" not in pod["metadata"]
    )


async def run_placed_pods(actors: ClusterActors) -> None:
    """Run each pod that has a node at once, and end deleted ones, as a kubelet without containers would."""
    while True:
        for pod in await actors.list("Pod"):
            is_new = pod["status"].get("phase") == "Pending" and "deletionTimestamp" not in pod["metadata"]
            if is_new and pod["spec"].get("nodeName"):
                with contextlib.suppress(ResponseError):  # deleted meanwhile
                    body = {"status": running(pod, "127.0.0.1")}
                    await actors.patch("Pod", pod["metadata"]["name"], body, "status")
        await actors.end_deleted_pods()
        await asyncio.sleep(0.05)


def format_table(results: dict[str, dict[str, list[float]]], missing: dict[str, str]) -> str:
    """Return the table in Markdown: medians, and the lowest and highest of several rounds."""
    lines = [
        "| | " + " | ".join(f"{tool.title} {tool.version}" for tool in TOOLS) + " |",
        "|---|" + "---|" * len(TOOLS),
    ]
    for row in ROWS:
        cells = []
        for tool in TOOLS:
            values = results.get(tool.key, {}).get(row.key, [])
            if row.key == "lines":
                values = [float(tool.count_lines())]
            cells.append(format_values(values, row.digits) if values else missing.get(tool.key, "not measured"))
        lines.append(f"| {row.title} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def format_values(values: Sequence[float], digits: int) -> str:
    """Return the median, and the range of several values."""
    middle = f"{statistics.median(values):.{digits}f}"
    if len(values) == 1:
        return middle
    return f"{middle} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def list_lost_rows(results: dict[str, dict[str, list[float]]]) -> list[str]:
    """Return the rows in which another tool has a better median than this operator."""
    lost = []
    for row in ROWS:
        medians = {tool: statistics.median(values) for tool in TOOLS if (values := results[tool.key].get(row.key))}
        ours = medians.pop(OURS, None)
        if ours is None or not medians:
            continue
        choose = max if row.more_is_better else min
        best = choose(medians, key=lambda tool: medians[tool])
        if choose(ours, medians[best]) != ours:
            values = f"{medians[best]:.{row.digits}f} against {ours:.{row.digits}f}"
            lost.append(f"{row.title}: {best.title} is better ({values})")
    return lost


async def compare(options: argparse.Namespace) -> None:
    """Measure all tools that can run here, and print the table."""
    missing = {tool.key: reason for tool in TOOLS if (reason := tool.find_missing()) is not None}
    present = [tool for tool in TOOLS if tool.key not in missing]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        policy = folder / "audit.json"
        policy.write_text(json.dumps(AUDIT_POLICY))
        log = folder / "audit.log"
        flags = (f"--audit-policy-file={policy}", f"--audit-log-path={log}", "--audit-log-batch-max-wait=1s")
        with ControlPlane(folder, apiserver=flags) as plane:
            site = Site(plane, folder)
            for tool in present:
                site.install(tool)
            comparison = Comparison(site, AuditLog(log), options.burst)
            for turn in range(options.rounds):
                shift = turn % len(present)
                for tool in present[shift:] + present[:shift]:  # each is first as often as last
                    if tool.key in missing:
                        continue
                    try:
                        await comparison.measure(tool)
                    except NotStarted as error:
                        missing[tool.key] = "not measured: its controller does not start"
                        print(f"{tool.title}: {error}", flush=True)
            print(f"\nKubernetes {plane.version}, {datetime.now(UTC):%d %B %Y}, {os.cpu_count()} cores, "
                  f"{platform.machine()}; {options.burst} jobs of {PODS} pods, {options.rounds} rounds")  # fmt: skip
    print(format_table(comparison.results, missing))
    lost = list_lost_rows(comparison.results)
    print("Rows that this operator loses:", "; ".join(lost) if lost else "none")


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--burst", type=int, default=100, help="jobs that are submitted at once")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of each tool, in turn")
    options = parser.parse_args(argv)
    if find_binary("kube-scheduler") is None:
        print("not run: KUBEBUILDER_ASSETS is no folder with a control plane of Kubernetes")
        return
    asyncio.run(compare(options))


if __name__ == "__main__":
    main()

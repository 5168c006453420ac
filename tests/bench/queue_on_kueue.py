"""Measure the estimate of the start on a real Kueue, with the jobs of `tests.bench.queue_world`. Asserts nothing.

The jobs are Jobs with one pod on a node whose pods run for the seconds of their annotation `rig/run-seconds` and then
succeed. The operator's reader lists the Workloads, and its cache gets a training job with the steps of each Job. Needs
KUBECONFIG, a Kueue that manages Jobs of the namespace, and the node; times are those of the world divided by `--speed`:

    python -m tests.bench.queue_on_kueue --node NAME [--strict] [--speed 30] [--jobs 200]
"""

import argparse
import asyncio
import os
import time
from collections.abc import Iterable
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, Final

import msgspec

from ddp_operator.api.constants import API_VERSION, KIND, LABEL_JOB_NAME
from ddp_operator.api.status import Status
from ddp_operator.features.queue_estimate import reader as queues
from ddp_operator.features.queue_estimate.cluster_queue import QueuedWorkload, Quotas
from ddp_operator.features.queue_estimate.estimate import Estimate, view_queue
from ddp_operator.kube.cache import ObjectCache
from ddp_operator.kube.client import ApiClient
from ddp_operator.kube.credentials import login
from tests.bench.queue_estimate import GPU, Outcome, observe_progress, summarize
from tests.bench.queue_world import SimulatedJob, WorldOptions, build_jobs

NAMESPACE: Final = "ddp-queue-bench"
KUEUE: Final = "/apis/kueue.x-k8s.io/v1beta2"
JOBS: Final = f"/apis/batch/v1/namespaces/{NAMESPACE}/jobs"
OVERHEAD: Final = 1.4
"""Measured seconds from the admission until the pod runs, and from its end until the quota is free. In the compressed
time they would be minutes, so the pod runs that much shorter."""
PAUSE: Final = 3.0
"""Seconds between two estimates."""


def build_objects(gpus: int, *, strict: bool) -> dict[str, list[Any]]:
    """Return the queue's objects by the path to which they are posted."""
    quota = {"name": GPU, "nominalQuota": str(gpus)}
    group = {"coveredResources": [GPU], "flavors": [{"name": NAMESPACE, "resources": [quota]}]}
    selector = {"matchLabels": {"kubernetes.io/metadata.name": NAMESPACE}}
    strategy = "StrictFIFO" if strict else "BestEffortFIFO"
    spec = {"namespaceSelector": selector, "queueingStrategy": strategy, "resourceGroups": [group]}
    named: dict[str, Any] = {"metadata": {"name": NAMESPACE}}
    labels = {"queue-test": "true"}
    local = {"metadata": {"name": "q", "namespace": NAMESPACE}, "spec": {"clusterQueue": NAMESPACE}}
    version = {"apiVersion": "kueue.x-k8s.io/v1beta2"}
    namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE, "labels": labels}}
    return {
        "/api/v1/namespaces": [namespace],
        f"{KUEUE}/resourceflavors": [version | named | {"kind": "ResourceFlavor"}],
        f"{KUEUE}/clusterqueues": [version | named | {"kind": "ClusterQueue", "spec": spec}],
        f"{KUEUE}/namespaces/{NAMESPACE}/localqueues": [version | local | {"kind": "LocalQueue"}],
    }


def build_job(job: SimulatedJob, node: str, speed: float) -> dict[str, Any]:
    """Return the Job, without an image that any node could run."""
    container = {"name": "main", "image": "none", "resources": {"limits": {GPU: str(job.gpus)}}}
    pod = {
        "metadata": {"annotations": {"rig/run-seconds": f"{max(0.1, job.length / speed - OVERHEAD):.2f}"}},
        "spec": {
            "restartPolicy": "Never",
            "nodeSelector": {"kubernetes.io/hostname": node},
            "tolerations": [{"operator": "Exists"}],
            "containers": [container],
        },
    }
    metadata = {"name": f"j{job.number}", "labels": {"kueue.x-k8s.io/queue-name": "q"}}
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": {"suspend": True, "template": pod}}


def remember(store: ObjectCache, job: SimulatedJob, admitted: datetime, speed: float, version: int) -> None:
    """Put the Job and its training job with the present steps into the operator's cache."""
    name = f"j{job.number}"
    resource: dict[str, Any] = {"apiVersion": API_VERSION, "kind": KIND, "spec": {}}
    resource["metadata"] = {"name": name, "namespace": NAMESPACE, "uid": f"r-{name}", "resourceVersion": str(version)}
    elapsed = (datetime.now(UTC) - admitted).total_seconds() * speed
    progress = observe_progress(job, elapsed, admitted, speed)
    resource["status"] = msgspec.to_builtins(Status(progress=progress))
    store.apply(KIND, resource)
    owner = {"apiVersion": API_VERSION, "kind": KIND, "name": name, "uid": f"r-{name}", "controller": True}
    metadata = {"name": name, "namespace": NAMESPACE, "uid": f"j-{name}", "resourceVersion": "1"}
    metadata |= {"labels": {LABEL_JOB_NAME: name}, "ownerReferences": [owner]}  # type: ignore[dict-item]
    store.apply("Job", {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": {}})


class Bench:
    """The run: a task creates the jobs, another one records the estimates of all that wait."""

    def __init__(self, client: ApiClient, options: WorldOptions, node: str, speed: float) -> None:
        self.client = client
        self.options = options
        self.node = node
        self.speed = speed
        self.jobs = build_jobs(options)
        self.records: dict[str, list[tuple[float, Estimate]]] = {}
        """By the name of the Job: the Unix time of each estimate."""
        self.waited: set[str] = set()
        self.seconds: list[float] = []

    async def create_jobs(self) -> None:
        """Create the jobs at their times."""
        began = time.time()
        for job in self.jobs:
            await asyncio.sleep(max(0.0, began + job.created / self.speed - time.time()))
            await self.client.request("POST", JOBS, body=build_job(job, self.node, self.speed), kind="jobs")

    async def record_estimates(self) -> None:
        """Record estimates until cancelled."""
        store = ObjectCache()
        reader = queues.QueueReader(self.client, store)
        by_name = {f"j{job.number}": job for job in self.jobs}
        started: dict[str, datetime] = {}
        path = f"{KUEUE}/clusterqueues/{NAMESPACE}"
        quotas = Quotas(await self.client.request("GET", path, kind="clusterqueues"))
        version = 0
        while True:
            version += 1
            for name, admitted in started.items():
                remember(store, by_name[name], admitted, self.speed, version)
            contents = await reader.read(NAMESPACE, "q")
            if contents is not None:
                started = {item.job_name: item.admitted for item in contents.workloads if item.admitted}
                began = time.process_time()
                view = view_queue(contents, quotas)
                self.seconds.append(time.process_time() - began)
                for item in contents.list_pending():
                    self.waited.add(item.job_name)
                    if item.uid in view.estimates:
                        record = (contents.time.timestamp(), view.estimates[item.uid])
                        self.records.setdefault(item.job_name, []).append(record)
            await asyncio.sleep(PAUSE)

    async def read_workloads(self) -> list[QueuedWorkload]:
        """Return all Workloads of the run."""
        path = f"{KUEUE}/namespaces/{NAMESPACE}/workloads"
        answer = await self.client.request("GET", path, kind="workloads", max_bytes=256 << 20)
        return [queues.parse_workload(item) for item in answer["items"]]

    async def run(self) -> None:
        """Create the jobs and wait until those that count have started."""
        recording = asyncio.create_task(self.record_estimates())
        creating = asyncio.create_task(self.create_jobs())
        counted = {f"j{job.number}" for job in self.jobs[: self.options.jobs]}
        while True:
            await asyncio.sleep(10)
            for task in (recording, creating):
                if task.done():
                    task.result()
            workloads = await self.read_workloads()
            starts = {item.job_name for item in workloads if item.admitted}
            print(f"{len(workloads)} created, {len(starts)} started", flush=True)
            self.report(workloads, counted)
            if counted <= starts:
                recording.cancel()
                creating.cancel()
                return

    def report(self, workloads: Iterable[QueuedWorkload], counted: set[str]) -> None:
        """Print coverage and error of the first estimate and of that at half of the wait."""
        early = []
        late = []
        for item in workloads:
            records = self.records.get(item.job_name)
            if item.admitted is None or item.job_name not in counted or not records:
                continue
            created, admitted = item.created.timestamp(), item.admitted.timestamp()
            if admitted - created < 5:
                continue
            half = min(records, key=lambda record: abs(record[0] - (created + admitted) / 2))
            for (moment, estimate), outcomes in ((records[0], early), (half, late)):
                outcomes.append(Outcome(admitted - created, admitted - moment, *estimate))
        print(f"  first {summarize(early)}\n  half  {summarize(late)}", flush=True)


async def main() -> None:
    """Run the bench and delete what it has created."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--node", required=True)
    parser.add_argument("--strict", action="store_true")
    parser.add_argument("--speed", type=float, default=30.0)
    parser.add_argument("--jobs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    queues.MIN_AGE = 1.0  # type: ignore[misc]
    queues.LISTED_PER_SECOND = 1000  # type: ignore[misc]
    client = ApiClient(lambda: login(os.environ["KUBECONFIG"]))
    options = WorldOptions(jobs=arguments.jobs, strict=arguments.strict, seed=arguments.seed)
    objects = build_objects(options.gpus, strict=options.strict)
    for path, items in objects.items():
        for item in items:
            with suppress(Exception):
                await client.request("POST", path, body=item, kind="objects")
    bench = Bench(client, options, arguments.node, arguments.speed)
    try:
        await bench.run()
    finally:
        print(f"waited {len(bench.waited)}; an estimate took {max(bench.seconds, default=0):.2f} s of CPU at most")
        for path in reversed(objects):
            await client.request("DELETE", f"{path}/{objects[path][0]['metadata']['name']}", kind="objects")
        await client.close()


if __name__ == "__main__":
    asyncio.run(main())

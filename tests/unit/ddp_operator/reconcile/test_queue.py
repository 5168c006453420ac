"""A job that waits in Kueue: its place in the status, and few writes of it."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any, cast

import pytest

from ddp_operator.api.cluster import Cluster, Refused
from ddp_operator.api.cluster_queue import QueueContents, QueuedWorkload
from ddp_operator.api.kubeobjects import format_time
from ddp_operator.api.status import Progress, Status
from ddp_operator.decide.hooks import Hooks
from ddp_operator.reconcile.observer import Observer
from ddp_operator.reconcile.turns import Turns
from tests.support.builders import NOW, resource
from tests.support.fake_cluster import ReconcilerHarness

GPU = "nvidia.com/gpu"


def queued(uid: str, gpus: float, **times: Any) -> QueuedWorkload:
    """Return a Workload of the ClusterQueue, waiting unless it is ``admitted``."""
    usage = (((GPU, GPU), gpus),) if times else ()
    holder = "gpu" if times else ""
    fields = {"admitted": None, "finished": None, **times}
    return QueuedWorkload(
        uid, ("default", "q"), uid, 0, NOW, {GPU: gpus}, usage, holder, **fields, seconds_limit=1e9, active=True
    )


class QueueDriver:
    """A harness whose job waits behind a running Workload; ``contents`` is what the operator reads."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, gpus: float = 8) -> None:
        self.harness = ReconcilerHarness(resource(labels={"kueue.x-k8s.io/queue-name": "q"}, nodes=1))
        self.left = 1200.0
        self.gpus = gpus
        self.refused = False
        for name in ("workloads_of", "kueue_object", "queue_contents"):
            monkeypatch.setattr(self.harness.cluster, name, getattr(self, name))

    async def start(self) -> ReconcilerHarness:
        await self.harness.settle()
        job = self.harness.cluster.store.list("Job")[0]
        self.harness.cluster.store.change(job, spec={**job["spec"], "suspend": True})
        return await self.wait(60)

    async def wait(self, seconds: float) -> ReconcilerHarness:
        self.harness.clock.advance(seconds)
        return await self.harness.settle()

    async def workloads_of(self, job: Any) -> Any:
        metadata = {"name": "w", "namespace": "default", "uid": "mine", "creationTimestamp": format_time(NOW)}
        return ({"metadata": metadata, "spec": {"queueName": "q"}},)

    async def kueue_object(self, kind: str, namespace: str | None, name: str) -> Any:
        if kind == "LocalQueue":
            return {"metadata": {"name": name}, "spec": {"clusterQueue": "gpu"}}
        flavor = {"name": GPU, "resources": [{"name": GPU, "nominalQuota": "8"}]}
        return {"spec": {"resourceGroups": [{"flavors": [flavor]}]}}

    async def queue_contents(self, namespace: str, name: str) -> QueueContents | None:
        if self.refused:
            raise Refused("workloads is forbidden", reason="Forbidden")
        now = self.harness.clock()
        ended = [
            queued(f"old{n}", 8, admitted=NOW - timedelta(hours=2), finished=NOW - timedelta(hours=1)) for n in range(5)
        ]
        running = queued("run", 8, admitted=NOW)
        elapsed = (now - NOW).total_seconds()
        step = round(1000 * elapsed / (elapsed + self.left))
        progress = Progress(step=step, total_steps=1000, eta_seconds=round(self.left))
        workloads = [*ended, running, queued("mine", self.gpus)]
        return QueueContents("gpu", workloads, {"run": Status(progress=progress)}, now)


async def test_status_has_place_and_estimate(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = QueueDriver(monkeypatch)
    harness = await driver.start()
    queue = harness.status.queue
    assert queue is not None
    assert queue.start_p50 is not None
    assert queue.start_p90 is not None
    assert (queue.cluster_queue, queue.position, queue.of, queue.waits_for) == ("gpu", 1, 1, f"{GPU}: 8 > 0")
    assert abs((queue.start_p50 - harness.clock()).total_seconds() - 1200) < 90
    assert harness.state("Scheduled") == ("False", "QuotaPending")
    assert harness.condition("Scheduled").message == (
        "Job train-1 is waiting for admission by queue q; position 1/1 in ClusterQueue gpu, requested > free quota "
        f"({GPU}: 8 > 0); expected start {format_time(queue.start_p50)}, with 90 % by {format_time(queue.start_p90)}"
    )


async def test_estimate_is_written_when_it_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = QueueDriver(monkeypatch)
    harness = await driver.start()
    version = harness.version
    for _ in range(5):
        driver.left -= 60
        await driver.wait(60)
    assert harness.version == version, "the time that passes changes no estimate"
    driver.left += 900
    await driver.wait(60)
    assert harness.version != version

    driver.left = 0
    await driver.wait(3600)
    version = harness.version
    for _ in range(3):
        await driver.wait(60)
    assert harness.version == version, "the start is due, and late"


async def test_place_ends_with_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = QueueDriver(monkeypatch)
    harness = await driver.start()
    job = harness.cluster.store.list("Job")[0]
    harness.cluster.store.change(job, spec={**job["spec"], "suspend": False})
    await driver.wait(1)
    assert harness.status.queue is None


async def test_job_above_quota_is_inadmissible_before_kueue_tries_it(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = await QueueDriver(monkeypatch, gpus=9).start()
    assert harness.state("Scheduled") == ("False", "Inadmissible")
    assert f"ClusterQueue gpu, request > maximum capacity ({GPU}: 9 > 8)" in harness.condition("Scheduled").message
    assert harness.status.queue is None


async def test_forbidden_queue_leaves_reason_without_place(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = QueueDriver(monkeypatch)
    driver.refused = True
    harness = await driver.start()
    assert harness.state("Scheduled") == ("False", "QuotaPending")
    assert harness.status.queue is None


class TwoQueues:
    """A cluster with a ClusterQueue that is read slowly."""

    def __init__(self) -> None:
        self.resume = asyncio.Event()
        self.read: list[str] = []
        self.contents = {name: QueueContents(name, [queued("mine", 8)], {}, NOW) for name in ("slow", "quick")}

    async def queue_contents(self, namespace: str, name: str) -> QueueContents:
        """Return the ClusterQueue with the name of the LocalQueue."""
        return self.contents[name]

    async def kueue_object(self, kind: str, namespace: str | None, name: str) -> Any:
        """Return the quotas of a ClusterQueue."""
        self.read.append(name)
        if name == "slow":
            await self.resume.wait()
        return {}


async def test_slow_read_of_a_cluster_queue_delays_its_own_jobs_only() -> None:
    cluster = TwoQueues()
    observer = Observer(cast(Cluster, cluster), lambda: NOW, Turns(), 10.0, Hooks())
    slow, quick = ({"metadata": {"namespace": "team"}, "spec": {"queueName": name}} for name in ("slow", "quick"))
    waiting = [asyncio.create_task(observer._view_queue(slow)) for _ in range(3)]
    await asyncio.sleep(0)
    assert await asyncio.wait_for(observer._view_queue(quick), 60) is not None
    assert not any(task.done() for task in waiting)
    cluster.resume.set()
    views = await asyncio.gather(*waiting)
    assert views[0] is not None
    assert views == [views[0]] * 3
    assert sorted(cluster.read) == ["quick", "slow"], "one read for all jobs of a queue"

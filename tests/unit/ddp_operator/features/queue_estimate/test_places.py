"""A job that waits in Kueue: its place in the status, and few writes of it."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any, cast

import pytest

from ddp_operator.api.cluster_errors import ClusterError, Refused
from ddp_operator.api.display_texts import format_duration
from ddp_operator.api.status import Progress, QueueStatus, Status
from ddp_operator.decide import conditions as c
from ddp_operator.decide.queue_places import QueuePlace
from ddp_operator.decide.report import format_number
from ddp_operator.features.queue_estimate import places
from ddp_operator.features.queue_estimate.cluster_queue import QueueContents, QueuedWorkload, Quotas
from ddp_operator.features.queue_estimate.places import QueuePlaces
from ddp_operator.features.queue_estimate.reader import QueueReader
from tests.support.builders import NOW
from tests.support.queued_job import QueuedJob

GPU = "nvidia.com/gpu"


def queued(uid: str, gpus: float, **times: Any) -> QueuedWorkload:
    """Return a Workload of the ClusterQueue, waiting unless it is ``admitted``."""
    usage = (((GPU, GPU), gpus),) if times else ()
    holder = "gpu" if times else ""
    fields = {"admitted": None, "finished": None, **times}
    return QueuedWorkload(
        uid, ("default", "q"), uid, 0, NOW, {GPU: gpus}, usage, holder, **fields, seconds_limit=1e9, active=True
    )


class QueueDriver(QueuedJob):
    """A job that waits behind a running Workload. It is the reader of the service, too."""

    def __init__(self, gpus: float = 8) -> None:
        super().__init__({"queue-estimate": QueuePlaces(cast(QueueReader, self))})
        self.left = 1200.0
        self.gpus = gpus
        self.error: Exception | None = None

    async def read_quotas(self, name: str) -> Quotas:
        flavor = {"name": GPU, "resources": [{"name": GPU, "nominalQuota": "8"}]}
        return Quotas({"spec": {"resourceGroups": [{"flavors": [flavor]}]}})

    async def read(self, namespace: str, name: str) -> QueueContents | None:
        if self.error is not None:
            raise self.error
        now = self.harness.clock()
        ended = [
            queued(f"old{n}", 8, admitted=NOW - timedelta(hours=2), finished=NOW - timedelta(hours=1)) for n in range(5)
        ]
        running = queued("run", 8, admitted=NOW)
        elapsed = (now - NOW).total_seconds()
        step = round(1000 * elapsed / (elapsed + self.left))
        rate = format_number((1000 - step) / self.left)
        progress = Progress(step=step, total_steps=1000, steps_per_second=rate, eta=format_duration(self.left))
        workloads = [*ended, running, queued("mine", self.gpus)]
        return QueueContents("gpu", workloads, {"run": Status(progress=progress)}, now)


async def test_status_has_place_and_estimate() -> None:
    driver = QueueDriver()
    harness = await driver.start()
    queue = harness.status.queue
    assert queue is not None
    assert queue.start_p50 is not None
    assert queue.start_p90 is not None
    assert (queue.cluster_queue, queue.position, queue.of, queue.waits_for) == ("gpu", 1, 1, f"{GPU}: 8 > 0")
    assert abs((queue.start_p50 - harness.clock()).total_seconds() - 1200) < 90
    assert harness.state("Scheduled") == ("False", "QuotaPending")


async def test_estimate_is_written_when_it_changes() -> None:
    driver = QueueDriver()
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


async def test_place_ends_with_the_wait() -> None:
    driver = QueueDriver()
    harness = await driver.start()
    await driver.admit()
    assert harness.status.queue is None


async def test_job_above_quota_is_inadmissible_before_kueue_tries_it() -> None:
    harness = await QueueDriver(gpus=9).start()
    assert harness.state("Scheduled") == ("False", "Inadmissible")
    assert f"ClusterQueue gpu, request > maximum capacity ({GPU}: 9 > 8)" in harness.condition("Scheduled").message
    assert harness.status.queue is None


@pytest.mark.parametrize("error", [Refused("forbidden", reason="Forbidden"), ClusterError("slow")])
async def test_unreadable_queue_leaves_reason_without_place(error: Exception) -> None:
    driver = QueueDriver()
    driver.error = error
    harness = await driver.start()
    assert harness.state("Scheduled") == ("False", "QuotaPending")
    assert harness.status.queue is None
    assert harness.status.condition(c.FEATURES_WORK) is None


class TwoQueues:
    """A reader with a ClusterQueue that is read slowly."""

    def __init__(self) -> None:
        self.resume = asyncio.Event()
        self.quotas_read: list[str] = []
        self.contents = {name: QueueContents(name, [queued("mine", 8)], {}, NOW) for name in ("slow", "quick")}

    async def read(self, namespace: str, name: str) -> QueueContents:
        """Return the ClusterQueue with the name of the LocalQueue."""
        return self.contents[name.removesuffix("-too")]

    async def read_quotas(self, name: str) -> Quotas:
        """Return the quotas of a ClusterQueue."""
        self.quotas_read.append(name)
        if name == "slow":
            await self.resume.wait()
        return Quotas({})


def waiting_in(queue: str) -> dict[str, Any]:
    return {"metadata": {"namespace": "team", "uid": "mine"}, "spec": {"queueName": queue}}


async def test_slow_read_of_a_cluster_queue_delays_its_own_jobs_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "SECONDS_IN_PASS", 600)
    reader = TwoQueues()
    service = QueuePlaces(cast(QueueReader, reader))
    names = ("slow", "slow", "slow-too")
    waiting = [asyncio.create_task(service.locate(waiting_in(name), None)) for name in names]
    await asyncio.sleep(0)
    assert await service.locate(waiting_in("quick"), None) is not None
    assert not any(task.done() for task in waiting)
    reader.resume.set()
    found = await asyncio.gather(*waiting)
    assert found[0] is not None
    assert found == [found[0]] * 3
    assert sorted(reader.quotas_read) == ["quick", "slow"], "one read for all jobs of a queue"


async def test_read_that_is_slower_than_a_pass_serves_a_later_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "SECONDS_IN_PASS", 0.01)
    reader = TwoQueues()
    service = QueuePlaces(cast(QueueReader, reader))
    before = QueueStatus(cluster_queue="slow", position=7, of=9)
    for _ in range(2):
        assert await service.locate(waiting_in("slow"), before) == QueuePlace(before)
    monkeypatch.setattr(places, "SECONDS_IN_PASS", 600)
    reader.resume.set()
    place = await service.locate(waiting_in("slow"), before)
    assert place is not None
    assert place.queue == QueueStatus(cluster_queue="slow", position=1, of=1)
    assert reader.quotas_read == ["slow"]


async def test_end_of_the_process_ends_its_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "SECONDS_IN_PASS", 0.01)
    service = QueuePlaces(cast(QueueReader, TwoQueues()))
    await service.locate(waiting_in("slow"), None)
    (task,) = service._views.values()
    await service.close()
    await asyncio.wait({task})
    assert task.cancelled()
    assert service._views == {}

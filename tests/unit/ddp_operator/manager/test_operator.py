"""What the operator's process keeps of resources beside the cache, and how many it handles at a time."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from ddp_operator.api.cluster import Key
from ddp_operator.api.constants import KIND
from ddp_operator.kube.incoming import LARGE
from ddp_operator.manager import operator
from ddp_operator.manager.operator import LARGE_AT_ONCE, Operator
from ddp_operator.manager.settings import Settings
from tests.support.builders import child_job, resource


async def test_times_of_resources_that_never_get_a_job_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operator, "MOST_ARRIVED", 3)
    process = Operator(Settings())
    for number in range(9):
        process.on_event(KIND, "ADDED", resource(name=f"job-{number}"))
    assert [key.name for key in process._arrived] == ["job-6", "job-7", "job-8"]
    process.on_event("Job", "ADDED", child_job(name="job-8"))
    assert [key.name for key in process._arrived] == ["job-6", "job-7"]


async def test_few_large_jobs_of_a_namespace_have_a_pass_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    process = Operator(Settings(workers=16))
    busy: Counter[str] = Counter()
    most: Counter[str] = Counter()
    started = asyncio.Event()
    release = asyncio.Event()
    done: list[Key] = []

    async def reconcile(key: Key) -> None:
        busy[key.namespace] += 1
        most[key.namespace] = max(most[key.namespace], busy[key.namespace])
        if key.namespace == "small":
            started.set()
        await release.wait()
        busy[key.namespace] -= 1
        done.append(key)

    monkeypatch.setattr(process.reconciler, "reconcile", reconcile)
    for number in range(8):
        for namespace, size in (("large", 2 * LARGE), ("small", 1)):
            job = resource(f"job-{number}", namespace=namespace, a="x" * size)
            job["metadata"] |= {"uid": f"{namespace}-{number}", "resourceVersion": "1"}
            process.on_event(KIND, "ADDED", job)
    process.queue.start()
    async with asyncio.timeout(60):
        await started.wait()
        assert busy["large"] <= LARGE_AT_ONCE
        release.set()
        while len(done) < 16:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    await process.queue.stop()
    assert most["large"] == LARGE_AT_ONCE

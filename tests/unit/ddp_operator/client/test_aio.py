"""The asynchronous twins: the same members, and nothing that blocks the loop or outlives it."""

from __future__ import annotations

import asyncio
import inspect
import subprocess
import sys
import threading
from typing import Any

import pytest

from ddp_operator import AsyncClient, AsyncJob, Client, Job, NotFound, TrainingFailed
from ddp_operator.client.aio import in_thread
from ddp_operator.client.logs import Line
from tests.support.fake_backend import FakeBackend

RESOURCE = {"metadata": {"name": "x", "namespace": "ml"}, "spec": {"nodes": 2}, "status": {"phase": "Running"}}


def make(*phases: str) -> AsyncJob:
    lines = (Line("1", "rank 0", "a"), Line("2", "rank 1", "b"))
    backend = FakeBackend(RESOURCE, *({"phase": phase} for phase in phases), lines=lines)
    return AsyncJob(Job(backend, "x", RESOURCE))


def members(kind: type) -> dict[str, Any]:
    return {name: member for name, member in inspect.getmembers_static(kind) if not name.startswith("_")}


@pytest.mark.parametrize(("sync", "twin"), [(Job, AsyncJob), (Client, AsyncClient)])
def test_both_have_the_same_members_with_the_same_arguments(sync: type, twin: type) -> None:
    given, found = members(sync), members(twin)
    attributes = {"name", "resource"} if sync is Job else set()  # of each job, and not of the class
    assert found.keys() == given.keys() - {"backend"} | attributes
    for name, member in given.items():
        if inspect.isfunction(member):
            assert inspect.signature(found[name]).parameters == inspect.signature(member).parameters
            assert inspect.getdoc(found[name]) == inspect.getdoc(member)
    if sync is Client:
        assert inspect.signature(twin).parameters == inspect.signature(sync).parameters


async def test_methods_properties_and_lines_are_awaited() -> None:
    job = make("Running", "Succeeded")
    assert (job.name, await job.phase, (await job.progress).step) == ("x", "Running", None)
    await job.scale(3)
    assert job.resource["spec"]["nodes"] == 3
    assert [line async for line in job.logs(rank=1)] == ["b"]
    assert [status.phase async for status in job.changes()] == ["Running", "Succeeded"]
    assert (await job.wait()).phase == "Succeeded"
    assert (await job.refresh()).name == repr(job)[12]


async def test_errors_are_those_of_the_call() -> None:
    with pytest.raises(TrainingFailed):
        await make("Failed").wait()
    job = make()
    await job.delete(wait=True)
    with pytest.raises(NotFound):
        await job.status


async def test_a_client_makes_asynchronous_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Client, "backend", FakeBackend(RESOURCE))
    client = AsyncClient(namespace="ml")
    assert [type(job) for job in [await client.get("x"), *await client.list()]] == [AsyncJob, AsyncJob]


async def test_a_cancelled_call_is_left_alone() -> None:
    go_on, over = threading.Event(), threading.Event()
    task = asyncio.create_task(in_thread(lambda: (go_on.wait(300), over.set())))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    go_on.set()
    assert await asyncio.to_thread(over.wait, 300)
    await asyncio.sleep(0)


def test_a_program_ends_though_a_call_does_not() -> None:
    code = (
        "import asyncio, threading; from ddp_operator.client.aio import in_thread; "
        "asyncio.run(asyncio.wait_for(in_thread(threading.Event().wait), 0.01))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.stderr.splitlines()[-1].startswith("TimeoutError")

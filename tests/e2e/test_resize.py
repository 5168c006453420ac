"""How long a change of an elastic job's size takes on real kubelets, and where the time goes.

The seconds are printed, from the patch of ``spec.nodes`` to the first step of all ranks of the new size. No test
asserts them.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from .conftest import UserNamespace
from .test_recovery import BEGINS, STEP, Training

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

_POLL_SECONDS = 0.1


class ResizeTimeline:
    """When each part of a change was first observed, in seconds after its request."""

    def __init__(self, job: Training, size: int) -> None:
        self._job = job
        self._size = size
        self._pods = {pod.metadata.name for pod in job.cluster.pods(job.name)}
        self._began = time.time()
        self._over = threading.Event()
        self._watcher = threading.Thread(target=self._watch)
        self.seconds: dict[str, float] = {}

    def __enter__(self) -> ResizeTimeline:
        self._watcher.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._watcher.join()

    def note(self, event: str, at: float | None = None) -> None:
        """Record an event, if it is the first of its kind. ``at``: Unix seconds."""
        self.seconds.setdefault(event, (at or time.time()) - self._began)

    def _watch(self) -> None:
        while not self._over.wait(_POLL_SECONDS):
            self._read_children()

    def _read_children(self) -> None:
        job = self._job
        name = f"{job.name}-1"
        if job.cluster.batch.read_namespaced_job(name, job.cluster.namespace).spec.parallelism == self._size:
            self.note("Job patched")
        pods = job.cluster.pods(job.name)
        new = [pod for pod in pods if pod.metadata.name not in self._pods]
        if new:
            self.note("pod created")
        if any(pod.status.phase == "Running" for pod in new):
            self.note("pod runs")
        if any(pod.metadata.deletion_timestamp for pod in pods):
            self.note("pod is being deleted")
        if len(pods) < len(self._pods):
            self.note("pod deleted")


def resize(job: Training, size: int) -> dict[str, float]:
    """Change the size; returns when each part was observed, until all ranks make steps."""
    before = len(BEGINS.findall(job.log()))
    found: list[float] = []

    def trains() -> bool:
        log = job.log()
        starts = [match for match in list(BEGINS.finditer(log))[before:] if int(match[2]) == size]
        steps = STEP.findall(log[starts[-1].end() :]) if starts else []
        found[:] = [float(steps[0][2])] if steps else []
        return bool(found)

    with ResizeTimeline(job, size) as timeline:
        job.patch(nodes=size)
        job.cluster.until(trains, f"{size} pods train")
    timeline.note("first step", found[0])
    return timeline.seconds


@pytest.mark.parametrize("sizes", [(2, 3, 2), (1, 2, 1)], ids=["2-3-2", "1-2-1"])
def test_resize_repeats_no_step_and_restarts_no_attempt(cluster: UserNamespace, sizes: tuple[int, ...]) -> None:
    job = Training(cluster, "resized", nodes=sizes[0], elastic={"minNodes": 1, "maxNodes": 3})
    done = job.trained(world=sizes[0])
    for size in sizes[1:]:
        seconds = resize(job, size)
        parts = ", ".join(f"{event} {at:.1f} s" for event, at in sorted(seconds.items(), key=lambda item: item[1]))
        print(f"to {size} pods: {parts}")
        begins = BEGINS.findall(job.log())[-1]
        assert int(begins[1]) == size
        assert int(begins[2]) >= done
        done = job.trained(since=done, world=size)

    def counts_restarts() -> bool:
        return bool(job.status["restarts"]["inPlace"] >= len(sizes) - 1)

    job.cluster.until(counts_restarts, "the restarts of the resized group are in the status")
    status: dict[str, Any] = job.status
    assert (status["attempt"], status["restarts"]["all"], status.get("lastFailure")) == (1, 0, None), status
    assert (status["lastRestart"]["cause"], status["lastRestart"]["level"]) == ("Resized", "SamePods"), status

"""A job that waits in Kueue, in the cluster in memory."""

from __future__ import annotations

from typing import Any

from ddp_operator.api.constants import KUEUE_QUEUE_LABEL
from ddp_operator.api.kubeobjects import format_time
from ddp_operator.decide.hooks import Hooks
from tests.support.builders import NOW, resource
from tests.support.fake_cluster import ReconcilerHarness


class QueuedJob:
    """A harness whose job has a pending Workload with the UID ``mine`` in the LocalQueue ``q``."""

    def __init__(self, hooks: Hooks | None = None) -> None:
        self.harness = ReconcilerHarness(resource(labels={KUEUE_QUEUE_LABEL: "q"}, nodes=1), hooks)
        self.harness.cluster.workloads_of = self._list_workloads  # type: ignore[method-assign]
        self.harness.cluster.kueue_object = self._read_queue  # type: ignore[method-assign]

    async def start(self) -> ReconcilerHarness:
        """Create the Job, which Kueue suspends."""
        await self.harness.settle()
        self._suspend(True)
        return await self.wait(60)

    async def admit(self) -> ReconcilerHarness:
        """Resume the Job, as Kueue does."""
        self._suspend(False)
        return await self.wait(1)

    async def wait(self, seconds: float) -> ReconcilerHarness:
        """Let time pass."""
        self.harness.clock.advance(seconds)
        return await self.harness.settle()

    def _suspend(self, suspended: bool) -> None:
        job = self.harness.cluster.store.list("Job")[0]
        self.harness.cluster.store.change(job, spec={**job["spec"], "suspend": suspended})

    async def _list_workloads(self, job: Any) -> Any:
        metadata = {"name": "w", "namespace": "default", "uid": "mine", "creationTimestamp": format_time(NOW)}
        return ({"metadata": metadata, "spec": {"queueName": "q"}},)

    async def _read_queue(self, kind: str, namespace: str | None, name: str) -> Any:
        return {"metadata": {"name": name}, "spec": {"clusterQueue": "gpu"}}

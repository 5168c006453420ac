"""Kueue's Workloads of all namespaces: one bounded list for all waiting jobs, in the version that is served."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from ddp_operator.api.cluster_errors import Refused
from ddp_operator.api.constants import KIND
from ddp_operator.features.queue_estimate import reader as queues
from ddp_operator.features.queue_estimate.reader import MIN_AGE, QueueReader
from ddp_operator.kube.cache import ObjectCache
from ddp_operator.kube.client import ResponseError
from tests.support.builders import NOW, child_job, resource

RESERVED = {"type": "QuotaReserved", "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z"}


class KueueServer:
    """Serves LocalQueues and Workloads of one version, two per page."""

    def __init__(self, version: str = "v1beta2") -> None:
        self.version = version
        local_queue = {"metadata": {"namespace": "team", "name": "q"}, "spec": {"clusterQueue": "gpu"}}
        self.items: dict[str, list[Any]] = {"localqueues": [local_queue], "workloads": []}
        self.error: ResponseError | None = None
        self.calls: list[str] = []

    def add(self, name: str, **status: Any) -> None:
        owners = [{"kind": "Job", "name": f"{name}-1"}]
        metadata = {"uid": name, "namespace": "team", "ownerReferences": owners}
        self.items["workloads"].append({"metadata": metadata, "spec": {"queueName": "q"}, "status": status})

    async def request(self, verb: str, path: str, *, params: dict[str, str], kind: str, max_bytes: int) -> Any:
        self.calls.append(kind)
        if path != f"/apis/kueue.x-k8s.io/{self.version}/{kind}":
            raise ResponseError(404)
        if self.error is not None:
            raise self.error
        first = int(params.get("continue", "0"))
        items = self.items[kind]
        more = {"continue": str(first + 2)} if first + 2 < len(items) else {}
        return {"items": items[first : first + 2], "metadata": more}


class Clock:
    now = NOW

    def __call__(self) -> Any:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += timedelta(seconds=seconds)


def reader(server: KueueServer, clock: Clock, store: ObjectCache | None = None) -> QueueReader:
    return QueueReader(server, store, clock=clock)  # type: ignore[arg-type]


@pytest.mark.parametrize("version", ["v1beta2", "v1beta1"])
async def test_one_list_serves_all_jobs(version: str) -> None:
    server, clock = KueueServer(version), Clock()
    for name in ("a", "b", "c"):
        server.add(name)
    server.add("run", admission={"clusterQueue": "gpu"}, conditions=[RESERVED])
    queue_reader = reader(server, clock)
    contents = await queue_reader.read("team", "q")
    assert contents is not None
    assert (contents.name, [item.uid for item in contents.workloads]) == ("gpu", ["a", "b", "c", "run"])
    calls = len(server.calls)
    clock.advance(MIN_AGE - 1)
    assert await queue_reader.read("team", "q") is contents
    assert await queue_reader.read("team", "other") is None
    assert len(server.calls) == calls
    clock.advance(1)
    assert await queue_reader.read("team", "q") is not contents


async def test_steps_are_those_of_training_job() -> None:
    server, store = KueueServer(), ObjectCache()
    item = resource("train")
    item["status"] = {"progress": {"step": 7}}
    job = child_job()
    for raw in (item, job):
        raw["metadata"] |= {"namespace": "team", "resourceVersion": "1"}
    store.apply(KIND, item)
    store.apply("Job", job)
    for name in ("train", "foreign"):
        server.add(name, admission={"clusterQueue": "gpu"}, conditions=[RESERVED])
    contents = await reader(server, Clock(), store).read("team", "q")
    assert contents is not None
    assert {uid: status.progress and status.progress.step for uid, status in contents.training.items()} == {"train": 7}


@pytest.mark.parametrize("version", ["v1beta2", "v1beta1", "v9"])
async def test_quotas_are_read_in_served_version(version: str) -> None:
    paths: list[str] = []

    class QuotaServer:
        async def request(self, verb: str, path: str, *, kind: str) -> Any:
            paths.append(path)
            if version not in path:
                raise ResponseError(404)
            flavor = {"name": "a", "resources": [{"name": "pods", "nominalQuota": "2"}]}
            return {"spec": {"resourceGroups": [{"flavors": [flavor]}]}}

    quotas = await QueueReader(QuotaServer(), None).read_quotas("gpu")  # type: ignore[arg-type]
    assert quotas.nominal == ({} if version == "v9" else {("a", "pods"): 2.0})
    versions = ["v1beta2"] if version == "v1beta2" else ["v1beta2", "v1beta1"]
    assert paths == [f"/apis/kueue.x-k8s.io/{item}/clusterqueues/gpu" for item in versions]


@pytest.mark.parametrize("cause", ["forbidden", "too many", "absent"])
async def test_refusal_is_not_read_again_at_once(cause: str, monkeypatch: pytest.MonkeyPatch) -> None:
    server, clock = KueueServer("v9" if cause == "absent" else "v1beta2"), Clock()
    for number in range(9):
        server.add(f"w{number}")
    if cause == "forbidden":
        server.error = ResponseError(403)
    monkeypatch.setattr(queues, "MOST", 5 if cause == "too many" else 10)
    queue_reader = reader(server, clock)
    for _ in range(3):
        with pytest.raises(Refused):
            await queue_reader.read("team", "q")
        clock.advance(MIN_AGE)
    calls = len(server.calls)
    clock.advance(1)
    server.error, server.version = None, "v1beta2"
    monkeypatch.setattr(queues, "MOST", 10)
    clock.advance(60)
    assert await queue_reader.read("team", "q") is not None
    assert calls <= 5

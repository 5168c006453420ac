"""What the reconcile observes of a job, from a cluster whose responses a test sets."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, cast

from ddp_operator.api import constants
from ddp_operator.api.cluster import Cluster, Key, Snapshot
from ddp_operator.api.cluster_errors import Refused
from ddp_operator.api.job import DDPTrainingJob
from ddp_operator.api.status import Status
from ddp_operator.decide.hooks import Hooks
from ddp_operator.reconcile.observer import Memory, Observer
from ddp_operator.reconcile.turns import Turns
from tests.support.builders import NOW, Json, child_job, job, respond
from tests.support.decisions import STARTED


class Answers:
    """A cluster that responds as a test sets, and records its calls."""

    def __init__(self, **pages: str) -> None:
        self.pages = pages
        self.asked: list[str] = []
        self.events: list[Json] = []
        self.nodes: Json | None = None

    async def read_report(self, pod: Json, port: int) -> bytes | None:
        self.asked.append(f"page of {pod['metadata']['name']}")
        index = pod["metadata"]["annotations"][constants.ANNOTATION_COMPLETION_INDEX]
        return respond(self.pages.get(f"pod{index}"))

    async def events_of(self, raw: Json) -> tuple[Json, ...]:
        self.asked.append(f"events of {raw['metadata']['name']}")
        return tuple(self.events)

    async def restore_labels(self, *objects: Any) -> bool:
        self.asked.append("labels")
        return False

    async def node(self, name: str) -> Json | None:
        self.asked.append(f"node {name}")
        if name == "forbidden":
            raise Refused("no", reason="Forbidden")
        return self.nodes


class Look:
    """An observer of some jobs, each with its memory, at the test's time."""

    def __init__(self, cluster: Answers | None = None, hooks: Hooks | None = None) -> None:
        self.cluster = cluster or Answers()
        self.now = NOW
        self.observer = Observer(cast(Cluster, self.cluster), lambda: self.now, Turns(), 10.0, hooks or Hooks())
        self.memories: dict[str, Memory] = {}

    async def at(
        self, *pods: Json, name: str = "train", seconds: float = 0, status: Status = STARTED, **more: Any
    ) -> Any:
        self.now = NOW + timedelta(seconds=seconds)
        typed: DDPTrainingJob = job(name, status=status, nodes=2, **more.pop("spec", {}))
        snapshot = Snapshot({}, jobs=tuple(more.pop("jobs", [child_job(name=name)])), pods=pods, **more)
        memory = self.memories.setdefault(name, Memory())
        return await self.observer.observe(Key("default", name), typed, snapshot, memory)

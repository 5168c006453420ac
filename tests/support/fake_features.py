"""Features for tests of the kernel, which knows no real one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from inspect import isawaitable
from typing import Any

from ddp_operator.api.cluster import Key, Object, Snapshot
from ddp_operator.api.job import DDPTrainingJob
from ddp_operator.api.schema import Completion, OwnFields
from ddp_operator.api.spec import SpecFields
from ddp_operator.api.status import Profile, QueueStatus
from ddp_operator.decide.hooks import Feature
from ddp_operator.decide.queue_places import LocatingService
from ddp_operator.decide.state import Children, Decision, FeatureAction
from ddp_operator.reconcile.acting import ActionContext
from ddp_operator.reconcile.completing import CompletingService
from ddp_operator.reconcile.placing import PlacementContext, PlacingService


class MenuFields(SpecFields, frozen=True, kw_only=True):
    """A member that names what completes the spec."""

    menu: str | None = None


def complete_by(
    merge: Callable[..., Any] = lambda own, values: {**values.job, **own},
    read: Callable[..., Any] = lambda raw: Profile(kind="Menu", name=raw["name"], digest="1", job=raw["job"]),
    refer: Callable[..., Any] = lambda raw: ("Menu", raw["spec"]["menu"]) if "menu" in raw["spec"] else None,
) -> Feature:
    """Return a feature that completes specs by the object that ``spec.menu`` names."""
    completion = Completion(("Menu",), "name a menu that has it in spec.menu", refer, read, merge)
    fields = OwnFields("odd", MenuFields, fixed_once="started", completion=completion)
    return Feature("odd", maturity="experimental", page="x.md", fields=fields)


class FakeService(CompletingService, PlacingService, LocatingService):
    """A service whose answers a test sets; an exception is raised."""

    def __init__(
        self,
        departures: Any = None,
        amended: Any = None,
        place: Any = None,
        acted: Any = None,
        suspicions: Any = None,
        returned: Any = frozenset(),
        placed: Mapping[str, Any] | None = None,
        manages: str = "",
        values: Any = None,
        *,
        completes: bool = False,
    ) -> None:
        self.departures = {} if departures is None else departures
        self.suspicions = {} if suspicions is None else suspicions
        self.returned = returned
        self.amended = amended
        self.place = place
        self.acted = acted
        self.placed = placed or {}
        self.manages = manages
        self.values = values
        self.completes = completes
        self.actions: list[FeatureAction] = []

    def amend(self, manifest: Object) -> Any:
        """Return ``amended``; None: the object as it is."""
        return manifest if self.amended is None else _answer(self.amended)

    async def act(self, action: FeatureAction, context: ActionContext) -> Any:
        """Return ``acted``, or await it."""
        self.actions.append(action)
        answer = _answer(self.acted)
        return await answer if isawaitable(answer) else answer

    def list_departures(self, key: Key) -> Mapping[str, str]:
        """Return ``departures``."""
        result: Mapping[str, str] = _answer(self.departures)
        return result

    def list_suspicions(self, key: Key) -> Any:
        """Return ``suspicions``."""
        return _answer(self.suspicions)

    def list_returned_nodes(self) -> Any:
        """Return ``returned``."""
        return _answer(self.returned)

    async def locate(self, workload: Object, before: QueueStatus | None) -> Any:
        """Return ``place``, or what it returns."""
        return await self.place() if callable(self.place) else _answer(self.place)

    async def find_values(self, snapshot: Snapshot) -> Any:
        """Return ``values``, or what it returns."""
        return await self.values() if callable(self.values) else _answer(self.values)

    async def follow(self, context: PlacementContext) -> Any:
        """Return ``placed["follow"]``."""
        return _answer(self.placed.get("follow"))

    async def enqueue(self, job: DDPTrainingJob, context: PlacementContext) -> Any:
        """Return ``placed["enqueue"]``."""
        return _answer(self.placed.get("enqueue"))

    async def admit(self, job: DDPTrainingJob, context: PlacementContext) -> Any:
        """Return ``placed["admit"]``, or what it returns for this job."""
        answer = self.placed.get("admit", job)
        return answer(job) if callable(answer) else _answer(answer)

    async def report_pass(
        self, job: DDPTrainingJob, decision: Decision, children: Children, context: PlacementContext
    ) -> Any:
        """Return ``placed["report_pass"]``."""
        return _answer(self.placed.get("report_pass"))


def _answer(value: Any) -> Any:
    if isinstance(value, BaseException):
        raise value
    return value

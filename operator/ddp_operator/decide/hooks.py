"""The hooks of features. The kernel calls them, and imports no feature (docs/adr/0056-features-behind-hooks.md).

This is above the kernel, whose passes know what features add to them (``decide/state.PassHooks``,
``reconcile/acting.ReconcileHooks`` and ``FeatureHooks``), but neither the features nor how their faults are contained.

A feature is a folder of ``ddp_operator.features`` and a line of its tuple. Whatever one of its hooks raises or returns
is contained here: it is counted, logged, and reported in the job's condition ``FeaturesWork``, and the pass goes on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import msgspec

from ddp_operator.api.cluster import Cluster, Key, Object, Snapshot
from ddp_operator.api.cluster_errors import ClusterError, Refused
from ddp_operator.api.conforms import conforms
from ddp_operator.api.faults import FAULTS, contain, describe_fault
from ddp_operator.api.job import DDPTrainingJob
from ddp_operator.api.posting import Posting
from ddp_operator.api.schema import OwnFields, Schema
from ddp_operator.api.spec import SpecFields
from ddp_operator.api.status import ConditionStatus, Status
from ddp_operator.decide.attempt import ObservedAttempt
from ddp_operator.decide.conditions import FEATURE_FAULT, Fact
from ddp_operator.decide.losses import LOOK_SECONDS, list_nodes_in_use
from ddp_operator.decide.state import (
    Decision,
    FeatureAction,
    Outcome,
    PassHooks,
    Refusal,
    Remark,
    State,
    Suspicion,
    Trouble,
    Verdict,
)

if TYPE_CHECKING:  # of a higher layer: what actions use
    from ddp_operator.reconcile.acting import ActionContext, NodeReadings, PodPages

SECONDS_TO_ACT = 300.0
"""Limit of one action of a feature. Jobs that end together may wait for each other in it."""

SECONDS_TO_OBSERVE = 30.0
"""Limit of a hook that reads the reports of pods, whose own limits are lower."""

MOST_NODES = 32
"""Nodes read in one pass; of a larger job the next ones are read in the next pass."""

T = TypeVar("T")
Judge = Callable[[DDPTrainingJob, "Object | None"], "Trouble | None"]
Review = Callable[[State], "Remark | None"]
"""Concludes from the state of a job, also of an ended one. A pass may call it several times, so it keeps nothing."""
Record = Callable[[State, Status], Status]
"""Returns the status with what the feature observes of the attempt."""
Prepare = Callable[[State, float], "Decision | None"]
"""Returns the decision while the feature prepares a job before attempt 1; None: it may start.

It also takes the seconds between two readings of the Job's progress. Its fault makes the job wait.
"""
Start = Callable[[Any], "Service | None"]
"""Takes a ``kube.services.ServiceContext``, which has the client: whoever decides does not load it."""
Definitions = Callable[[Schema], dict[str, dict[str, Any]]]
"""Returns the CustomResourceDefinitions of the feature's own kinds, by kind."""
JudgeAttempt = Callable[[State, bool], "Verdict | None"]
"""Returns why an attempt must not go on; with True, why one whose pods have succeeded does not count as a success."""
Conclude = Callable[[State, Status], "Fact | None"]
"""Returns a condition of a job that succeeds, from the status with the final progress."""
Account = Callable[[State, Status], Status]
"""Returns the status that is about to be written with what the feature counts."""
CheckStart = Callable[[DDPTrainingJob, Cluster], Awaitable["Refusal | None"]]
"""Returns why a job must not start now; None: it may. It may wait, and its fault makes the job wait."""
Extend = Callable[[Status, datetime], Status]
"""Returns the status that is being written with what a write adds; a change of that alone causes none."""
Explain = Callable[[ObservedAttempt, Fact], Fact]
"""Returns a condition of an attempt, Scheduled, Rendezvoused or Progressing, or the same with another cause."""
Faults = MutableMapping[tuple[str, str], str]
"""What the last call of a hook has raised, by the names of the feature and of the hook."""


def feature_job_name(name: str, feature: str) -> str:
    """Return the name of the Job of a feature, whose name is a word that is no number."""
    return f"{name}-{feature}"


class Service:
    """The part of a feature that works for all jobs: one for each process of the operator. Each method is a hook.

    ``prepare``, ``run``, ``close`` and ``act`` may wait. The others are called in passes.
    """

    async def prepare(self) -> None:
        """Read what the first Job needs. All jobs wait for it, for a limited time."""

    async def run(self) -> None:
        """Work until it is cancelled."""
        await asyncio.Event().wait()

    async def close(self) -> None:
        """Finish at the end of the process, in a limited time."""

    def amend(self, manifest: Object) -> Object:
        """Return a child with additions, before it is created. Its kind and metadata remain."""
        return manifest

    def list_departures(self, key: Key) -> Mapping[str, str]:
        """Return who requests that pods of a job leave their nodes, and why, by the name of the pod."""
        return {}

    def list_suspicions(self, key: Key) -> Mapping[str, Suspicion]:
        """Return the pods of a job that may be lost with their nodes, by the UID of the pod.

        What a feature learns later of a lost pod is for its own hook ``record``, by the name of the pod.
        """
        return {}

    def list_returned_nodes(self) -> frozenset[str]:
        """Return the lost nodes that are ready again. A job forgets that it avoids such a node."""
        return frozenset()

    def forget(self, key: Key) -> None:
        """Drop a job that has ended or was deleted."""

    async def act(self, action: FeatureAction, context: ActionContext) -> Outcome:
        """Carry out an action of a remark, in a limited time. Raises: Refused, ClusterError, as all actions do."""
        raise NotImplementedError(f"{type(self).__name__} has no action {action.what}")

    def note_status(self, snapshot: Snapshot, old: Status, new: Status, now: datetime) -> None:
        """Note that the status ``new`` of a job was written in place of ``old``."""


@dataclass(frozen=True, slots=True)
class NodeHook:
    """Judges the nodes of a job's pods.

    ``wants``: whether the job's spec asks for it, as each reading is a call. ``judge``: what is wrong with a node, as
    the API server returns it (None: it does not exist). Neither may wait.
    """

    wants: Callable[[DDPTrainingJob], bool]
    judge: Judge


@dataclass(frozen=True, slots=True)
class PodHook:
    """Observes the pods of a job, by their reports or by what others know of them.

    ``kind``: the type of what is observed, by which decisions find it. ``observe``: returns it when the report of pod
    0 is due, and takes the former one; None: there is none. It may wait, for a limited time. Raises: ClusterError.
    ``each_pass``: it is called in each pass, because it reads no reports and has intervals of its own.
    """

    kind: type
    observe: Callable[[PodPages, Any], Awaitable[object]]
    each_pass: bool = False


Maturity = Literal["stable", "beta", "experimental"]


@dataclass(frozen=True, slots=True, eq=False)
class Feature:
    """A capability that can be deleted with its folder. The hooks that it does not use are None.

    ``page``: of docs/. ``fields``: its part of the spec. ``conditions``: the types of its facts, each with the status
    that needs no attention. ``definitions``: of its own kinds. ``posting``: of the kind of its objects. ``settings``:
    the environment variables of the operator that it reads, each with a description. ``start``: returns its service;
    None: it is switched off.
    """

    name: str
    maturity: Maturity
    page: str
    fields: OwnFields[SpecFields] | None = None
    conditions: Mapping[str, ConditionStatus] = field(default_factory=dict)
    nodes: NodeHook | None = None
    pods: PodHook | None = None
    review: Review | None = None
    record: Record | None = None
    check_start: CheckStart | None = None
    prepare: Prepare | None = None
    explain: Explain | None = None
    judge: JudgeAttempt | None = None
    conclude: Conclude | None = None
    account: Account | None = None
    extend: Extend | None = None
    definitions: Definitions | None = None
    posting: Posting | None = None
    settings: type[msgspec.Struct] | None = None
    start: Start | None = None


@cache
def build_schema(features: tuple[Feature, ...]) -> Schema:
    """Return the fields of the kernel and of these features, one value for each list."""
    return Schema([feature.fields for feature in features if feature.fields is not None])


@dataclass(frozen=True, slots=True)
class Hooks:
    """The hooks of all features, and the services of this process by the name of their feature."""

    features: Sequence[Feature] = ()
    services: Mapping[str, Service] = field(default_factory=dict)

    @property
    def schema(self) -> Schema:
        """The fields of the kernel and of the features."""
        return build_schema(tuple(self.features))

    @property
    def conditions(self) -> Mapping[str, ConditionStatus]:
        """The types of the features' conditions, each with the status that needs no attention."""
        return {kind: status for feature in self.features for kind, status in feature.conditions.items()}

    def amend(self, manifest: Object) -> Object:
        """Return a child with the additions of all features."""
        guard = guard_object(manifest)
        for name, service in self.services.items():
            is_same = partial(_is_same_object, manifest)
            manifest = guard.call(
                name, "amend", partial(service.amend, manifest), Object, default=manifest, is_valid=is_same
            )
        return manifest

    def extend(self, key: Key, status: Status, now: datetime) -> Status:
        """Return a status that is being written with what the features add at each write."""
        guard = Guard(str(key))
        for feature in self.features:
            if feature.extend is not None:
                status = guard.change(feature.name, "extend", partial(feature.extend, status, now), status)
        return status

    def note_status(self, snapshot: Snapshot, old: Status, new: Status, now: datetime) -> None:
        """Tell all features that a status was written."""
        guard = guard_object(snapshot.resource)
        for name, service in self.services.items():
            guard.call(name, "note_status", partial(service.note_status, snapshot, old, new, now), None, default=None)

    def forget(self, key: Key) -> None:
        """Tell all features that a job has ended or was deleted."""
        guard = Guard(str(key))
        for name, service in self.services.items():
            guard.call(name, "forget", partial(service.forget, key), None, default=None)

    def observe(self, job: DDPTrainingJob, faults: Faults) -> JobHooks:
        """Return the hooks for one pass over a job. ``faults``: of its former passes, which this one updates."""
        return JobHooks(self, job, Guard(str(job), faults))


class Guard:
    """Calls hooks, and keeps the fault of each until it works again. ``subject``: the job or the object, for the log.

    Some hooks are called in few passes only, so the faults of a job outlive a pass.
    """

    def __init__(self, subject: str, faults: Faults | None = None) -> None:
        self._subject = subject
        self._faults = {} if faults is None else faults

    def call(
        self,
        feature: str,
        name: str,
        hook: Callable[[], T],
        kind: Any,
        *,
        default: T,
        is_valid: Callable[[T], bool] | None = None,
    ) -> T:
        """Return what a hook returns; ``default`` if it raises, or returns another type, or anything invalid."""
        result = default
        with self._contain(feature, name):
            result = _check(name, hook(), kind, is_valid)
        return result

    def change(
        self, feature: str, name: str, hook: Callable[[], T], before: T, is_valid: Callable[[T], bool] | None = None
    ) -> T:
        """Return what a hook makes of a value: one of the same type, or the former one."""
        result = before
        with self._contain(feature, name):
            changed = hook()
            if changed is not before and changed != before:
                result = _check(name, changed, type(before), is_valid)
        return result

    async def wait(
        self,
        feature: str,
        name: str,
        hook: Callable[[], Awaitable[T]],
        kind: Any,
        *,
        limit: float,
        default: T,
        is_valid: Callable[[T], bool] | None = None,
    ) -> T:
        """As ``call``, for a hook that waits for at most ``limit`` seconds. Raises: Refused, ClusterError."""
        result = default
        with self._contain(feature, name, expected=(Refused, ClusterError)):
            try:
                async with asyncio.timeout(limit) as timeout:
                    result = _check(name, await hook(), kind, is_valid)
            except TimeoutError as error:
                if not timeout.expired():
                    raise
                raise TimeoutError(f"{name} takes more than {limit:g} s") from error
            except asyncio.CancelledError as error:
                task = asyncio.current_task()
                if task is None or task.cancelling():
                    raise  # the pass is cancelled; otherwise something that the hook has waited for
                raise RuntimeError(f"{name} was cancelled") from error
        return result

    def forget(self, feature: str, name: str) -> None:
        """Forget the fault of a hook that works, or is no longer called for this job."""
        self._faults.pop((feature, name), None)

    def describe(self) -> Mapping[str, str]:
        """Return the faults by the name of the feature, one for each."""
        return {feature: fault for (feature, _), fault in self._faults.items()}

    @contextmanager
    def _contain(self, feature: str, name: str, expected: tuple[type[Exception], ...] = ()) -> Iterator[None]:
        """Keep the fault of the block, or forget the former one. ``expected``: these exceptions say nothing of it."""
        try:
            yield
        except expected:
            raise
        except Exception as error:
            FAULTS.add(f"feature {feature}", self._subject, error)
            self._faults[feature, name] = describe_fault(error)
        else:
            self.forget(feature, name)


def guard_object(manifest: Object) -> Guard:
    """Return what calls hooks about an object."""
    meta = manifest["metadata"]
    return Guard(f"{meta.get('namespace')}/{meta.get('name')}")


@dataclass(frozen=True, slots=True)
class JobHooks(PassHooks):
    """The hooks for one pass over a job."""

    hooks: Hooks
    job: DDPTrainingJob
    guard: Guard

    @property
    def faults(self) -> Mapping[str, str]:
        """What hooks have raised, by the name of the feature, one for each."""
        return self.guard.describe()

    def reads_nodes(self) -> bool:
        """Return whether a feature judges the nodes of this job's pods."""
        return bool(self._list_judges())

    async def watch_nodes(self, pages: PodPages, readings: NodeReadings) -> Mapping[str, Trouble] | None:
        """Return the troubles of the pods' nodes; None: no feature judges nodes.

        Each call reads some nodes; all other nodes keep their result.
        """
        if not self.reads_nodes():
            readings.troubles = {}
            return None
        used = list_nodes_in_use(pages.job, pages.children)
        troubles = {name: trouble for name, trouble in readings.troubles.items() if name in used}
        last = readings.time
        # The tolerance for timers that fire early. A clock that was set back does not postpone the reading.
        is_due = last is None or abs((pages.now - last).total_seconds()) >= LOOK_SECONDS * 0.9
        if used and is_due:
            readings.time = pages.now
            start = readings.next_index % len(used)
            readings.next_index = start + MOST_NODES
            for name in (*used[start:], *used[:start])[:MOST_NODES]:
                with suppress(Refused, ClusterError), contain("Node", name):
                    trouble = self.judge_node(await pages.cluster.node(name))
                    troubles.pop(name, None)
                    if trouble is not None:
                        troubles[name] = trouble
        readings.troubles = troubles
        return troubles

    def judge_node(self, raw: Object | None) -> Trouble | None:
        """Return what the features find wrong with a node; None: nothing. What is planned comes first."""
        found: list[Trouble] = []
        for feature, judge in self._list_judges():
            hook = partial(judge, self.job, raw)
            trouble = self.guard.call(feature, "judge_node", hook, Trouble | None, default=None)
            if trouble is not None:
                found.append(trouble)
        if not found:
            return None
        found.sort(key=lambda trouble: not trouble.planned)
        text = ", ".join(trouble.message for trouble in found)
        return Trouble(text[:512], found[0].planned, any(trouble.leaves for trouble in found))

    def review(self, state: State) -> tuple[Remark, ...]:
        """Return the remarks of the features."""
        nothing: Remark | None = None
        remarks = [
            self.guard.call(
                feature.name,
                "review",
                partial(feature.review, state),
                Remark | None,
                default=nothing,
                is_valid=partial(_is_own, feature.name),
            )
            for feature in self.hooks.features
            if feature.review is not None
        ]
        return tuple(remark for remark in remarks if remark is not None)

    def record(self, state: State, status: Status) -> Status:
        """Return the status with what the features observe of the attempt."""
        for feature in self.hooks.features:
            if feature.record is not None:
                status = self.guard.change(feature.name, "record", partial(feature.record, state, status), status)
        return status

    def account(self, state: State, status: Status) -> Status:
        """Return the status, which is about to be written, with what the features count."""
        for feature in self.hooks.features:
            if feature.account is not None:
                status = self.guard.change(feature.name, "account", partial(feature.account, state, status), status)
        return status

    def explain(self, attempt: ObservedAttempt, fact: Fact) -> Fact:
        """Return Scheduled, Rendezvoused or Progressing with what the features know of the cause."""
        for feature in self.hooks.features:
            if feature.explain is not None:
                hook = partial(feature.explain, attempt, fact)
                fact = self.guard.change(feature.name, "explain", hook, fact, partial(_is_about, fact.type))
        return fact

    def judge(self, state: State, *, has_succeeded: bool) -> Verdict | None:
        """Return the verdict of the first feature that objects to the attempt."""
        nothing: Verdict | None = None
        for feature in self.hooks.features:
            if feature.judge is not None:
                hook = partial(feature.judge, state, has_succeeded)
                verdict = self.guard.call(feature.name, "judge", hook, Verdict | None, default=nothing)
                if verdict is not None:
                    return verdict
        return None

    def conclude(self, state: State, status: Status) -> tuple[Fact, ...]:
        """Return the features' conditions of a job that succeeds."""
        nothing: Fact | None = None
        facts = [
            self.guard.call(
                feature.name, "conclude", partial(feature.conclude, state, status), Fact | None, default=nothing
            )
            for feature in self.hooks.features
            if feature.conclude is not None
        ]
        return tuple(fact for fact in facts if fact is not None)

    async def observe_pods(
        self, pages: PodPages, before: Mapping[str, object], *, is_due: bool = True
    ) -> dict[str, object]:
        """Return what the features observe of the pods, by their names. ``before``: the same of the last pass.

        ``is_due``: whether the report of pod 0 is. Raises: ClusterError.
        """
        observed: dict[str, object] = {}
        for feature in self.hooks.features:
            pods = feature.pods
            if pods is None:
                continue
            if not (is_due or pods.each_pass):
                if feature.name in before:
                    observed[feature.name] = before[feature.name]
                continue
            nothing: object = None
            hook = partial(pods.observe, pages, before.get(feature.name))
            is_own = partial(_is_of, pods.kind)  # its content is the feature's own
            value = await self.guard.wait(
                feature.name, "observe", hook, object, limit=SECONDS_TO_OBSERVE, default=nothing, is_valid=is_own
            )
            if value is not None:
                observed[feature.name] = value
        return observed

    async def check_start(self, cluster: Cluster) -> Refusal | None:
        """Return the first refusal of a job that has not started, also for a feature with a fault.

        Raises: Refused, ClusterError.
        """
        for feature in self.hooks.features:
            if feature.check_start is None:
                continue
            refused: Refusal | None = name_fault(feature.name)
            hook = partial(feature.check_start, self.job, cluster)
            limit = SECONDS_TO_OBSERVE
            refusal = await self.guard.wait(
                feature.name, "check_start", hook, Refusal | None, limit=limit, default=refused
            )
            if refusal is not None:
                return refusal
        return None

    def prepare(self, state: State, progress_interval: float) -> Decision | Refusal | None:
        """Return the decision of the first feature that still prepares the job; a refusal if its hook has a fault."""
        for feature in self.hooks.features:
            if feature.prepare is None:
                continue
            refused: Decision | Refusal | None = name_fault(feature.name)
            hook = partial(feature.prepare, state, progress_interval)
            prepared = self.guard.call(feature.name, "prepare", hook, Decision | None, default=refused)
            if prepared is not None:
                return prepared
        return None

    async def act(self, action: FeatureAction, context: ActionContext) -> Outcome:
        """Let a feature carry out its action. Raises: Refused, ClusterError."""
        service = self.hooks.services.get(action.feature)
        if service is None:  # it could not start
            return None
        hook = partial(service.act, action, context)
        return await self.guard.wait(action.feature, "act", hook, Outcome, limit=SECONDS_TO_ACT, default=None)

    def list_departures(self, key: Key) -> Mapping[str, str]:
        """Return who requests that pods leave their nodes, and why, by the name of the pod."""
        found: dict[str, str] = {}
        none: Mapping[str, str] = {}
        for name, service in self.hooks.services.items():
            hook = partial(service.list_departures, key)
            found.update(self.guard.call(name, "list_departures", hook, Mapping[str, str], default=none))
        return found

    def list_suspicions(self, key: Key) -> Mapping[str, Suspicion]:
        """Return the pods of the job that may be lost with their nodes, by the UID of the pod."""
        found: dict[str, Suspicion] = {}
        none: Mapping[str, Suspicion] = {}
        for name, service in self.hooks.services.items():
            hook = partial(service.list_suspicions, key)
            found.update(self.guard.call(name, "list_suspicions", hook, Mapping[str, Suspicion], default=none))
        return found

    def list_returned_nodes(self) -> frozenset[str]:
        """Return the lost nodes that are ready again."""
        none: frozenset[str] = frozenset()
        found = none
        for name, service in self.hooks.services.items():
            hook = service.list_returned_nodes
            found |= self.guard.call(name, "list_returned_nodes", hook, frozenset[str], default=none)
        return found

    def _list_judges(self) -> list[tuple[str, Judge]]:
        judges = []
        for feature in self.hooks.features:
            nodes = feature.nodes
            if nodes is None:
                continue
            if self.guard.call(feature.name, "wants", partial(nodes.wants, self.job), bool, default=False):
                judges.append((feature.name, nodes.judge))
            else:
                self.guard.forget(feature.name, "judge_node")
        return judges


def name_fault(feature: str) -> Refusal:
    """Return the refusal of a job whose placement or preparation depends on a feature that has a fault."""
    text = f"the feature {feature} does not work, so the job waits; the operator's log has the fault: report it"
    return Refusal(FEATURE_FAULT, text)


def _check(name: str, result: T, kind: Any, is_valid: Callable[[T], bool] | None) -> T:
    if not conforms(result, kind) or (is_valid is not None and not is_valid(result)):
        raise TypeError(f"{name} returned {type(result).__name__}")
    return result


def _is_of(kind: type, value: object) -> bool:
    return value is None or isinstance(value, kind)


def _is_own(feature: str, remark: Remark | None) -> bool:
    """Return whether a remark demands no action of another feature."""
    actions = () if remark is None else remark.actions
    return all(action.feature == feature for action in actions if isinstance(action, FeatureAction))


def _is_about(kind: str, fact: Fact) -> bool:
    return fact.type == kind


def _is_same_object(manifest: Object, value: Object) -> bool:
    return all(value.get(part) == manifest.get(part) for part in ("apiVersion", "kind", "metadata"))

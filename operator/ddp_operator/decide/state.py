"""The input of a decision (State, with the observation of a pass) and its outcome (Decision, with actions). Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, Protocol, TypeVar

from ddp_operator.api.job import DDPTrainingJob
from ddp_operator.api.spec import Spec
from ddp_operator.api.status import LastFailure, Status
from ddp_operator.decide.conditions import Fact
from ddp_operator.decide.failures import Termination
from ddp_operator.decide.report import Page
from ddp_operator.decide.views import JobView, NodeView, Pods, PodView

if TYPE_CHECKING:  # an attempt is observed from a state
    from ddp_operator.decide.attempt import ObservedAttempt

T = TypeVar("T")
AT_ONCE: Final = 0.0


@dataclass(frozen=True, slots=True)
class EnsureChildren:
    """Create the missing objects of an attempt: its Job, what its pods mount, and the Service."""

    attempt: int
    nodes: int


@dataclass(frozen=True, slots=True)
class DeleteJob:
    """Delete a Job of the resource and its pods."""

    name: str
    uid: str


@dataclass(frozen=True, slots=True)
class SuspendJob:
    """Set ``Job.spec.suspend``."""

    name: str
    suspend: bool


@dataclass(frozen=True, slots=True)
class ResizeJob:
    """Set ``Job.spec.completions`` and ``Job.spec.parallelism`` together."""

    name: str
    nodes: int


@dataclass(frozen=True, slots=True)
class RelabelJob:
    """Set labels and annotations of a Job that waits in a queue."""

    name: str
    metadata: Mapping[str, Mapping[str, str]]


@dataclass(frozen=True, slots=True)
class FailPod:
    """Mark a pod as failed and remove it, because its node is lost."""

    name: str
    uid: str
    message: str


@dataclass(frozen=True, slots=True)
class EvictPod:
    """Mark a pod as disrupted and delete it gracefully, because its node is drained. ``message``: by whom."""

    name: str
    uid: str
    message: str


@dataclass(frozen=True, slots=True)
class CreatePod:
    """Create the pod of a completion index before the Job controller does. ``serial``: pods replaced so far."""

    job_name: str
    index: int
    serial: int


@dataclass(frozen=True, slots=True)
class SuspendResource:
    """Set ``spec.suspend`` of the training job, because a feature demands it."""


@dataclass(frozen=True, slots=True)
class DeleteResource:
    """Delete the training job, because its time to live has expired."""


@dataclass(frozen=True, slots=True)
class FeatureAction:
    """An action that a feature carries out itself, by the hook ``act`` of its service. ``what``: for that feature."""

    feature: str
    what: str


Action = (
    EnsureChildren
    | DeleteJob
    | SuspendJob
    | ResizeJob
    | RelabelJob
    | CreatePod
    | FailPod
    | EvictPod
    | SuspendResource
    | DeleteResource
    | FeatureAction
)


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why the spec is not acceptable now. ``reason``: of the condition Accepted."""

    reason: Literal[
        "InvalidSpec",
        "VersionMismatch",
        "NameConflict",
        "ClaimInUse",
        "ProfileNotFound",
        "Forbidden",
        "ServerError",
        "FeatureFault",
    ]
    message: str


Outcome = Refusal | float | None
"""Of an action: the refusal of the API server, or the seconds until a retry; None: done."""


@dataclass(frozen=True, slots=True)
class Decision:
    """The outcome of ``decide``.

    ``requeue_after``: seconds until the next pass; None: when an object changes; 0: at once. A decision that records
    an attempt, counts, lastFailure or the end has no ``actions``: the status is written first and a later pass acts
    on it, so a crash in between loses nothing. Only the Job of attempt 1 is created before it is recorded.
    ``needs_fresh_read``: the decision depends on the end of a pod and on its termination message, which a watch may
    report late: the job's end, a failure without a root cause, a replaced pod.
    ``is_over``: the job has ended and no feature holds its resource, so that Kueue may delete it.
    """

    status: Status
    actions: tuple[Action, ...] = ()
    requeue_after: float | None = None
    needs_fresh_read: bool = False
    is_over: bool = False


@dataclass(frozen=True)
class Children:
    """The Jobs of a resource and their pods.

    ``orphans`` are pods whose Job was deleted: of a former attempt, or of a deleted resource of the same name. While
    one is alive it holds its GPUs and may still write checkpoints. ``feature_jobs`` and ``feature_pods`` belong to no
    attempt: features have created them, and the kernel leaves them alone.
    """

    jobs: tuple[JobView, ...] = ()
    pods: tuple[PodView, ...] = ()
    orphans: tuple[PodView, ...] = ()
    feature_jobs: tuple[JobView, ...] = ()
    feature_pods: tuple[PodView, ...] = ()

    @cached_property
    def _attempts(self) -> Mapping[int, Pods]:
        by_attempt: dict[int, list[PodView]] = {}
        for pod in sorted(self.pods, key=lambda pod: (pod.index, pod.created, pod.name)):
            by_attempt.setdefault(pod.attempt, []).append(pod)
        return {attempt: Pods(pods) for attempt, pods in by_attempt.items()}

    def job(self, attempt: int) -> JobView | None:
        """Return the Job of an attempt."""
        return next((job for job in self.jobs if job.attempt == attempt), None)

    def pods_of(self, attempt: int) -> Pods:
        """Return the pods of an attempt."""
        return self._attempts.get(attempt) or Pods()

    def former_alive(self, attempt: int) -> int:
        """Return the number of pods of former attempts that may still run a process."""
        orphans = sum(pod.alive for pod in self.orphans)
        return orphans + sum(pod.alive and pod.attempt < attempt for pod in self.pods)


class Problem(NamedTuple):
    """The reason and message of the latest warning about an object that does not start."""

    reason: str
    message: str


class Trouble(NamedTuple):
    """The fault of a node. ``leaves``: whether the job has to leave the node.

    ``planned``: another component empties the node on purpose; otherwise it is unhealthy.
    """

    message: str
    planned: bool
    leaves: bool


class Suspicion(NamedTuple):
    """A pod that may be lost with its node. ``message``: the evidence; ``is_lost``: whether that is enough.

    ``is_frozen``: whether its machine accepts connections, and no process there responds.
    """

    since: datetime
    message: str
    is_lost: bool
    is_frozen: bool = False


@dataclass(frozen=True, slots=True)
class Remark:
    """What a feature concludes about a job: a condition, actions, and the seconds until it has to look again.

    ``holds``: whether the resource of an ended job has to stay for that, for a limited time.
    """

    fact: Fact | None = None
    actions: tuple[SuspendResource | FeatureAction, ...] = ()
    wait: float | None = None
    holds: bool = False


@dataclass(frozen=True, slots=True)
class Verdict:
    """Why an attempt ends for a feature. ``reason``, ``message``: of the condition Failed.

    ``cause``: the job restarts with new pods instead, counted as this failure; None: it fails.
    """

    reason: str
    message: str
    cause: LastFailure | None = None
    is_final: bool = False
    """Whether the job fails although there is a cause."""


@dataclass(frozen=True, slots=True)
class Causes:
    """What a feature has read of objects that do not start. ``problems``: by the UID of the Job or the pod."""

    problems: Mapping[str, Problem] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class KnownEnds:
    """How pods have ended, where a feature knows more of it than they do. ``ends``: by the UID of the pod."""

    ends: Mapping[str, Termination] = field(default_factory=dict)


@dataclass(frozen=True)
class Observation(Children):
    """The child objects, and what nodes, Events, queues and reports state about them."""

    page: Page | None = None
    page_requested: bool = False
    """Distinguishes a page that could not be read from one that was not due."""
    page_lost_since: datetime | None = None
    """Since when pod 0's page cannot be read."""
    shared: frozenset[tuple[str, str]] = frozenset()
    """Kind and name of the job's existing child objects that all attempts share."""
    launchers: Mapping[str, str] = field(default_factory=dict)
    """UIDs of the launchers' ConfigMaps in the namespace, by name."""
    shared_complete: bool = True
    """Whether all objects exist that a replaced pod needs: the Service to find its peers, the launcher to start."""
    launcher_lost: bool = False
    """Whether the current Job's launcher was deleted and cannot be recreated, because an older operator built it."""
    nodes: Mapping[str, NodeView] = field(default_factory=dict)
    waiting_jobs: int = 0
    """Number of training jobs whose pods do not all run."""
    troubles: Mapping[str, Trouble] | None = None
    """What features find wrong with the pods' nodes, by node; None: none judges nodes."""
    departures: Mapping[str, str] = field(default_factory=dict)
    """Who requests that a pod leaves its node, and why, by the name of the pod."""
    suspicions: Mapping[str, Suspicion] = field(default_factory=dict)
    """The pods that may be lost, by the UID of the pod."""
    returned_nodes: frozenset[str] = frozenset()
    """Lost nodes that are ready again, of any job."""
    faults: Mapping[str, str] = field(default_factory=dict)
    """What the hooks of features have raised in this pass, by the name of the feature."""
    failures_in_place: tuple[tuple[PodView, Termination], ...] = ()
    """The failures after which workers were restarted in the same pods, when one is new."""
    observed: Mapping[str, object] = field(default_factory=dict)
    """What features observed of the pods, in this pass or when it was due last, by the name of the feature."""
    orphaned_since: datetime | None = None
    """Since when orphans exist that no controller deletes."""
    recheck_after: float | None = None
    """Seconds until missing child objects may appear without a watch event; None: none is missing."""

    @property
    def problems(self) -> Mapping[str, Problem]:
        """Why objects do not start, by the UID of the Job or the pod."""
        causes = self.find_observed(Causes)
        return {} if causes is None else causes.problems

    def find_observed(self, kind: type[T]) -> T | None:
        """Return what a feature observes of the pods, by its type; None: nothing, as after a fault."""
        return next((value for value in self.observed.values() if isinstance(value, kind)), None)


class PassHooks(Protocol):
    """What features add to the decision of a pass: here nothing. ``decide/hooks.JobHooks`` calls them."""

    def review(self, state: "State") -> tuple[Remark, ...]:
        """Return what features conclude about the job."""
        return ()

    def record(self, state: "State", status: Status) -> Status:
        """Return the status with what features observe of the attempt."""
        return status

    def prepare(self, state: "State", progress_interval: float) -> Decision | Refusal | None:
        """Return the decision of the feature that prepares the job before attempt 1, or why it cannot; None: no longer.

        ``progress_interval``: seconds between two readings of the progress.
        """
        return None

    def explain(self, attempt: "ObservedAttempt", fact: Fact) -> Fact:
        """Return Scheduled, Rendezvoused or Progressing with what features know of the cause."""
        return fact

    def judge(self, state: "State", *, has_succeeded: bool) -> Verdict | None:
        """Return why the attempt must not go on, or does not count as a success; None: no feature objects."""
        return None

    def conclude(self, state: "State", status: Status) -> tuple[Fact, ...]:
        """Return the features' conditions of a job that succeeds. ``status``: with the final progress."""
        return ()

    def account(self, state: "State", status: Status) -> Status:
        """Return the status, which is about to be written, with what features count."""
        return status


class _NoHooks(PassHooks):
    pass


NO_HOOKS: Final = _NoHooks()


@dataclass(frozen=True)
class State:
    """A resource, its observation, and the time. ``refusal``: why the spec is not acceptable now."""

    job: DDPTrainingJob
    observation: Observation
    now: datetime
    refusal: Refusal | None = None
    hooks: PassHooks = NO_HOOKS

    @property
    def spec(self) -> Spec:
        """The desired state."""
        return self.job.spec

    @property
    def status(self) -> Status:
        """The status as last written."""
        return self.job.status

    @cached_property
    def remarks(self) -> tuple[Remark, ...]:
        """What features conclude about the job."""
        return self.hooks.review(self)

    @cached_property
    def attempt_job(self) -> JobView | None:
        """The Job of the current attempt."""
        return self.observation.job(self.status.attempt)

    @cached_property
    def pods(self) -> Pods:
        """The pods of the current attempt."""
        return self.observation.pods_of(self.status.attempt)

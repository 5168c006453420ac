"""What a pass decided: a new status, actions on children, and when to look again."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from ddp_operator.api.status import Status


@dataclass(frozen=True, slots=True)
class EnsureChildren:
    """Create what is missing of an attempt's Service, ConfigMap and Job."""

    attempt: int
    nodes: int


@dataclass(frozen=True, slots=True)
class DeleteJob:
    """Delete one of our Jobs and its pods."""

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
    """Declare a pod failed and remove it: its node is lost and will not do so."""

    name: str
    uid: str
    message: str


@dataclass(frozen=True, slots=True)
class CreatePod:
    """Create the pod of a completion index in the Job controller's stead. ``serial``: of how many by now."""

    job_name: str
    index: int
    serial: int


@dataclass(frozen=True, slots=True)
class SuspendResource:
    """Set ``spec.suspend`` of the training job itself: it holds GPUs and makes no step."""


@dataclass(frozen=True, slots=True)
class DeleteResource:
    """Delete the training job itself: its time to live is over."""


Action = (
    EnsureChildren
    | DeleteJob
    | SuspendJob
    | ResizeJob
    | RelabelJob
    | CreatePod
    | FailPod
    | SuspendResource
    | DeleteResource
)


@dataclass(frozen=True, slots=True)
class Refusal:
    """The resource cannot be carried out as it is, or as the API server is. ``reason`` is a reason of Accepted."""

    reason: Literal[
        "InvalidSpec",
        "VersionMismatch",
        "NameConflict",
        "ClaimInUse",
        "ProfileNotFound",
        "ProfileLocked",
        "ResourceClaimNotFound",
        "Forbidden",
        "ServerError",
    ]
    message: str


@dataclass(frozen=True, slots=True)
class Decision:
    """The outcome of ``decide``.

    ``requeue_after`` is in seconds; None: look again only when something changes; 0: at once. Where the ledger changes
    (a later attempt, restarts, lastFailure, the end), ``actions`` is empty: the ledger is written first, a later pass
    acts on it, and a crash in between loses nothing. Attempt 1 alone is made before it is written.
    ``needs_fresh_read``: what is about to be written or made rests on a pod's end, and on its termination message,
    that a watch may not have shown yet: the job's end, a failure without a root cause, a pod that is replaced.
    """

    status: Status
    actions: tuple[Action, ...] = ()
    requeue_after: float | None = None
    needs_fresh_read: bool = False


AT_ONCE: Final = 0.0

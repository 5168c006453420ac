"""The decision of a pass: a new status, actions on child objects, and when the next pass is due."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from ddp_operator.api.status import Status


@dataclass(frozen=True, slots=True)
class EnsureChildren:
    """Create the missing objects of an attempt: Service, ConfigMap and Job."""

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
class CreatePod:
    """Create the pod of a completion index before the Job controller does. ``serial``: pods replaced so far."""

    job_name: str
    index: int
    serial: int


@dataclass(frozen=True, slots=True)
class SuspendResource:
    """Set ``spec.suspend`` of the training job, because it holds GPUs without steps."""


@dataclass(frozen=True, slots=True)
class DeleteResource:
    """Delete the training job, because its time to live has expired."""


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
    """Why the spec is not acceptable now. ``reason``: of the condition Accepted."""

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

    ``requeue_after``: seconds until the next pass; None: when an object changes; 0: at once. A decision that records
    an attempt, restarts, lastFailure or the end has no ``actions``: the status is written first and a later pass acts
    on it, so a crash in between loses nothing. Only the Job of attempt 1 is created before it is recorded.
    ``needs_fresh_read``: the decision depends on the end of a pod and on its termination message, which a watch may
    report late: the job's end, a failure without a root cause, a replaced pod.
    """

    status: Status
    actions: tuple[Action, ...] = ()
    requeue_after: float | None = None
    needs_fresh_read: bool = False


AT_ONCE: Final = 0.0

"""The protocol between the reconcile and whatever runs pods: an API server (``kube``) or this machine (``local``).

Objects cross it as plain Kubernetes JSON (``dict`` with ``apiVersion``, ``kind``, ``metadata``, …) because that is
what one side speaks natively and what ``ddp render`` prints. Everything that decides lives above this line, everything
that performs lives below it; ``tests/contract`` holds every implementation to the same behaviour.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

Object = Mapping[str, Any]
"""One Kubernetes object as JSON. Never mutated once it has been handed over."""


@dataclass(frozen=True, slots=True, order=True)
class Key:
    """Which custom resource: the unit of work of the queue."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One resource and its children, as last seen.

    Children carry the label and are controlled by a resource of that name, or, as pods, by one of its Jobs. The owner's
    UID is compared by the reconcile; other objects with the label may be left out. Of a Job or a pod a snapshot holds
    the fields that are read. ConfigMaps whose label is empty are shared: they are in each snapshot of their namespace.
    """

    resource: Object
    services: tuple[Object, ...] = ()
    config_maps: tuple[Object, ...] = ()
    jobs: tuple[Object, ...] = ()
    pods: tuple[Object, ...] = ()
    policies: tuple[Object, ...] = ()


def claim_of(resource: Object) -> str | None:
    """Return the claim, or the URL, to which a resource's checkpoints go, by itself or by the profile it has taken."""
    taken = ((resource.get("status") or {}).get("profile") or {}).get("job") or {}
    parts = (taken.get("checkpoint") or {}, (resource.get("spec") or {}).get("checkpoint") or {})
    checkpoint = {name: value for part in parts for name, value in part.items()}
    claim = checkpoint.get("claimName") or checkpoint.get("url")
    return claim if isinstance(claim, str) else None


def name_claim(claim: str) -> str:
    """Return what ``claim_of`` returns as it stands in a sentence."""
    return claim if "://" in claim else f"claim {claim}"


def owner_uids(item: Object) -> set[str]:
    """Return the UIDs of an object's owners, its controller among them."""
    return {str(owner.get("uid")) for owner in (item.get("metadata") or {}).get("ownerReferences") or ()}


def controller_of(item: Object) -> Mapping[str, Any]:
    """Return the owner reference of the object's controller, empty where it has none."""
    references = (item.get("metadata") or {}).get("ownerReferences") or []
    return next((reference for reference in references if reference.get("controller")), {})


@dataclass(frozen=True, slots=True)
class Event:
    """A line for ``kubectl describe``: said once for each transition, never repeated by a later pass."""

    type: Literal["Normal", "Warning"]
    reason: str
    message: str


ChildKind = Literal["Service", "ConfigMap", "Job", "Pod", "NetworkPolicy"]


class ClusterError(Exception):
    """A call failed for a reason that a later, identical call may not meet (network, 429, 5xx): try again."""


class ServerError(ClusterError):
    """The API server answered that it cannot do it now (5xx), as ``message`` says: a webhook that is away."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class Conflict(ClusterError):
    """The resource changed since it was observed (409 on a precondition): observe again."""


class Refused(Exception):
    """The API server will never take this object as it is. ``message`` is its own."""

    def __init__(self, message: str, *, reason: Literal["Invalid", "Forbidden"]) -> None:
        super().__init__(message)
        self.message = message
        self.reason = reason


@dataclass
class AlreadyExists(Exception):
    """A create met an object of the same name; ``existing`` is that object as it is now."""

    existing: Object = field(default_factory=dict)


class Cluster(Protocol):
    """What the reconcile asks of a cluster.

    Every method may raise ClusterError; nothing else escapes but what is named.
    """

    async def observe(self, key: Key) -> Snapshot | None:
        """Return the resource and its labelled children, or None once the resource is gone.

        May be served from a cache that lags, but never behind this process's own writes.
        """

    async def fetch(self, key: Key) -> Snapshot | None:
        """Return the same as it is now, from no cache: for a decision that rests on what a cache may have missed."""

    async def resources_on_claim(self, namespace: str, claim: str) -> Iterable[Object]:
        """Return the resources of a namespace whose checkpoints go to this claim or URL, at least name and state."""

    async def create(self, manifest: Object, *, dry_run: bool = False) -> Object:
        """POST one child; return it as stored, its metadata at least.

        With ``dry_run`` it is checked by every admission step and not stored.

        Raises: AlreadyExists, Refused, ServerError.
        """

    async def add_owners(self, item: Object, references: Sequence[Object]) -> Object | None:
        """Give a ConfigMap more owners, whoever else does so at the same time; once is as good as twice.

        Returns its metadata then; None: it is gone, or another object by now. Raises: Refused.
        """

    async def job(self, namespace: str, name: str) -> Object | None:
        """Return a Job as it is now, with its whole template; those of a snapshot may have a part of it. None: gone."""

    async def patch_job(self, namespace: str, name: str, patch: Object, *, seen: Object | None = None) -> None:
        """Merge-patch a Job's labels, annotations and ``spec`` (suspend, its size). No error: it is gone.

        ``seen``: only if the Job still is as it was observed. Raises: Refused, Conflict.
        """

    async def delete(
        self, kind: ChildKind, namespace: str, name: str, *, uid: str, resource_version: str | None = None
    ) -> None:
        """Delete a child and, in the background, what it owns. Gone already or another UID by now is no error.

        Raises: Conflict where it is not at ``resource_version`` any more.
        """

    async def discard(self, manifest: Object) -> None:
        """Delete an object by its name where it has the same controlling owner as ``manifest``; none is no error.

        For objects that are not observed.
        """

    async def restore_labels(self, owner: str, namespace: str, name: str, labels: Mapping[str, str]) -> bool:
        """Give a Job and its pods these labels back where somebody has taken them away.

        ``owner``: only a Job that is controlled by this UID; none is no error. Returns whether any had lost them.

        Raises: Refused.
        """

    async def profile(self, kind: str, namespace: str, name: str) -> Object | None:
        """Return a profile, of the namespace or for all; None: there is none. Raises: Refused where it may not be read.

        As it is now, from no cache.
        """

    async def resource_claim(self, kind: str, namespace: str, name: str) -> Object | None:
        """Return a ResourceClaim or a ResourceClaimTemplate; None: there is none.

        As it is now, from no cache, in any version from v1beta1 on. Raises: Refused where it may not be read.
        """

    async def node(self, name: str) -> Object | None:
        """Return a Kubernetes node; None: there is no such node. Raises: Refused where it may not be read."""

    async def fail_pod(self, pod: Object, reason: str, message: str) -> None:
        """Declare a pod failed whose node is lost, by its status, and remove it; its Job then replaces or forgets it.

        The status says ``DisruptionTarget`` with this reason and message. A pod that is gone, or has ended meanwhile,
        is no error.
        """

    async def suspend_resource(self, key: Key, *, resource_version: str) -> None:
        """Set the custom resource's ``spec.suspend`` (it is idle). Raises: Conflict."""

    async def delete_resource(self, key: Key, *, uid: str, resource_version: str | None = None) -> None:
        """Delete the custom resource itself (its time to live is over). Raises: Conflict, as ``delete``."""

    async def patch_status(self, key: Key, status: Object, *, resource_version: str) -> None:
        """Replace the resource's status if it is still at ``resource_version``. Raises: Conflict, Refused."""

    async def events_of(self, item: Object) -> tuple[Object, ...]:
        """Return what others have posted about an object: the Job controller, the scheduler, the kubelet.

        Some 50 Events at most, which may be some seconds old.

        Raises: Refused where they may not be read.
        """

    async def workloads_of(self, job: Object) -> tuple[Object, ...]:
        """Return Kueue's Workloads of a Job: one, or none yet.

        Raises: Refused where they may not be read, or Kueue is not there.
        """

    async def local_queue(self, namespace: str, name: str) -> Object | None:
        """Return Kueue's LocalQueue of this name; None: there is none. Raises: Refused where it may not be read."""

    async def emit(self, resource: Object, event: Event) -> None:
        """Post an Event about the resource. Best effort: losing one is no error."""

    async def scrape(self, pod: Object, port: int, take: Callable[[bytes], None]) -> bool:
        """Hand the page at ``/metrics`` of a running pod to ``take``, piece by piece, as it comes.

        Returns whether all of it has come. Bounded in time (2 s) and size (1 MiB), whatever the pod does.
        """

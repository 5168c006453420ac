"""The protocol of a cluster, which the reconcile uses: an API server (``kube``) or this machine (``local``).

Objects are plain Kubernetes JSON (``dict`` with ``apiVersion``, ``kind``, ``metadata``, …), as an API server sends them
and ``ddp render`` prints them. ``tests/contract`` tests both implementations with one suite.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

Object = Mapping[str, Any]
"""One Kubernetes object as JSON. Do not mutate it after it was passed on."""


@dataclass(frozen=True, slots=True, order=True)
class Key:
    """Namespace and name of a custom resource, which is the unit of work of the queue."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A resource and its children, as last observed.

    Children have the label, and their controller is a resource of that name or, for pods, one of its Jobs. The
    reconcile compares the owner's UID. Other objects with the label may be missing. Jobs and pods have the fields that
    the operator reads. ConfigMaps with an empty label are shared: they are in each snapshot of their namespace.
    """

    resource: Object
    services: tuple[Object, ...] = ()
    config_maps: tuple[Object, ...] = ()
    jobs: tuple[Object, ...] = ()
    pods: tuple[Object, ...] = ()
    others: tuple[Object, ...] = ()
    """The children of features that all attempts share, as ``services``."""


def owner_uids(item: Object) -> set[str]:
    """Return the UIDs of an object's owners, including its controller."""
    return {str(owner.get("uid")) for owner in (item.get("metadata") or {}).get("ownerReferences") or ()}


def controller_of(item: Object) -> Mapping[str, Any]:
    """Return the owner reference of the object's controller, empty if it has none."""
    references = (item.get("metadata") or {}).get("ownerReferences") or []
    return next((reference for reference in references if reference.get("controller")), {})


@dataclass(frozen=True, slots=True)
class Event:
    """An Event for ``kubectl describe``. It is emitted once for each transition."""

    type: Literal["Normal", "Warning"]
    reason: str
    message: str


ChildKind = Literal["Service", "ConfigMap", "Job", "Pod"]


class Cluster(Protocol):
    """The calls of the reconcile to a cluster.

    Every method may raise ClusterError, and otherwise only the named exceptions.
    """

    async def observe(self, key: Key) -> Snapshot | None:
        """Return the resource and its labelled children, or None if the resource does not exist.

        The result may be from a cache, which never lags behind this process's own writes.
        """

    async def fetch(self, key: Key) -> Snapshot | None:
        """Return the result of ``observe`` without a cache, for decisions that a late watch event could falsify."""

    async def resources_on_claim(self, namespace: str, claim: str) -> Iterable[Object]:
        """Return the resources in a namespace that store checkpoints in this claim or URL, at least name and state."""

    async def create(self, manifest: Object, *, dry_run: bool = False) -> Object:
        """POST one child and return it as stored, at least its metadata.

        With ``dry_run`` all admission steps check it, and it is not stored.

        Raises: AlreadyExists, Refused, ServerError.
        """

    async def definition(self) -> Object | None:
        """Return an owner reference to the definition of the custom resource.

        None: there is none, or the operator may not read it.
        """

    async def job(self, namespace: str, name: str) -> Object | None:
        """Return the current Job with its complete template, which a snapshot may lack. None: it does not exist."""

    async def patch_job(self, namespace: str, name: str, patch: Object, *, seen: Object | None = None) -> None:
        """Merge-patch labels, annotations and ``spec`` (suspend, size) of a Job. No error if it does not exist.

        ``seen``: the observed Job, whose version is the precondition. Raises: Refused, VersionConflict.
        """

    async def delete(
        self, kind: ChildKind, namespace: str, name: str, *, uid: str, resource_version: str | None = None
    ) -> None:
        """Delete a child and, in the background, its own children. No error if it does not exist or has another UID.

        Raises: VersionConflict if it has another version than ``resource_version``.
        """

    async def discard(self, manifest: Object) -> None:
        """Delete an object by its name if it has the controller of ``manifest``. No error if it does not exist.

        Use it for objects that are not observed.
        """

    async def restore_labels(self, owner: str, namespace: str, name: str, labels: Mapping[str, str]) -> bool:
        """Restore removed labels of a Job and its pods.

        ``owner``: the UID of the Job's controller; no error if no such Job exists. Returns whether labels were missing.

        Raises: Refused.
        """

    async def node(self, name: str) -> Object | None:
        """Return a Kubernetes node; None: it does not exist. Raises: Refused if the operator may not read it."""

    async def disrupt_pod(self, pod: Object, reason: str, message: str, *, lost: bool) -> None:
        """Set the condition ``DisruptionTarget`` of a pod with this reason and message, and delete the pod.

        ``lost``: its node is lost, so its phase is set to Failed and it is removed at once. Its Job can then replace
        it. No error if the pod does not exist, or has ended meanwhile.
        """

    async def patch_resource(self, key: Key, patch: Object, *, resource_version: str) -> None:
        """Merge-patch ``spec`` or annotations of the custom resource. Raises: VersionConflict."""

    async def delete_resource(self, key: Key, *, uid: str, resource_version: str | None = None) -> None:
        """Delete the custom resource after its time to live. Raises: VersionConflict, as ``delete``."""

    async def patch_status(self, key: Key, status: Object, *, resource_version: str) -> None:
        """Replace the resource's status if it is still at ``resource_version``. Raises: VersionConflict, Refused."""

    async def events_of(self, item: Object) -> tuple[Object, ...]:
        """Return the Events of the Job controller, the scheduler and the kubelet about an object.

        They are at most about 50, and may be some seconds old. Raises: Refused if the operator may not read them.
        """

    async def read_log(self, pod: Object, container: str, lines: int, limit: int) -> bytes:
        """Return the last lines of a container's log, each after its time. Beyond ``limit`` bytes the end is missing.

        Raises: Refused if the operator may not read it, or the container has not started.
        """

    async def workloads_of(self, job: Object) -> tuple[Object, ...]:
        """Return Kueue's Workload of a Job, or an empty tuple before Kueue has created it.

        Raises: Refused if the operator may not read them, or Kueue is not installed.
        """

    async def kueue_object(self, kind: str, namespace: str | None, name: str) -> Object | None:
        """Return an object of Kueue; None: it does not exist, or Kueue is not installed.

        ``namespace`` None: the kind has no namespace. Raises: Refused if the operator may not read it.
        """

    async def patch_workload(self, workload: Object, patch: Object, *, part: Literal["status"] | None = None) -> None:
        """Merge-patch an observed Workload, or its status, at its version. Raises: Refused, VersionConflict."""

    async def emit(self, resource: Object, event: Event) -> None:
        """Post an Event about the resource, best effort."""

    async def read_report(self, pod: Object, port: int) -> bytes | None:
        """Return the report of a running pod; empty if its port serves none; None if it does not respond in time.

        Time (2 s) and size (128 KiB) are bounded.
        """

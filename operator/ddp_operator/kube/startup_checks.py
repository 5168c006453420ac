"""Checks at the operator's start: the CRD is installed, and the account has the permissions.

Kopf retries a refused watch without end, the first minute without a message, and logs a warning for a missing CRD.
"""

import asyncio
from collections.abc import Iterable, Sequence
from typing import Final

from ddp_operator.api.cluster_errors import ClusterError
from ddp_operator.api.constants import API_VERSION, CRD_NAME, GROUP, KIND, PLURAL, VERSION
from ddp_operator.api.other_kinds import CLUSTER_PROFILE_KIND, CRD_KIND, PROFILE_KIND
from ddp_operator.kube.client import ApiClient, ResponseError, StartupError
from ddp_operator.kube.resources import POSTED_EVENT, group, plural

_OF_JOBS: Final[dict[str, tuple[str, ...]]] = {
    KIND: ("get", "list", "watch", "create", "patch", "delete"),
    f"{KIND}/status": ("update",),
    "Job": ("get", "list", "watch", "create", "patch", "delete"),
    "Pod": ("get", "list", "watch", "create", "delete"),
    "Pod/status": ("patch",),
    "Pod/log": ("get",),
    "Service": ("get", "list", "watch", "create"),
    "ConfigMap": ("get", "list", "watch", "create"),
    "Secret": ("create",),
}
PERMISSIONS: Final = _OF_JOBS | {
    "Event": ("list",),
    POSTED_EVENT: ("create",),
    f"{CRD_KIND}:{CRD_NAME}": ("get",),
    CLUSTER_PROFILE_KIND: ("get",),
    PROFILE_KIND: ("get",),
    "Node": ("get",),
    "Eviction": ("list",),
    "Eviction/status": ("patch",),
    "Workload": ("get", "list", "create", "patch"),
    "Workload/status": ("patch",),
    "LocalQueue": ("get", "list"),
    "ClusterQueue": ("get",),
    "ResourceFlavor": ("get",),
    "WorkloadPriorityClass": ("get",),
}
"""Verbs of the operator's calls by kind; after a colon, only for objects of that name.

The roles in charts/ and deploy/manifests/ are generated from this table. The operator creates training jobs in dry runs
only, to check a job together with its profile. It reads the CRD to make it the owner of the launchers' ConfigMaps.
"""

WORKER_PERMISSIONS: Final[dict[str, tuple[str, ...]]] = {"Workload": ("delete",)}
"""Further permissions in a worker cluster of MultiKueue, where jobs become the owners of Workloads.

The operator deletes no Workload, but an admission plug-in demands that right of those who change an object's owner.
"""

HOME_PERMISSIONS: Final[dict[str, tuple[str, ...]]] = {"Lease": ("get", "create", "update", "delete")}
"""Permissions in the operator's own namespace, in addition to those in the served namespaces."""

NODE_PERMISSIONS: Final[dict[str, tuple[str, ...]]] = {"Lease": ("get",)}
"""Permissions in kube-node-lease, where kubelets renew the Leases of their nodes. Without them a lost node is found by
the node controller only, so they are not checked at the start."""

OPTIONAL: Final = frozenset(
    {
        f"{CRD_KIND}:{CRD_NAME}",
        *(CLUSTER_PROFILE_KIND, PROFILE_KIND, "Node", "Pod/log", "Eviction", "Eviction/status"),
        *("Workload", "Workload/status", "LocalQueue", "ClusterQueue", "ResourceFlavor", "WorkloadPriorityClass"),
    }
)
"""Kinds that the operator works without. A Role cannot grant cluster-scoped kinds. Without nodes, pods on lost nodes
are removed later. Without the CRD the launchers have no owner. A job is refused if it needs a profile that
the operator may not read. Without pods/log the records of ended jobs have no lines. Without Kueue's kinds
the status lacks the reason why a job waits in a queue, or its position there. Without Evictions (Kubernetes 1.37) an
EvictionRequest evicts a pod without the operator. A job of MultiKueue is refused without Kueue's kinds."""


def list_permissions(shared_kinds: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Return PERMISSIONS with those for the kinds that features share between the attempts of a job."""
    shared = dict.fromkeys(sorted(shared_kinds), ("get", "list", "watch", "create"))
    return _OF_JOBS | shared | PERMISSIONS


def split_permission(what: str) -> tuple[str, str, str]:
    """Return kind, subresource and name of a key of the tables; an absent part is empty."""
    kind, _, name = what.partition(":")
    kind, _, subresource = kind.partition("/")
    return kind, subresource, name


async def check_cluster(
    client: ApiClient, namespaces: Sequence[str], *, home: str, shared_kinds: Iterable[str] = ()
) -> None:
    """Check the CRD and the permissions.

    ``home``: the operator's own namespace, which has its Lease. ``shared_kinds``: of features, see list_permissions.

    Raises: StartupError.
    """
    try:
        await client.connect()
        await _check_crd(client)
        missing = await _missing_permissions(client, namespaces, home, shared_kinds)
    except ClusterError as exc:
        raise StartupError(f"cannot reach the API server: {exc}") from None
    except ResponseError as exc:
        raise StartupError(f"the API server refused the operator's request: {exc} (HTTP {exc.status})") from None
    if missing:
        raise StartupError(
            "permissions are missing: " + "; ".join(missing) + ". Bind the operator's account to the role in "
            "deploy/manifests/rbac.yaml, or set DDP_OPERATOR_NAMESPACES to the namespaces that it may serve"
        )


async def find_loss(client: ApiClient) -> str | None:
    """Return that the CRD was removed, and the consequences; None if it exists or cannot be checked."""
    try:
        await _check_crd(client)
    except StartupError as exc:
        return f"{exc}. Kubernetes deleted all jobs with it; apply them again to resume from their checkpoints"
    except (ClusterError, ResponseError):
        pass
    return None


async def _check_crd(client: ApiClient) -> None:
    """Check the CRD by API discovery, which needs no permission. Raises: StartupError, ClusterError, ResponseError."""
    try:
        discovery = await client.request("GET", f"/apis/{GROUP}/{VERSION}", kind="apis")
    except ResponseError as exc:
        if exc.status != 404:
            raise
        discovery = {}
    names = {resource.get("name") for resource in discovery.get("resources") or []}
    if PLURAL not in names:
        raise StartupError(
            f"the custom resource {CRD_NAME} is not installed: "
            f"run `kubectl apply --server-side -f deploy/crds/{PLURAL}.yaml`"
        )
    if f"{PLURAL}/status" not in names:
        raise StartupError(
            f"{CRD_NAME} has no status subresource in {API_VERSION}: run `kubectl apply --server-side -f deploy/crds`"
        )


async def _missing_permissions(
    client: ApiClient, namespaces: Sequence[str], home: str, shared_kinds: Iterable[str]
) -> list[str]:
    """Return the missing permissions, one text for each resource and scope. Raises: ClusterError, ResponseError."""
    required: list[tuple[str, str, str | None]] = []
    scopes: list[str | None] = [*namespaces] or [None]
    served = {what: verbs for what, verbs in list_permissions(shared_kinds).items() if what not in OPTIONAL}
    for scope in scopes:
        required += [(permission, verb, scope) for permission, verbs in served.items() for verb in verbs]
    required += [(permission, verb, home) for permission, verbs in HOME_PERMISSIONS.items() for verb in verbs]

    reviews = (_is_allowed(client, permission, verb, scope) for permission, verb, scope in required)
    results = await asyncio.gather(*reviews)

    missing: dict[str, list[str]] = {}
    for (permission, verb, scope), is_allowed in zip(required, results, strict=True):
        if not is_allowed:
            scope_text = f"in namespace {scope}" if scope else "in all namespaces"
            missing.setdefault(f"{_describe_permission(permission)} {scope_text}", []).append(verb)
    return [f"{', '.join(verbs)} {description}" for description, verbs in missing.items()]


def _describe_permission(permission: str) -> str:
    """Return the resource of a permission, such as ``jobs.batch``, ``pods/status`` or ``configmaps NAME``."""
    kind, subresource, name = split_permission(permission)
    resource = f"{plural(kind)}.{group(kind)}" if group(kind) else plural(kind)
    if subresource:
        return f"{resource}/{subresource}"
    if name:
        return f"{resource} {name}"
    return resource


async def _is_allowed(client: ApiClient, permission: str, verb: str, namespace: str | None) -> bool:
    kind, subresource, name = split_permission(permission)
    attributes = {
        "group": group(kind),
        "resource": plural(kind),
        "verb": verb,
        "subresource": subresource,
        "name": name,
        "namespace": namespace or "",
    }
    review = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectAccessReview",
        "spec": {"resourceAttributes": {attribute: value for attribute, value in attributes.items() if value}},
    }
    response = await client.request(
        "POST", "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews", body=review, kind="selfsubjectaccessreviews"
    )
    return bool((response.get("status") or {}).get("allowed"))

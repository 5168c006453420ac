"""What must be there before the operator can work: the CRD and the permissions.

Kopf would retry a refused watch in silence for a minute and then for ever; a missing CRD it mentions in a warning.
"""

import asyncio
from collections.abc import Sequence
from typing import Final

from ddp_operator.cluster import ClusterError
from ddp_operator.constants import (
    API_VERSION,
    CLUSTER_PROFILE_KIND,
    CRD_NAME,
    GROUP,
    KIND,
    LAUNCHER_USERS,
    PLURAL,
    PROFILE_KIND,
    VERSION,
)
from ddp_operator.kube.client import ApiClient, ApiError, StartupError
from ddp_operator.kube.resources import group, plural

PERMISSIONS: Final[dict[str, tuple[str, ...]]] = {
    KIND: ("get", "list", "watch", "create", "patch", "delete"),
    f"{KIND}/status": ("update",),
    "Job": ("get", "list", "watch", "create", "patch", "delete"),
    "Pod": ("get", "list", "watch", "create", "delete"),
    "Pod/status": ("patch",),
    "Service": ("get", "list", "create"),
    "ConfigMap": ("get", "list", "create"),
    f"ConfigMap:{LAUNCHER_USERS}": ("patch", "delete"),
    "NetworkPolicy": ("get", "list", "create"),
    "Event": ("list", "create"),
    CLUSTER_PROFILE_KIND: ("get",),
    PROFILE_KIND: ("get",),
    "Node": ("get",),
    "Workload": ("list",),
    "LocalQueue": ("get",),
    "ResourceClaim": ("get",),
    "ResourceClaimTemplate": ("get",),
}
"""Every call the operator makes, by kind, and behind a colon only to objects of that name.

The roles in charts/ and deploy/manifests/ are generated from this table. Jobs are created in dry runs only, to have the
rules tried on what a job and its profile are together. Nothing deletes a ConfigMap, but where the
admission plug-in OwnerReferencesPermissionEnforcement is on, only those who may delete an object may add to its owners.
"""

GANG_PERMISSIONS: Final[dict[str, dict[str, tuple[str, ...]]]] = {
    "coscheduling": {"PodGroup.scheduling.x-k8s.io": ("get", "create", "delete")},
    "volcano": {"PodGroup.scheduling.volcano.sh": ("get", "create", "delete")},
}
"""What ``spec.scheduling.gang`` needs on top, where a cluster has such a scheduler. Not asked for at the start: without
them only the jobs that ask for it are refused."""

HOME_PERMISSIONS: Final[dict[str, tuple[str, ...]]] = {"Lease": ("get", "create", "update")}
"""What the operator does in its own namespace, whichever it serves."""

OPTIONAL: Final = frozenset(
    {CLUSTER_PROFILE_KIND, PROFILE_KIND, "Node", "Workload", "LocalQueue", "ResourceClaim", "ResourceClaimTemplate"}
)
"""What an operator works without. A Role of one namespace can't grant nodes: pods on lost ones are then freed later;
nor profiles of the cluster: jobs that name one are refused, and say so, as are those whose processes follow from a
resource claim that cannot be read.
Without Kueue's Workloads and LocalQueues status does not say why a job waits in a queue."""

REQUIRED: Final = {what: verbs for what, verbs in PERMISSIONS.items() if what not in OPTIONAL}


def split_permission(what: str) -> tuple[str, str, str]:
    """Return kind, subresource and name of a line of the tables; empty what it does not have."""
    kind, _, name = what.partition(":")
    kind, _, subresource = kind.partition("/")
    return kind, subresource, name


async def check_cluster(client: ApiClient, namespaces: Sequence[str], *, home: str) -> None:
    """Raise StartupError with one clear line if the operator could not work with this API server.

    ``home`` is the operator's own namespace, where its Lease is.
    """
    try:
        await client.connect()
        await _check_crd(client)
        missing = await _missing_permissions(client, namespaces, home)
    except ClusterError as exc:
        raise StartupError(f"the API server does not answer: {exc}") from None
    except ApiError as exc:
        raise StartupError(f"the API server refuses the operator: {exc} (HTTP {exc.status})") from None
    if missing:
        raise StartupError(
            "permissions are missing: " + "; ".join(missing) + ". Bind the operator's account to the role in "
            "deploy/manifests/rbac.yaml, or set DDP_OPERATOR_NAMESPACES if it may serve some namespaces only"
        )


async def find_loss(client: ApiClient) -> str | None:
    """Return what an operator has lost without which it cannot go on, and what that means; None: nothing is known."""
    try:
        await _check_crd(client)
    except StartupError as exc:
        return f"{exc}. All jobs have gone with it; those that are applied again go on from their checkpoints"
    except (ClusterError, ApiError):
        pass
    return None


async def _check_crd(client: ApiClient) -> None:
    """Ask discovery, which everybody may read, and not for the CRD itself, which needs a permission more."""
    try:
        found = await client.request("GET", f"/apis/{GROUP}/{VERSION}", kind="apis")
    except ApiError as exc:
        if exc.status != 404:
            raise
        found = {}
    names = {resource.get("name") for resource in found.get("resources") or []}
    if PLURAL not in names:
        raise StartupError(
            f"the custom resource {CRD_NAME} is not installed: "
            f"run `kubectl apply --server-side -f deploy/crds/{PLURAL}.yaml`"
        )
    if f"{PLURAL}/status" not in names:
        raise StartupError(f"{CRD_NAME} has no status subresource in {API_VERSION}: apply deploy/crds anew")


async def _missing_permissions(client: ApiClient, namespaces: Sequence[str], home: str) -> list[str]:
    scopes: list[str | None] = [*namespaces] or [None]
    wanted = [(what, verb, scope) for scope in scopes for what, verbs in REQUIRED.items() for verb in verbs]
    wanted += [(what, verb, home) for what, verbs in HOME_PERMISSIONS.items() for verb in verbs]
    allowed = await asyncio.gather(*(_may(client, what, verb, scope) for what, verb, scope in wanted))
    missing: dict[str, list[str]] = {}
    for (what, verb, scope), yes in zip(wanted, allowed, strict=True):
        if not yes:
            kind, subresource, only = split_permission(what)
            name = ".".join(part for part in (plural(kind), group(kind)) if part)
            name = f"{name}/{subresource}" if subresource else f"{name} {only}" if only else name
            where = f"in namespace {scope}" if scope else "in all namespaces"
            missing.setdefault(f"{name} {where}", []).append(verb)
    return [f"{', '.join(verbs)} {what}" for what, verbs in missing.items()]


async def _may(client: ApiClient, what: str, verb: str, namespace: str | None) -> bool:
    kind, subresource, name = split_permission(what)
    asked = {"group": group(kind), "resource": plural(kind), "verb": verb}
    asked |= {"subresource": subresource, "name": name, "namespace": namespace or ""}
    review = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectAccessReview",
        "spec": {"resourceAttributes": {name: value for name, value in asked.items() if value}},
    }
    answer = await client.request(
        "POST", "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews", body=review, kind="selfsubjectaccessreviews"
    )
    return bool((answer.get("status") or {}).get("allowed"))

"""A stand-in for Kueue (0.19) in a manager and a worker cluster, on any two API servers.

It does what Kueue's sources state: ``pkg/controller/admissionchecks/multikueue/workload.go`` (the numbered steps of
``reconcileGroup``) and ``externalframeworks/adapter.go``. Quota is one switch. It leaves to the operator what an
integration must do: create the Workload, return quota after an eviction, report the end.
"""

from __future__ import annotations

import copy
from typing import Any

from ddp_operator.api.constants import API_VERSION, KIND
from ddp_operator.kube.resources import path
from tests.support.standin.actors import ClusterActors
from tests.support.standin.resources import Kind

Object = dict[str, Any]

WORKLOAD = "Workload.v1beta2"
FLAVOR = {"nodeLabels": {"pool": "a"}, "tolerations": [{"key": "taint", "operator": "Exists"}]}
ORIGIN = {"kueue.x-k8s.io/multikueue-origin": "multikueue"}
TIME = "2026-11-20T12:00:00Z"
KINDS = (
    Kind("kueue.x-k8s.io", "v1beta2", "Workload", "workloads", subresources=("status",)),
    Kind("kueue.x-k8s.io", "v1beta2", "LocalQueue", "localqueues"),
    Kind("kueue.x-k8s.io", "v1beta2", "ResourceFlavor", "resourceflavors", namespaced=False),
    Kind("kueue.x-k8s.io", "v1beta2", "WorkloadPriorityClass", "workloadpriorityclasses", namespaced=False),
)


def build_crd(kind: Kind) -> Object:
    """Return a definition without a schema, for a real API server."""
    version = {
        "name": kind.version,
        "served": True,
        "storage": True,
        "schema": {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}},
        "subresources": {name: {} for name in kind.subresources},
    }
    names = {"kind": kind.kind, "plural": kind.plural, "singular": kind.kind.lower(), "listKind": f"{kind.kind}List"}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        # The real definitions have this annotation too: the group is protected.
        "metadata": {
            "name": f"{kind.plural}.{kind.group}",
            "annotations": {"api-approved.kubernetes.io": "https://github.com/kubernetes-sigs/kueue"},
        },
        "spec": {
            "group": kind.group,
            "scope": "Namespaced" if kind.namespaced else "Cluster",
            "names": names,
            "versions": [version],
        },
    }


class MultiKueue:
    """Kueue in both clusters. ``round`` processes all present changes once."""

    def __init__(self, manager: ClusterActors, worker: ClusterActors, name: str = "east") -> None:
        self.manager = manager
        self.worker = worker
        self.name = name
        self.worker_has_quota = True

    async def install(self) -> None:
        """Create the ResourceFlavor that the worker cluster assigns."""
        flavor = {"apiVersion": "kueue.x-k8s.io/v1beta2", "kind": "ResourceFlavor", "metadata": {"name": "flavor"}}
        await self.worker.client.request("POST", path("ResourceFlavor.v1beta2", None), body=flavor | {"spec": FLAVOR})

    async def round(self) -> None:
        """Act as Kueue in the manager cluster, then in the worker cluster."""
        for workload in await self.manager.list(WORKLOAD):
            await self._dispatch(workload)
        remote_names = {workload["metadata"]["name"] for workload in await self.manager.list(WORKLOAD)}
        for workload in await self.worker.list(WORKLOAD):
            if workload["metadata"]["name"] in remote_names:
                await self._admit(self.worker, workload, allowed=self.worker_has_quota)
            else:  # the garbage collector of a lost manager's copies
                await self._remove(workload, workload)

    async def evict(self, where: ClusterActors, reason: str = "Preempted") -> None:
        """Evict all Workloads of a cluster, which keep their quota until their integration returns it."""
        for workload in await where.list(WORKLOAD):
            await self._evict(where, workload, reason)

    async def _dispatch(self, workload: Object) -> None:
        name = workload["metadata"]["name"]
        remote = await self.worker.get(WORKLOAD, name)
        if not workload["spec"]["active"] and has(workload, "QuotaReserved") and not has(workload, "Evicted"):
            await self._evict(self.manager, workload, "Deactivated")
            return
        # Step 2: nothing remains in the worker clusters without quota, or after the end.
        if has(workload, "Finished") or not has(workload, "QuotaReserved"):
            if remote is not None:
                await self._remove(workload, remote)
            elif not has(workload, "Finished") and workload["spec"]["active"]:
                await self._admit(self.manager, workload, checks=[{"name": "multi", "state": "Pending"}])
            return
        if has(workload, "Evicted"):
            return  # the operator has to return the quota
        if remote is None:
            meta = {key: workload["metadata"].get(key) for key in ("name", "namespace", "labels", "annotations")}
            body = {**workload, "metadata": meta | {"labels": {**(meta["labels"] or {}), **ORIGIN}}}
            body.pop("status")
            await self.worker.client.request("POST", path(WORKLOAD, self.worker.namespace), body=body)
        elif has(remote, "Finished"):  # step 3
            await self._sync(workload)
            await set_status(self.manager, workload, {"Finished": ("True", "Succeeded", "as in the worker cluster")})
        elif has(remote, "Evicted") and workload["status"].get("clusterName"):  # step 4
            await self._evict(self.manager, workload, "AdmissionCheck")
        elif has(remote, "Admitted"):  # step 6
            await self._sync(workload)
            if not workload["status"].get("clusterName"):
                checks = [{"name": "multi", "state": "Ready", "message": f'The workload was admitted on "{self.name}"'}]
                fields = {"clusterName": self.name, "nominatedClusterNames": None, "admissionChecks": checks}
                await set_status(self.manager, workload, {"Admitted": ("True", "Admitted", "")}, **fields)

    async def _sync(self, workload: Object) -> None:
        """Create the job in the worker cluster, or copy its status from there: the generic adapter."""
        name = workload["metadata"]["ownerReferences"][0]["name"]
        local = await self.manager.get(KIND, name)
        remote = await self.worker.get(KIND, name)
        if local is None or local["spec"].get("managedBy") != "kueue.x-k8s.io/multikueue":
            return
        if remote is None:
            spec = copy.deepcopy(local["spec"])
            del spec["managedBy"]
            annotations = {"kueue.x-k8s.io/prebuilt-workload-name": workload["metadata"]["name"]}
            meta = {
                "name": name,
                "labels": {**(local["metadata"].get("labels") or {}), **ORIGIN},
                "annotations": {**(local["metadata"].get("annotations") or {}), **annotations},
            }
            await self.worker.create({"apiVersion": API_VERSION, "kind": KIND, "metadata": meta, "spec": spec})
        elif "status" in remote and remote["status"] != local.get("status"):
            removed = dict.fromkeys(set(local.get("status") or {}) - set(remote["status"]))
            await self.manager.patch(KIND, name, {"status": {**removed, **remote["status"]}}, "status")

    async def _remove(self, workload: Object, remote: Object) -> None:
        owners = remote["metadata"].get("ownerReferences") or workload["metadata"].get("ownerReferences") or ()
        for owner in owners:
            job = await self.worker.get(KIND, owner["name"])
            if job is not None and ORIGIN.items() <= (job["metadata"].get("labels") or {}).items():
                await self.worker.delete(KIND, owner["name"])
        await self.worker.delete(WORKLOAD, remote["metadata"]["name"])

    async def _admit(
        self, where: ClusterActors, workload: Object, *, allowed: bool = True, checks: list[Object] | None = None
    ) -> None:
        if not allowed or not workload["spec"]["active"] or has(workload, "QuotaReserved") or has(workload, "Finished"):
            return
        assigned = [{"name": "main", "flavors": {"cpu": "flavor"}}]
        conditions = {
            "QuotaReserved": ("True", "QuotaReserved", ""),
            "Evicted": ("False", "QuotaReserved", ""),
            "Admitted": ("False" if checks else "True", "Admitted", ""),
        }
        nominated = [self.name] if checks else None
        fields = {"admissionChecks": checks, "nominatedClusterNames": nominated}
        await set_status(where, workload, conditions, admission={"podSetAssignments": assigned}, **fields)

    async def _evict(self, where: ClusterActors, workload: Object, reason: str) -> None:
        conditions = {"Evicted": ("True", reason, f"evicted: {reason}")}
        await set_status(where, workload, conditions, clusterName=None, nominatedClusterNames=None)


def has(workload: Object, kind: str) -> bool:
    """Return whether a condition of a Workload is True."""
    conditions = (workload.get("status") or {}).get("conditions") or ()
    return any(item["type"] == kind and item["status"] == "True" for item in conditions)


async def set_status(
    where: ClusterActors, workload: Object, conditions: dict[str, tuple[str, str, str]], **fields: Any
) -> None:
    """Change conditions and fields of a Workload's status."""
    kept = {item["type"]: item for item in (workload.get("status") or {}).get("conditions") or ()}
    for kind, (status, reason, message) in conditions.items():
        known = {"type": kind, "status": status, "reason": reason, "message": message}
        kept[kind] = known | {"lastTransitionTime": TIME}
    version = {"resourceVersion": workload["metadata"]["resourceVersion"]}
    body = {"metadata": version, "status": {"conditions": list(kept.values()), **fields}}
    await where.patch(WORKLOAD, workload["metadata"]["name"], body, "status")

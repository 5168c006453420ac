"""The cluster behind an API server: the reconcile's protocol, spoken as HTTP calls."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

from ddp_operator.cluster import (
    AlreadyExists,
    ClusterError,
    Conflict,
    Event,
    Key,
    Object,
    Refused,
    ServerError,
    Snapshot,
    claim_of,
    controller_of,
)
from ddp_operator.constants import (
    API_VERSION,
    KIND,
    KUEUE_JOB_UID_LABEL,
    LABEL_JOB_NAME,
    MANAGED_BY,
    POD_GROUP,
    PROFILE_KIND,
)
from ddp_operator.kube.cache import ObjectCache, build_snapshot
from ddp_operator.kube.calls import CHUNK, INVALID, NotFound, call, pages
from ddp_operator.kube.children import CHILD_KINDS, UNWATCHED_KINDS, key_of, trim_object
from ddp_operator.kube.client import ApiClient, ApiError
from ddp_operator.kube.events import EventReader, EventWriter
from ddp_operator.kube.resources import kind_of, path, plural, type_of
from ddp_operator.kube.scrape import Scraper
from ddp_operator.kubeobjects import format_time, utc_now

_WRITE: Final = {"fieldManager": MANAGED_BY, "fieldValidation": "Strict"}
METADATA_ONLY: Final = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1,application/json"
ONE_METADATA_ONLY: Final = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1,application/json"
STRATEGIC: Final = "application/strategic-merge-patch+json"
# A policy of the cluster may refuse with any status, and be changed at any time: the spec is not wrong as such.
DENIED: Final = re.compile(r"\bdenied (the )?request\b")


TOO_LARGE: Final = re.compile(r"etcdserver: request is too large|trying to send message larger than max")
"""What etcd and its client answer to an object of more than 1.5 or 2 MB; the API server makes a 500 of it."""

CONTROLLER_UID: Final = "batch.kubernetes.io/controller-uid"
"""The Job controller's own label on pods, by which it finds them."""


class KubeCluster:
    """Fulfils ``ddp_operator.cluster.Cluster`` for an API server.

    With a store, ``observe`` is answered from it: watch events keep it fresh, and every object that a write returns
    goes into it, so that it never lags behind this process's own writes. Without one (tools, tests), ``observe`` asks
    the API server. Either way Services and ConfigMaps come with their metadata only.
    """

    def __init__(
        self, client: ApiClient, store: ObjectCache | None = None, *, on_change: Callable[[Key], None] | None = None
    ) -> None:
        self._client = client
        self._store = store
        self._on_change = on_change
        self._writer = EventWriter(client)
        self._reader = EventReader(client)
        self._scraper = Scraper()

    async def close(self) -> None:
        """Stop posting events and scraping. The client stays open: it belongs to the caller."""
        await self._writer.close()
        await self._scraper.close()

    async def observe(self, key: Key) -> Snapshot | None:
        """Return the resource and its children from the store, or from the API server where there is no store."""
        return await self.fetch(key) if self._store is None else self._store.snapshot(key)

    async def fetch(self, key: Key) -> Snapshot | None:
        """Ask the API server for the resource and its children: five calls."""
        resource = await self._get(KIND, key.namespace, key.name)
        if resource is None:
            return None
        found: dict[str, list[Object]] = {}
        for kind in CHILD_KINDS:
            found[kind] = await self._list_children(kind, key)
        return build_snapshot(trim_object(KIND, resource), found)

    async def resources_on_claim(self, namespace: str, claim: str) -> Iterable[Object]:
        """Return them from the store, or from the API server where there is no store."""
        if self._store is not None:
            return list(self._store.resources_on_claim(namespace, claim))
        answer = await call(self._client, "GET", KIND, namespace)
        return [item for item in answer.get("items") or () if claim_of(item) == claim]

    async def create(self, manifest: Object, *, dry_run: bool = False) -> Object:
        """POST one child; unknown fields in it are refused, not dropped in silence."""
        kind, meta = kind_of(manifest), manifest["metadata"]
        params = _WRITE | ({"dryRun": "All"} if dry_run else {})
        # The answer to a ConfigMap would hold the whole launcher once more.
        brief = dry_run or kind in UNWATCHED_KINDS
        try:
            created: Object = await self._client.request(
                "POST",
                path(kind, meta["namespace"]),
                params=params,
                body=manifest,
                accept=ONE_METADATA_ONLY if brief else "application/json",
                kind=plural(kind),
            )
        except ApiError as exc:
            if exc.status == 409 and exc.reason == "AlreadyExists":
                existing = await self._look_again(kind, meta["namespace"], meta["name"])
                if existing is None:
                    raise ClusterError(f"{exc}, and is gone again") from exc
                raise AlreadyExists(existing) from None
            if exc.status == 403 or DENIED.search(exc.message):
                raise Refused(exc.message, reason="Forbidden") from exc
            if exc.status in INVALID:
                raise Refused(exc.message, reason="Invalid") from exc
            if exc.status == 404 and manifest["kind"] == POD_GROUP:
                message = f"spec.scheduling.gang: the cluster knows no PodGroup of {manifest['apiVersion']}"
                raise Refused(f"{message}; install that scheduler or set gang: None", reason="Invalid") from exc
            raise ClusterError(str(exc)) from exc  # 404: the namespace is on its way out, and the resource with it
        except ClusterError as exc:
            answer = exc.__cause__
            if isinstance(answer, ApiError) and answer.status >= 500:
                raise ServerError(f"{manifest['kind']} {meta['name']}: {answer.message}") from exc
            raise
        if not dry_run:
            self._remember(kind, created)
        return created

    async def add_owners(self, item: Object, references: Sequence[Object]) -> Object | None:
        """Patch the object: a strategic merge adds to its owners by UID, at whatever version it is."""
        meta = item["metadata"]
        body = {"metadata": {"uid": meta["uid"], "ownerReferences": references}}
        options: dict[str, Any] = {"params": _WRITE, "body": body, "content_type": STRATEGIC}
        options["accept"] = ONE_METADATA_ONLY
        where = "ConfigMap", meta["namespace"], meta["name"]
        try:
            found: Object = await call(self._client, "PATCH", *where, refusable=True, **options)
        except NotFound:
            self._forget(*where)
            return None
        except Refused as error:
            if "metadata.uid" in error.message:  # deleted and made again meanwhile
                return None
            raise
        self._remember("ConfigMap", found)
        return found

    async def job(self, namespace: str, name: str) -> Object | None:
        """Read a Job with its whole template, which is not remembered."""
        found: Object | None = await self._get("Job", namespace, name)
        return found

    async def patch_job(self, namespace: str, name: str, patch: Object, *, seen: Object | None = None) -> None:
        """Merge-patch a Job; one that was seen must still be at that version."""
        if seen is not None:
            version = {key: seen["metadata"][key] for key in ("uid", "resourceVersion")}
            patch = {**patch, "metadata": {**patch.get("metadata", {}), **version}}
        try:
            job = await self._patch("Job", namespace, name, patch, refusable=True)
        except NotFound:
            self._forget("Job", namespace, name)
            return
        except Conflict:
            await self._look_again("Job", namespace, name)
            raise
        self._remember("Job", job)

    async def delete(
        self,
        kind: str,
        namespace: str,
        name: str,
        *,
        uid: str,
        resource_version: str | None = None,
        grace_seconds: int | None = None,
    ) -> None:
        """Delete an object if it still is the one of this UID, and at this version where one is given."""
        body: dict[str, Any] = {
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            "propagationPolicy": "Background",
            "preconditions": {"uid": uid},
        }
        if resource_version is not None:
            body["preconditions"]["resourceVersion"] = resource_version
        if grace_seconds is not None:
            body["gracePeriodSeconds"] = grace_seconds
        answer: Any = None  # gone, or replaced by a namesake: this one does not exist any more
        try:
            answer = await call(self._client, "DELETE", kind, namespace, name, body=body)
        except NotFound:
            pass
        except Conflict:
            found = await self._look_again(kind, namespace, name)
            if found is not None and found["metadata"].get("uid") == uid:
                raise
        if _still_there(answer):
            self._remember(kind, answer)
        else:
            self._mark_deleted(kind, namespace, name, uid)

    async def discard(self, manifest: Object) -> None:
        """Look whose the object of that name is; delete it if it is ours."""
        kind, meta = kind_of(manifest), manifest["metadata"]
        found = await self._get(kind, meta["namespace"], meta["name"])
        if (
            found is not None
            and controller_of(found).get("uid") == controller_of(manifest).get("uid")
            and "deletionTimestamp" not in found["metadata"]
        ):
            await self.delete(kind, meta["namespace"], meta["name"], uid=found["metadata"]["uid"])

    async def restore_labels(self, owner: str, namespace: str, name: str, labels: Mapping[str, str]) -> bool:
        """Read the Job by its name, and its pods by the label that is the Job controller's own."""
        job = await self._get("Job", namespace, name, refusable=True)
        if job is None or controller_of(job).get("uid") != owner:
            return False
        uid = job["metadata"]["uid"]
        params = {"labelSelector": f"{CONTROLLER_UID}={uid}", "limit": str(CHUNK)}
        found = [("Job", {"metadata": job["metadata"]})]
        async for page in pages(self._client, "Pod", namespace, params, accept=METADATA_ONLY, refusable=True):
            own = [item for item in page.get("items") or () if controller_of(item).get("uid") == uid]
            found += [("Pod", {"metadata": item["metadata"]}) for item in own]
        lost = False
        for kind, item in found:
            meta = item["metadata"]
            if labels.items() <= (meta.get("labels") or {}).items():
                continue
            lost = True
            # Labels of a pod can be written with its status, which the operator may patch; it may not patch pods.
            part = "status" if kind == "Pod" else None
            body = {"metadata": {"uid": meta["uid"], "labels": dict(labels)}}
            try:
                self._remember(kind, await self._patch(kind, namespace, meta["name"], body, part, refusable=True))
            except NotFound:
                return False
        return lost

    async def profile(self, kind: str, namespace: str, name: str) -> Object | None:
        """Read a profile: seldom, when a job starts."""
        found: Object | None = await self._get(kind, namespace if kind == PROFILE_KIND else None, name, refusable=True)
        return found

    async def resource_claim(self, kind: str, namespace: str, name: str) -> Object | None:
        """Read it in the version that is served: seldom, when a job starts."""
        return await self._get_any((kind, f"{kind}.v1beta2", f"{kind}.v1beta1"), namespace, name)

    async def node(self, name: str) -> Object | None:
        """Read a node: seldom, where a pod on it does not end."""
        found: Object | None = await self._get("Node", None, name, refusable=True)
        return found

    async def fail_pod(self, pod: Object, reason: str, message: str) -> None:
        """Write the pod's status, then delete it without grace time.

        The status comes first: a Running pod of a Job that is deleted by force stays, since the Job controller keeps
        its finalizer until the pod has ended, and nobody else can tell that it has.
        """
        meta, status = pod["metadata"], pod.get("status") or {}
        stamp = format_time(utc_now())
        condition = {"type": "DisruptionTarget", "status": "True", "reason": reason, "message": message}
        others = [item for item in status.get("conditions") or [] if item.get("type") != "DisruptionTarget"]
        conditions = [*others, condition | {"lastTransitionTime": stamp}]
        # A merge patch replaces the whole list, so it must meet the very pod that was looked at.
        body = {
            "metadata": {"uid": meta["uid"], "resourceVersion": meta["resourceVersion"]},
            "status": {"phase": "Failed", "reason": reason, "message": message, "conditions": conditions},
        }
        try:
            failed = await self._patch("Pod", meta["namespace"], meta["name"], body, "status")
        except NotFound:
            self._mark_deleted("Pod", meta["namespace"], meta["name"], meta["uid"])
            return
        self._remember("Pod", failed)
        await self.delete("Pod", meta["namespace"], meta["name"], uid=meta["uid"], grace_seconds=0)

    async def suspend_resource(self, key: Key, *, resource_version: str) -> None:
        """Merge-patch the custom resource at the version that it was seen at."""
        patch = {"metadata": {"resourceVersion": resource_version}, "spec": {"suspend": True}}
        try:
            resource = await self._patch(KIND, key.namespace, key.name, patch)
        except NotFound as exc:
            self._forget(KIND, key.namespace, key.name)
            raise Conflict(f"{key} is gone") from exc
        self._remember(KIND, resource)

    async def delete_resource(self, key: Key, *, uid: str, resource_version: str | None = None) -> None:
        """Delete the custom resource; the garbage collector follows with its children."""
        await self.delete(KIND, key.namespace, key.name, uid=uid, resource_version=resource_version)

    async def patch_status(self, key: Key, status: Object, *, resource_version: str) -> None:
        """Replace the status by PUT to the status subresource.

        PUT, because it alone REPLACES: a merge patch would leave every field standing that the new status no longer
        has, unless each were set to null by name. Its precondition is the resourceVersion in the body. The rest of
        the body is ignored by the API server, so nothing but the status needs to be sent.
        """
        body = {
            "apiVersion": API_VERSION,
            "kind": KIND,
            "metadata": {"name": key.name, "namespace": key.namespace, "resourceVersion": resource_version},
            "status": status,
        }
        try:
            resource = await self._client.request(
                "PUT", path(KIND, key.namespace, key.name, "status"), params=_WRITE, body=body, kind=plural(KIND)
            )
        except ApiError as exc:
            if exc.status in INVALID:
                raise Refused(exc.message, reason="Invalid") from exc
            if exc.status == 404:
                self._forget(KIND, key.namespace, key.name)
                raise Conflict(f"{key} is gone") from exc
            raise (Conflict if exc.status == 409 else ClusterError)(str(exc)) from exc
        except ClusterError as exc:
            answer = exc.__cause__
            if isinstance(answer, ApiError) and TOO_LARGE.search(answer.message):
                raise Refused(answer.message, reason="Invalid") from exc
            raise
        self._remember(KIND, resource)

    async def events_of(self, item: Object) -> tuple[Object, ...]:
        """List the Events about one object: only for one that does not get on."""
        return await self._reader.about(item)

    async def workloads_of(self, job: Object) -> tuple[Object, ...]:
        """List the Workloads with the Job's UID, in the version that the installed Kueue serves."""
        meta = job["metadata"]
        # From the API server's cache: what Kueue says of a Job that waits is not that urgent.
        params = {"labelSelector": f"{KUEUE_JOB_UID_LABEL}={meta['uid']}", "resourceVersion": "0"}
        for kind in ("Workload", "Workload.v1beta2"):
            try:
                answer = await call(self._client, "GET", kind, meta["namespace"], refusable=True, params=params)
            except NotFound:
                continue
            return tuple(answer.get("items") or ())
        raise Refused("Kueue is not installed", reason="Invalid")

    async def local_queue(self, namespace: str, name: str) -> Object | None:
        """Read a LocalQueue, in the version that the installed Kueue serves."""
        return await self._get_any(("LocalQueue", "LocalQueue.v1beta2"), namespace, name)

    async def emit(self, resource: Object, event: Event) -> None:
        """Hand an event to the event writer, which works in the background."""
        self._writer.put(resource, event)

    async def scrape(self, pod: Object, port: int, take: Callable[[bytes], None]) -> bool:
        """Read a pod's metrics page through its IP address."""
        address = str((pod.get("status") or {}).get("podIP") or "")
        return bool(address) and await self._scraper.read(address, port, take)

    async def _get(self, kind: str, namespace: str | None, name: str, *, refusable: bool = False) -> Any:
        """Return an object as it is now; None: there is none."""
        with suppress(NotFound):
            return await call(self._client, "GET", kind, namespace, name, refusable=refusable)
        return None

    async def _get_any(self, kinds: Iterable[str], namespace: str, name: str) -> Object | None:
        """Return an object in the first of these versions of its kind in which there is one."""
        for kind in kinds:
            if found := await self._get(kind, namespace, name, refusable=True):
                return dict(found)
        return None

    async def _patch(
        self, kind: str, namespace: str, name: str, body: Object, part: str | None = None, *, refusable: bool = False
    ) -> Any:
        """Merge-patch an object. Raises: as ``call``."""
        options = {"params": _WRITE, "body": body, "content_type": "application/merge-patch+json"}
        return await call(self._client, "PATCH", kind, namespace, name, part, refusable=refusable, **options)

    async def _list_children(self, kind: str, key: Key) -> list[Object]:
        shared = kind == "ConfigMap"  # the empty value after the comma: of no single job
        selector = f"{LABEL_JOB_NAME} in ({key.name},)" if shared else f"{LABEL_JOB_NAME}={key.name}"
        params = {"labelSelector": selector, "limit": str(CHUNK)}
        accept = METADATA_ONLY if kind in UNWATCHED_KINDS else "application/json"
        children: list[Object] = []
        async for page in pages(self._client, kind, key.namespace, params, accept=accept):
            own = [item for item in page.get("items") or () if key_of(kind, item["metadata"]) is not None]
            children += [trim_object(kind, type_of(kind) | item) for item in own]
        return sorted(children, key=lambda child: str(child["metadata"]["name"]))

    async def _look_again(self, kind: str, namespace: str, name: str) -> Object | None:
        """Read an object that is not as it was seen, since a watch may be late or silent.

        The resource that it belongs to is read, too: what was decided on an old one must not be decided again.
        """
        found: Object | None = await self._get(kind, namespace, name)
        if found is None:
            return None
        owner = key_of(kind, found["metadata"])
        if kind != KIND and owner is not None and owner.name:
            await self._look_again(KIND, owner.namespace, owner.name)
        self._remember(kind, found)
        return found

    def _remember(self, kind: str, obj: Object) -> None:
        if self._store is not None and (kind == KIND or kind in CHILD_KINDS):
            self._store.apply(kind, obj)

    def _forget(self, kind: str, namespace: str, name: str) -> None:
        """Drop an object that turned out to be gone, whichever UID it had."""
        if self._store is not None:
            entry = self._store.entry(kind, namespace, name)
            if entry is not None:
                self._mark_deleted(kind, namespace, name, entry.uid)

    def _mark_deleted(self, kind: str, namespace: str, name: str, uid: str) -> None:
        if self._store is not None:
            key = self._store.mark_deleted(kind, namespace, name, uid)
            if key is not None and self._on_change is not None:
                self._on_change(key)


def _still_there(answer: object) -> bool:
    """Tell from the answer to a DELETE whether the object waits for a finalizer or for its grace time.

    The answer is a ``Status`` or, for some kinds, the deleted object itself.
    """
    if not isinstance(answer, dict) or answer.get("kind") == "Status":
        return False
    meta = answer.get("metadata") or {}
    return bool(meta.get("deletionTimestamp")) and bool(
        meta.get("finalizers") or meta.get("deletionGracePeriodSeconds")
    )

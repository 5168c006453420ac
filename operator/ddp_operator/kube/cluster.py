"""The ``Cluster`` protocol for an API server."""

import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, Final, Literal

import msgspec

from ddp_operator.api.cluster import Event, Key, Object, Snapshot, controller_of
from ddp_operator.api.cluster_errors import AlreadyExists, ClusterError, Refused, ServerError, VersionConflict
from ddp_operator.api.constants import API_VERSION, CRD_NAME, KIND, LABEL_JOB_NAME, MANAGED_BY
from ddp_operator.api.faults import parse_each
from ddp_operator.api.kubeobjects import format_time, utc_now
from ddp_operator.api.other_kinds import CRD_KIND, KUEUE_JOB_UID_LABEL
from ddp_operator.api.resources import claim_of
from ddp_operator.decide.hooks import Hooks
from ddp_operator.kube.cache import ObjectCache, build_snapshot
from ddp_operator.kube.children import CHILD_KINDS, METADATA_KINDS, has_metadata_only, key_of, trim_object
from ddp_operator.kube.client import CHUNK, INVALID, ApiClient, ObjectNotFound, ResponseError, call, pages
from ddp_operator.kube.events import EventReader, EventWriter
from ddp_operator.kube.incoming import OMITTED
from ddp_operator.kube.postings import Postings
from ddp_operator.kube.resources import kind_of, type_of
from ddp_operator.kube.scrape import Scraper
from ddp_operator.reconcile.lending import lend_worker

_WRITE: Final = {"fieldManager": MANAGED_BY, "fieldValidation": "Strict"}
METADATA_ONLY: Final = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1,application/json"
ONE_METADATA_ONLY: Final = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1,application/json"
# An admission policy may refuse with any HTTP status. It can change at any time, so the spec is not invalid.
DENIED: Final = re.compile(r"\bdenied (the )?request\b")

TOO_LARGE: Final = re.compile(r"etcdserver: request is too large|trying to send message larger than max")
"""Errors of etcd and its client for an object of more than 1.5 or 2 MB. The API server returns them with status 500."""

CONTROLLER_UID: Final = "batch.kubernetes.io/controller-uid"
"""Label of the Job controller on its pods."""


class KubeCluster:
    """Implements ``ddp_operator.api.cluster.Cluster`` for an API server.

    With a store, ``observe`` reads from it. Watch events update the store, and so does every object that a write
    returns, so it never lags behind this process's own writes. Without a store (tools, tests), ``observe`` reads from
    the API server. In both cases Services and ConfigMaps have their metadata only.
    """

    def __init__(
        self,
        client: ApiClient,
        store: ObjectCache | None = None,
        *,
        on_change: Callable[[Key], None] | None = None,
        hooks: Hooks | None = None,
    ) -> None:
        self._client = client
        self._store = store
        self._hooks = Hooks() if hooks is None else hooks
        self._postings = Postings(self._hooks.features)
        self._child_kinds = (*CHILD_KINDS, *sorted(self._hooks.schema.shared_kinds))
        self._on_change = on_change
        self._writer = EventWriter(client)
        self._reader = EventReader(client)
        self._scraper = Scraper()

    async def close(self) -> None:
        """Stop the event writer. The caller closes the client."""
        await self._writer.close()

    async def observe(self, key: Key) -> Snapshot | None:
        """Return the resource and its children from the store; without one, from the API server."""
        if self._store is None:
            return await self.fetch(key)
        snapshot = self._store.snapshot(key)
        if snapshot is None or OMITTED not in (snapshot.resource.get("spec") or {}):
            return snapshot
        resource = await self._get(KIND, key.namespace, key.name)
        return None if resource is None else replace(snapshot, resource=trim_object(KIND, resource))

    async def fetch(self, key: Key) -> Snapshot | None:
        """Read the resource and its children from the API server, with one call for each kind."""
        resource = await self._get(KIND, key.namespace, key.name)
        if resource is None:
            return None
        children: dict[str, list[Object]] = {}
        for kind in self._child_kinds:
            children[kind] = await self._list_children(kind, key)
        return build_snapshot(trim_object(KIND, resource), children)

    async def resources_on_claim(self, namespace: str, claim: str) -> Iterable[Object]:
        """Return the resources from the store; without one, from the API server."""
        if self._store is not None:
            return list(self._store.resources_on_claim(namespace, claim))
        answer = await call(self._client, "GET", KIND, namespace)
        return [item for item in answer.get("items") or () if claim_of(item) == claim]

    async def create(self, manifest: Object, *, dry_run: bool = False) -> Object:
        """POST one child, in the newest of its API versions that is served.

        The API server refuses unknown fields instead of dropping them. Raises: Refused, also for a feature's child of
        which it dropped a field; ClusterError.
        """
        manifest = self._hooks.amend(manifest)
        for version in self._postings.list_versions(manifest):
            try:
                created = await self._post(version, dry_run=dry_run)
            except ObjectNotFound:
                continue
            loss = self._postings.explain_loss(version, created)
            if not loss:
                return created
            if not dry_run:
                meta = created["metadata"]
                await self.delete(kind_of(version), meta["namespace"], meta["name"], uid=meta["uid"])
            raise Refused(loss, reason="Invalid")
        raise Refused(self._postings.explain_absence(manifest), reason="Invalid")

    async def _post(self, manifest: Object, *, dry_run: bool) -> Object:
        """POST one child. Raises: ObjectNotFound if the cluster does not serve this version of it."""
        kind = kind_of(manifest)
        meta = manifest["metadata"]
        params = _WRITE | ({"dryRun": "All"} if dry_run else {})
        # Otherwise the response to a ConfigMap would contain the launcher.
        has_versions = self._postings.find(manifest) is not None
        brief = (dry_run and not has_versions) or kind in (*METADATA_KINDS, "Secret")
        accept = ONE_METADATA_ONLY if brief else "application/json"
        try:
            created: Object = await call(
                self._client, "POST", kind, meta["namespace"], params=params, body=manifest, accept=accept
            )
        except ClusterError as exc:
            answer = exc.__cause__
            if not isinstance(answer, ResponseError):
                raise
            if answer.status == 409 and answer.reason == "AlreadyExists":
                if kind == "Secret":  # the operator may create Secrets, but not read them
                    raise AlreadyExists from None
                existing = await self._refresh(kind, meta["namespace"], meta["name"])
                if existing is None:
                    raise ClusterError(f"{exc}, and was deleted meanwhile") from exc
                raise AlreadyExists(existing) from None
            if answer.status >= 500:
                raise ServerError(f"{manifest['kind']} {meta['name']}: {answer.message}") from exc
            if answer.status == 403 or DENIED.search(answer.message):
                message = self._postings.explain_refusal(manifest, answer.message)
                raise Refused(message, reason="Forbidden") from exc
            if answer.status in INVALID:
                raise Refused(self._postings.explain_refusal(manifest, answer.message), reason="Invalid") from exc
            if answer.status == 404 and has_versions:
                raise
            raise ClusterError(str(exc)) from exc  # 404: the namespace is being deleted, with the resource
        if not dry_run:
            self._remember(kind, created)
        return created

    async def definition(self) -> Object | None:
        """Read the CRD's metadata. A Role, in one namespace, cannot grant that."""
        with suppress(Refused, ObjectNotFound):
            options: dict[str, Any] = {"refusable": True, "accept": ONE_METADATA_ONLY}
            raw = await call(self._client, "GET", CRD_KIND, None, CRD_NAME, **options)
            return type_of(CRD_KIND) | {"name": CRD_NAME, "uid": raw["metadata"]["uid"]}
        return None

    async def job(self, namespace: str, name: str) -> Object | None:
        """Read a Job with its complete template. The store does not keep that."""
        return await self._get("Job", namespace, name)

    async def patch_job(self, namespace: str, name: str, patch: Object, *, seen: Object | None = None) -> None:
        """Merge-patch a Job. It must still be at the version of ``seen``, if given."""
        if seen is not None:
            version = {key: seen["metadata"][key] for key in ("uid", "resourceVersion")}
            patch = {**patch, "metadata": {**patch.get("metadata", {}), **version}}
        try:
            job = await self._patch("Job", namespace, name, patch, refusable=True)
        except ObjectNotFound:
            self._forget("Job", namespace, name)
            return
        except VersionConflict:
            await self._refresh("Job", namespace, name)
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
        """Delete an object if it still has this UID, and this version if one is given."""
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
        response: Any = None  # stays None if the object was deleted, or another one has its name
        try:
            response = await call(self._client, "DELETE", kind, namespace, name, body=body)
        except ObjectNotFound:
            pass
        except VersionConflict:
            current = await self._refresh(kind, namespace, name)
            if current is not None and current["metadata"].get("uid") == uid:
                raise
        if _is_terminating(response):
            self._remember(kind, response)
        else:
            self._mark_deleted(kind, namespace, name, uid)

    async def discard(self, manifest: Object) -> None:
        """Read the object of that name, and delete it if it has the same controller."""
        meta = manifest["metadata"]
        for version in self._postings.list_versions(manifest):
            kind = kind_of(version)
            existing = await self._get(kind, meta["namespace"], meta["name"])
            if existing is None:
                continue
            is_own = controller_of(existing).get("uid") == controller_of(manifest).get("uid")
            if is_own and "deletionTimestamp" not in existing["metadata"]:
                await self.delete(kind, meta["namespace"], meta["name"], uid=existing["metadata"]["uid"])
            return

    async def restore_labels(self, owner: str, namespace: str, name: str, labels: Mapping[str, str]) -> bool:
        """Read the Job by its name, and its pods by the label of the Job controller."""
        job = await self._get("Job", namespace, name, refusable=True)
        if job is None or controller_of(job).get("uid") != owner:
            return False
        uid = job["metadata"]["uid"]
        params = {"labelSelector": f"{CONTROLLER_UID}={uid}", "limit": str(CHUNK)}
        objects = [("Job", job["metadata"])]
        async for page in pages(self._client, "Pod", namespace, params, accept=METADATA_ONLY, refusable=True):
            for pod in page.get("items") or ():
                if controller_of(pod).get("uid") == uid:
                    objects.append(("Pod", pod["metadata"]))

        has_restored = False
        for kind, meta in objects:
            if labels.items() <= (meta.get("labels") or {}).items():
                continue
            has_restored = True
            # The operator may patch the status of pods, but not pods. A patch of the status can change labels.
            subresource = "status" if kind == "Pod" else None
            body = {"metadata": {"uid": meta["uid"], "labels": dict(labels)}}
            try:
                patched = await self._patch(kind, namespace, meta["name"], body, subresource, refusable=True)
            except ObjectNotFound:
                return False
            self._remember(kind, patched)
        return has_restored

    async def node(self, name: str) -> Object | None:
        """Read a node. This is done for nodes of overdue pods only."""
        return await self._get("Node", None, name, refusable=True)

    async def disrupt_pod(self, pod: Object, reason: str, message: str, *, lost: bool) -> None:
        """Write the pod's status, then delete the pod, without grace time if its node is lost.

        The Job controller keeps its finalizer on the pod until the pod has ended, so a forced deletion of a Running pod
        alone would not remove it.
        """
        meta = pod["metadata"]
        status = pod.get("status") or {}
        stamp = format_time(utc_now())
        condition = {"type": "DisruptionTarget", "status": "True", "reason": reason, "message": message}
        kept = [item for item in status.get("conditions") or [] if item.get("type") != "DisruptionTarget"]
        conditions = [*kept, condition | {"lastTransitionTime": stamp}]
        # A merge patch replaces the list, so it names the resource version that the list was read at.
        body = {
            "metadata": {"uid": meta["uid"], "resourceVersion": meta["resourceVersion"]},
            "status": {"conditions": conditions},
        }
        if lost:
            body["status"] |= {"phase": "Failed", "reason": reason, "message": message}
        try:
            disrupted = await self._patch("Pod", meta["namespace"], meta["name"], body, "status")
        except ObjectNotFound:
            self._mark_deleted("Pod", meta["namespace"], meta["name"], meta["uid"])
            return
        self._remember("Pod", disrupted)
        grace = 0 if lost else None
        await self.delete("Pod", meta["namespace"], meta["name"], uid=meta["uid"], grace_seconds=grace)

    async def patch_resource(self, key: Key, patch: Object, *, resource_version: str) -> None:
        """Merge-patch the custom resource at the observed version."""
        patch = {**patch, "metadata": {**patch.get("metadata", {}), "resourceVersion": resource_version}}
        try:
            resource = await self._patch(KIND, key.namespace, key.name, patch)
        except ObjectNotFound as exc:
            self._forget(KIND, key.namespace, key.name)
            raise VersionConflict(f"{key} was deleted") from exc
        self._remember(KIND, resource)

    async def delete_resource(self, key: Key, *, uid: str, resource_version: str | None = None) -> None:
        """Delete the custom resource. The garbage collector deletes its children."""
        await self.delete(KIND, key.namespace, key.name, uid=uid, resource_version=resource_version)

    async def patch_status(self, key: Key, status: Object, *, resource_version: str) -> None:
        """Replace the status by PUT to the status subresource.

        A merge patch would keep every field that the new status does not have. The resourceVersion in the body is the
        precondition. The API server ignores the remaining body, so only the status is sent. It answers with metadata,
        as a refused spec of 1.4 MB would otherwise return with each status.
        """
        body = {
            "apiVersion": API_VERSION,
            "kind": KIND,
            "metadata": {"name": key.name, "namespace": key.namespace, "resourceVersion": resource_version},
            "status": status,
        }
        options: dict[str, Any] = {"params": _WRITE, "body": body, "accept": ONE_METADATA_ONLY}
        try:
            answer = await call(self._client, "PUT", KIND, key.namespace, key.name, "status", **options)
        except ObjectNotFound as exc:
            self._forget(KIND, key.namespace, key.name)
            raise VersionConflict(f"{key} was deleted") from exc
        except ClusterError as exc:
            cause = exc.__cause__
            if isinstance(cause, ResponseError) and (cause.status in INVALID or TOO_LARGE.search(cause.message)):
                raise Refused(cause.message, reason="Invalid") from exc
            raise
        self._remember_status(key, status, before=resource_version, after=answer["metadata"]["resourceVersion"])

    async def events_of(self, item: Object) -> tuple[Object, ...]:
        """List the Events about one object. This is done for waiting objects only."""
        return await self._reader.about(item)

    async def read_log(self, pod: Object, container: str, lines: int, limit: int) -> bytes:
        """Read a log through the API server. Only features do this, for ended jobs."""
        meta = pod["metadata"]
        params = {"container": container, "timestamps": "true", "tailLines": str(lines), "limitBytes": str(limit)}
        options: dict[str, Any] = {"params": params, "refusable": True, "is_text": True}
        log: bytes = await call(self._client, "GET", "Pod", meta["namespace"], meta["name"], "log", **options)
        return log

    async def workloads_of(self, job: Object) -> tuple[Object, ...]:
        """List the Workloads with the Job's UID, in the version that the installed Kueue serves."""
        meta = job["metadata"]
        # From the API server's cache: the reason why a Job waits may be some seconds old.
        params = {"labelSelector": f"{KUEUE_JOB_UID_LABEL}={meta['uid']}", "resourceVersion": "0"}
        for kind in ("Workload.v1beta2", "Workload"):
            try:
                answer = await call(self._client, "GET", kind, meta["namespace"], refusable=True, params=params)
            except ObjectNotFound:
                continue
            return tuple(answer.get("items") or ())
        raise Refused("Kueue is not installed", reason="Invalid")

    async def kueue_object(self, kind: str, namespace: str | None, name: str) -> Object | None:
        """Read an object of Kueue, in the newest version that the installed one serves."""
        return await self._get_any((f"{kind}.v1beta2", kind), namespace, name)

    async def patch_workload(self, workload: Object, patch: Object, *, part: Literal["status"] | None = None) -> None:
        """Merge-patch a Workload, in the version that MultiKueue uses for jobs of other projects."""
        meta = workload["metadata"]
        version = {key: meta[key] for key in ("uid", "resourceVersion")}
        body = {**patch, "metadata": {**patch.get("metadata", {}), **version}}
        try:
            await self._patch(kind_of(workload), meta["namespace"], meta["name"], body, part, refusable=True)
        except ObjectNotFound as exc:
            raise VersionConflict(f"Workload {meta['name']} was deleted") from exc

    async def emit(self, resource: Object, event: Event) -> None:
        """Queue an Event for the event writer, which posts it in the background."""
        self._writer.put(resource, event)

    async def read_report(self, pod: Object, port: int) -> bytes | None:
        """Read a pod's report through its IP address."""
        address = str((pod.get("status") or {}).get("podIP") or "")
        with lend_worker():
            return await self._scraper.read(address, port, pod["metadata"]["namespace"]) if address else None

    async def _get(self, kind: str, namespace: str | None, name: str, *, refusable: bool = False) -> Object | None:
        """Return the current object from the API server, or None if it does not exist."""
        try:
            current: Object = await call(self._client, "GET", kind, namespace, name, refusable=refusable)
        except ObjectNotFound:
            return None
        return current

    async def _get_any(self, kinds: Iterable[str], namespace: str | None, name: str) -> Object | None:
        """Return an object in the first of these versions of its kind that is served and has it."""
        for kind in kinds:
            raw = await self._get(kind, namespace, name, refusable=True)
            if raw is not None:
                return raw
        return None

    async def _patch(
        self, kind: str, namespace: str, name: str, body: Object, part: str | None = None, *, refusable: bool = False
    ) -> Any:
        """Merge-patch an object. Raises: as ``call``."""
        options = {"params": _WRITE, "body": body, "content_type": "application/merge-patch+json"}
        return await call(self._client, "PATCH", kind, namespace, name, part, refusable=refusable, **options)

    async def _list_children(self, kind: str, key: Key) -> list[Object]:
        shared = kind == "ConfigMap"  # the empty value after the comma selects shared ones
        selector = f"{LABEL_JOB_NAME} in ({key.name},)" if shared else f"{LABEL_JOB_NAME}={key.name}"
        params = {"labelSelector": selector, "limit": str(CHUNK)}
        accept = METADATA_ONLY if has_metadata_only(kind) else "application/json"
        children: list[Object] = []
        async for page in pages(self._client, kind, key.namespace, params, accept=accept):
            listed = parse_each(kind, page.get("items") or (), partial(_trim_child, kind))
            children += [child for child in listed if child is not None]
        return sorted(children, key=lambda child: str(child["metadata"]["name"]))

    async def _refresh(self, kind: str, namespace: str, name: str) -> Object | None:
        """Read an object after a conflict, because its watch event may be late, and update the store.

        The resource that it belongs to is read too, so that the next decision is based on its current version.
        """
        current = await self._get(kind, namespace, name)
        if current is None:
            return None
        owner = key_of(kind, current["metadata"])
        if kind != KIND and owner is not None and owner.name:
            await self._refresh(KIND, owner.namespace, owner.name)
        self._remember(kind, current)
        return current

    def _remember(self, kind: str, obj: Object) -> None:
        if self._store is not None and (kind == KIND or kind in self._child_kinds):
            self._store.apply(kind, obj)

    def _remember_status(self, key: Key, status: Object, *, before: str, after: str) -> None:
        """Store a status that replaced the one of version ``before``, unless the cache has another version.

        An older one lacks a change of the spec, which the watch delivers later.
        """
        entry = self._store.entry(KIND, key.namespace, key.name) if self._store is not None else None
        if entry is None or entry.version != before:
            return
        resource = msgspec.json.decode(entry.body)
        metadata = resource["metadata"] | {"resourceVersion": after}
        self._remember(KIND, resource | {"metadata": metadata, "status": status})

    def _forget(self, kind: str, namespace: str, name: str) -> None:
        """Drop a deleted object from the store, with any UID."""
        if self._store is not None:
            entry = self._store.entry(kind, namespace, name)
            if entry is not None:
                self._mark_deleted(kind, namespace, name, entry.uid)

    def _mark_deleted(self, kind: str, namespace: str, name: str, uid: str) -> None:
        if self._store is not None:
            key = self._store.mark_deleted(kind, namespace, name, uid)
            if key is not None and self._on_change is not None:
                self._on_change(key)


def _trim_child(kind: str, item: Object) -> Object | None:
    """Return an item of a list with the fields that the operator reads; None: it is no child."""
    return None if key_of(kind, item["metadata"]) is None else trim_object(kind, {**type_of(kind), **item})


def _is_terminating(response: object) -> bool:
    """Return whether the object of a DELETE waits for a finalizer or for its grace time.

    The response is a ``Status`` or, for some kinds, the deleted object.
    """
    if not isinstance(response, dict) or response.get("kind") == "Status":
        return False
    meta = response.get("metadata") or {}
    return bool(meta.get("deletionTimestamp")) and bool(
        meta.get("finalizers") or meta.get("deletionGracePeriodSeconds")
    )

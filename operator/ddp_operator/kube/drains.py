"""Requests to drain pods by other components: NVSentinel's DrainRequest, and the Eviction of Kubernetes 1.37.

Both are listed at intervals for all jobs together. The passes of the jobs read the result and move the pods; the status
of each request states what is awaited, and in the end that no named pod remains (ADR 0051).
"""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Annotated, Any, Final

import msgspec

from ddp_operator.api.cluster import ClusterError, Key, Object, Refused
from ddp_operator.api.constants import EVICTION_RESPONDER, MANAGED_BY
from ddp_operator.api.kubeobjects import EPOCH, format_time, parse_time, utc_now
from ddp_operator.kube.cache import ObjectCache
from ddp_operator.kube.client import ApiClient, ObjectNotFound, call, pages, trim

logger = logging.getLogger(__name__)

INTERVAL: Final = 30.0
"""Seconds between two lists."""
HEARTBEAT: Final = timedelta(minutes=3)
"""Time between two heartbeats of an eviction. Kubernetes requires one every 20 minutes."""
MOST: Final = 500
"""Requests of a kind that are followed, and pods of other owners that are read after a list."""
_ABSENCE: Final = 20  # lists that are left out after the API server did not serve a kind, or refused it
_ENDED: Final = ("Succeeded", "Failed")

Drains = dict[Key, dict[str, str]]
"""Who drains a pod and why, by resource and by the name of the pod."""
Follow = Callable[[str, Object, Drains], Awaitable[None]]


class _DrainSpec(msgspec.Struct, rename="camel"):
    """The spec of a DrainRequest, as NVSentinel documents it."""

    node_name: Annotated[str, msgspec.Meta(min_length=1)]
    pods_to_drain: dict[str, list[str]] = {}
    reason: str = ""
    check_name: str = ""


@dataclass(eq=False)
class DrainWatch:
    """Reads the requests. ``on_change`` is called for every resource whose requests have changed.

    ``source``: the DrainRequests, as NAMESPACE/RESOURCE.VERSION.GROUP; empty: none. ``condition``: the type of the
    condition by which their requester recognizes the end.
    """

    client: ApiClient
    store: ObjectCache
    namespaces: Sequence[str]
    on_change: Callable[[Key], None]
    source: str = ""
    condition: str = ""
    clock: Callable[[], datetime] = utc_now
    _found: dict[str, Drains] = field(default_factory=dict)
    """The requests by the kinds that the API server serves."""
    _absent: dict[str, int] = field(default_factory=dict)
    _reads_left: int = 0

    @property
    def serves_evictions(self) -> bool:
        """Whether the API server serves Evictions, and the operator may list them."""
        return "Eviction" in self._found

    def list_drains(self, key: Key) -> Mapping[str, str]:
        """Return who drains pods of a resource and why, by the name of the pod."""
        return {name: text for found in self._found.values() for name, text in found.get(key, {}).items()}

    async def run(self) -> None:
        """Read the requests at intervals without end."""
        while True:
            await asyncio.sleep(INTERVAL)
            await self.read()

    async def read(self) -> None:
        """Read all requests once, follow them, and report to their requesters."""
        self._reads_left = MOST
        namespace, _, kind = self.source.partition("/")
        if kind:
            await self._read_kind(kind, [namespace], {}, self._follow_request)
        selector = {"labelSelector": f"{EVICTION_RESPONDER}=responder"}
        await self._read_kind("Eviction", self.namespaces or [None], selector, self._follow_eviction)

    async def _read_kind(
        self, kind: str, scopes: Sequence[str | None], params: Mapping[str, str], follow: Follow
    ) -> None:
        self._absent[kind] = self._absent.get(kind, 0) - 1
        if self._absent[kind] > 0:
            return
        former = self._found.get(kind, {})
        found: Drains = defaultdict(dict)
        try:
            items: list[Object] = []
            for scope in scopes:
                async for page in pages(self.client, kind, scope, {**params, "limit": "100"}, refusable=True):
                    items += page.get("items") or ()
                    if len(items) >= MOST:
                        break
            for item in items:
                await follow(kind, item, found)
            self._found[kind] = found
        except (ObjectNotFound, Refused) as error:
            self._absent[kind] = _ABSENCE
            self._found.pop(kind, None)
            found.clear()
            if kind != "Eviction" or isinstance(error, Refused):
                logger.warning("requests to drain pods are not followed: %s", error)
        except ClusterError as error:
            logger.warning("cannot read requests to drain pods: %s; retrying", error)
            return
        for key in former.keys() | found.keys():
            if former.get(key) != found.get(key):
                self.on_change(key)

    async def _follow_request(self, kind: str, item: Object, found: Drains) -> None:
        """Follow a DrainRequest, and write its condition if that changes. Raises: ClusterError."""
        conditions = (item.get("status") or {}).get("conditions") or []
        before: Object = next((condition for condition in conditions if condition.get("type") == self.condition), {})
        if before.get("status") == "True":
            return
        try:
            spec = msgspec.convert(item.get("spec"), _DrainSpec)
            message = await self._find_remaining(spec, f"DrainRequest {_name(item)}", found)
        except msgspec.ValidationError as error:
            message = f"the request is invalid: {error}; it needs nodeName and podsToDrain {{namespace: [pod]}}"
        if message and before.get("message") == message:
            return
        after = {
            "type": self.condition,
            "status": "False" if message else "True",
            "reason": "Draining" if message else "Drained",
            "message": message or "no named pod runs on the node",
            "lastTransitionTime": format_time(self.clock()),
        }
        others = [condition for condition in conditions if condition.get("type") != self.condition]
        await self._report(kind, item, {"conditions": [*others, after]})

    async def _find_remaining(self, spec: _DrainSpec, request: str, found: Drains) -> str:
        """Return what a DrainRequest waits for, and add its pods of training jobs to ``found``."""
        cause = trim(": ".join(filter(None, (request, spec.reason or spec.check_name))), 300)
        own = []
        foreign = []
        for namespace, name in ((namespace, name) for namespace, names in spec.pods_to_drain.items() for name in names):
            key = self._find_owner(namespace, name)
            if key is not None:
                found[key][name] = cause
                own.append(f"{namespace}/{name}")
            elif await self._may_run(namespace, name, spec.node_name):
                foreign.append(f"{namespace}/{name}")
        waits = [f"these training pods save and move: {', '.join(own)}"] if own else []
        if foreign:
            waits.append(f"this operator does not move pods of other owners: {', '.join(foreign)}")
        return trim("; ".join(waits), 1024)

    async def _may_run(self, namespace: str, name: str, node: str) -> bool:
        """Return whether a pod of another owner runs on a node, or cannot be read. Raises: ClusterError."""
        self._reads_left -= 1
        if self._reads_left < 0:
            return True
        try:
            pod = await call(self.client, "GET", "Pod", namespace, name, refusable=True)
        except ObjectNotFound:
            return False
        except Refused:
            return True
        return pod["spec"].get("nodeName") == node and pod["status"].get("phase") not in _ENDED

    async def _follow_eviction(self, kind: str, item: Object, found: Drains) -> None:
        """Follow an Eviction while the operator is its active responder. Raises: ClusterError."""
        status = item.get("status") or {}
        active = {target["name"] for target in status.get("targetResponders") or () if target["state"] == "Active"}
        responders = {responder["name"]: responder for responder in status.get("responders") or ()}
        own = responders.get(EVICTION_RESPONDER, {"name": EVICTION_RESPONDER})
        pod = item["spec"]["target"].get("pod")
        if EVICTION_RESPONDER not in active or own.get("completionTime") or pod is None:
            return
        now = self.clock()
        key = self._find_owner(item["metadata"]["namespace"], pod["name"], pod["uid"])
        if key is None:
            after = {"completionTime": format_time(now), "message": "the pod has ended"}
        else:
            requesters = status.get("requesters") or ()
            names = [requester["name"] for requester in requesters if requester["intent"] == "Eviction"]
            found[key][pod["name"]] = trim(f"eviction requested by {', '.join(names)}", 300)
            if now - (parse_time(own.get("heartbeatTime")) or EPOCH) < HEARTBEAT:
                return
            after = {"heartbeatTime": format_time(now), "message": f"the pod of DDPTrainingJob {key} saves and moves"}
        responders[EVICTION_RESPONDER] = own | after
        await self._report(kind, item, {"responders": list(responders.values())})

    def _find_owner(self, namespace: str, name: str, uid: str | None = None) -> Key | None:
        """Return the resource of a pod that runs; None: the pod has ended, or is no pod of a training job."""
        entry = self.store.entry("Pod", namespace, name)
        if entry is None or entry.uid != (uid or entry.uid):
            return None
        pod: dict[str, Any] = msgspec.json.decode(entry.body)
        return None if (pod.get("status") or {}).get("phase") in _ENDED else entry.key

    async def _report(self, kind: str, item: Object, status: Object) -> None:
        """Write the status of a request at the version that was read. Raises: ClusterError."""
        meta = item["metadata"]
        body = {"metadata": {"resourceVersion": meta["resourceVersion"]}, "status": status}
        options = {"params": {"fieldManager": MANAGED_BY}, "content_type": "application/merge-patch+json", "body": body}
        try:
            await call(self.client, "PATCH", kind, meta["namespace"], meta["name"], "status", refusable=True, **options)
        except (ClusterError, Refused) as error:  # a conflict, for example; the next list repeats it
            logger.warning("cannot report to %s: %s", _name(item), error)


def add_responder(manifest: Object) -> Object:
    """Return a Job whose pods name the operator as eviction responder; any other object and a gang unchanged.

    Kubernetes does not support responders of pods in a PodGroup.
    """
    if manifest["kind"] != "Job" or "scheduling" in manifest["spec"]:
        return manifest
    template = manifest["spec"]["template"]
    if "schedulingGroup" in template["spec"]:
        return manifest
    # The priority is that of the component that manages a pod, as Kubernetes defines it.
    responders = {"evictionResponders": [{"name": EVICTION_RESPONDER, "priority": 10_000}]}
    return {**manifest, "spec": manifest["spec"] | {"template": template | {"spec": template["spec"] | responders}}}


def _name(item: Object) -> str:
    return f"{item['metadata']['namespace']}/{item['metadata']['name']}"

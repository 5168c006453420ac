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
from functools import partial
from typing import Annotated, Any, Final

import msgspec

from ddp_operator.api.cluster import Key, Object
from ddp_operator.api.cluster_errors import ClusterError, Refused
from ddp_operator.api.constants import GROUP, MANAGED_BY
from ddp_operator.api.faults import contain, name_object
from ddp_operator.api.kubeobjects import EPOCH, format_time, parse_time, utc_now
from ddp_operator.decide.hooks import Service
from ddp_operator.kube.cache import ObjectCache
from ddp_operator.kube.client import ApiClient, ObjectNotFound, call, pages, trim

logger = logging.getLogger(__name__)

EVICTION_RESPONDER: Final = f"{GROUP}/operator"
"""The operator's name in spec.evictionResponders of pods."""
INTERVAL: Final = 30.0
"""Seconds between two lists."""
HEARTBEAT: Final = timedelta(minutes=3)
"""Time between two heartbeats of an eviction. Kubernetes requires one every 20 minutes."""
MOST: Final = 500
"""Requests of a kind that are followed, and pods of other owners that are read after a list."""
_ABSENCE: Final = 20  # lists of Evictions that are left out after the API server did not serve them
_ENDED: Final = ("Succeeded", "Failed")

Drains = dict[Key, dict[str, str]]
"""Who drains a pod and why, by resource and by the name of the pod."""
Report = Callable[[], Awaitable[None]]
"""Reports to the requester of one request. Raises: ClusterError."""
Follow = Callable[[str, Object, Drains], Report | None]
"""Adds the pods that a request names, and returns the report to its requester. None: the request is done."""
_Name = Annotated[str, msgspec.Meta(pattern=r"^[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?$")]


class _Meta(msgspec.Struct):
    """The metadata of a request, which an API server has checked."""

    namespace: str
    name: str
    resource_version: str = msgspec.field(name="resourceVersion")


class _DrainSpec(msgspec.Struct, rename="camel"):
    """The spec of a DrainRequest, as NVSentinel documents it."""

    node_name: _Name
    pods_to_drain: dict[_Name, list[_Name]] = {}
    reason: str = ""
    check_name: str = ""


class _DrainStatus(msgspec.Struct):
    conditions: list[dict[str, Any]] | None = None


class _DrainRequest(msgspec.Struct):
    """A DrainRequest. Its spec is converted apart, so that the requester can read its faults."""

    metadata: _Meta
    spec: Any = None
    status: _DrainStatus | None = None


class _PodReference(msgspec.Struct):
    name: str
    uid: str


class _EvictionTarget(msgspec.Struct):
    pod: _PodReference | None = None


class _EvictionSpec(msgspec.Struct):
    target: _EvictionTarget


class _TargetResponder(msgspec.Struct):
    name: str
    state: str


class _Requester(msgspec.Struct):
    name: str
    intent: str


class _EvictionStatus(msgspec.Struct, rename="camel"):
    requesters: list[_Requester] | None = None
    target_responders: list[_TargetResponder] | None = None
    responders: list[dict[str, Any]] | None = None


class _Eviction(msgspec.Struct):
    """An Eviction of Kubernetes 1.37."""

    metadata: _Meta
    spec: _EvictionSpec
    status: _EvictionStatus = msgspec.field(default_factory=_EvictionStatus)


@dataclass(eq=False)
class DrainWatch(Service):
    """The service that reads the requests. ``on_change`` is called for every job whose requests have changed.

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
    _reports: list[tuple[str, str, Report]] = field(default_factory=list)
    """Kind and name of the requests of the last lists, and what to report to their requesters."""
    _absent: dict[str, int] = field(default_factory=dict)
    _reads_left: int = 0

    @property
    def serves_evictions(self) -> bool:
        """Whether the API server serves Evictions, and the operator may list them."""
        return "Eviction" in self._found

    def list_departures(self, key: Key) -> Mapping[str, str]:
        """See ``Service``."""
        return {name: text for found in self._found.values() for name, text in found.get(key, {}).items()}

    def amend(self, manifest: Object) -> Object:
        """Name the operator as the responder of a Job's pods, if the API server serves Evictions."""
        return add_responder(manifest) if self.serves_evictions else manifest

    async def prepare(self) -> None:
        """Read the requests before the first Job, whose pods depend on what the API server serves."""
        await self.read()

    async def run(self) -> None:
        """Report to the requesters and read the requests at intervals without end."""
        while True:
            await self.report()
            await asyncio.sleep(INTERVAL)
            await self.read()

    async def read(self) -> None:
        """Read all requests once. Jobs wait for that at the start, so it takes one list for each kind."""
        self._reports = []
        namespace, _, kind = self.source.partition("/")
        if kind:
            await self._read_kind(kind, [namespace], {}, self._follow_request)
        selector = {"labelSelector": f"{EVICTION_RESPONDER}=responder"}
        await self._read_kind("Eviction", self.namespaces or [None], selector, self._follow_eviction)

    async def report(self) -> None:
        """Report to the requesters of all requests that were read."""
        self._reads_left = MOST
        for kind, name, report in self._reports:
            with contain(kind, name):
                try:
                    await report()
                except (ClusterError, Refused) as error:  # a conflict, for example; the next list repeats it
                    logger.warning("cannot report to %s: %s", name, error)

    async def _read_kind(
        self, kind: str, scopes: Sequence[str | None], params: Mapping[str, str], follow: Follow
    ) -> None:
        if self._absent.get(kind, 0) > 1:
            self._absent[kind] -= 1
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
                with contain(kind, name_object(item)):
                    report = follow(kind, item, found)
                    if report is not None:
                        self._reports.append((kind, name_object(item), report))
            self._found[kind] = found
            self._absent.pop(kind, None)
        except (ObjectNotFound, Refused) as error:
            self._found.pop(kind, None)
            found.clear()
            is_new = kind not in self._absent
            # A setting names DrainRequests, so their kind is created soon. A cluster gets Evictions by an upgrade only.
            self._absent[kind] = _ABSENCE if kind == "Eviction" else 1
            if is_new and (kind != "Eviction" or isinstance(error, Refused)):
                logger.warning("requests to drain pods are not followed: %s; retrying", error)
        except ClusterError as error:
            logger.warning("cannot read requests to drain pods: %s; retrying", error)
            return
        for key in former.keys() | found.keys():
            if former.get(key) != found.get(key):
                self.on_change(key)

    def _follow_request(self, kind: str, item: Object, found: Drains) -> Report | None:
        """Follow a DrainRequest. Raises: msgspec.ValidationError."""
        request = msgspec.convert(item, _DrainRequest)
        conditions = (request.status and request.status.conditions) or []
        before: Object = next((condition for condition in conditions if condition.get("type") == self.condition), {})
        if before.get("status") == "True":
            return None
        try:
            spec = msgspec.convert(request.spec, _DrainSpec)
        except msgspec.ValidationError as error:
            problem = trim(f"the request is invalid: {error}; it needs nodeName and podsToDrain {{namespace: [pod]}}")
            return partial(self._report_request, kind, request, problem)
        name = f"{request.metadata.namespace}/{request.metadata.name}"
        cause = trim(": ".join(filter(None, (f"DrainRequest {name}", spec.reason or spec.check_name))), 300)
        named = [(namespace, pod) for namespace, pods in spec.pods_to_drain.items() for pod in pods]
        own = {}
        for namespace, pod in named:
            key = self._find_owner(namespace, pod, node=spec.node_name)
            if key is not None:
                found[key][pod] = cause
                own[namespace, pod] = key
        others = [pod for pod in named if pod not in own]
        return partial(self._report_remaining, kind, request, spec.node_name, list(own), others)

    async def _report_remaining(
        self,
        kind: str,
        request: _DrainRequest,
        node: str,
        own: Sequence[tuple[str, str]],
        others: Sequence[tuple[str, str]],
    ) -> None:
        """Report which of the named pods the request waits for. Raises: ClusterError, Refused."""
        foreign = [pod for pod in others if await self._may_run(*pod, node)]
        waits = [f"these training pods save and move: {', '.join(map('/'.join, own))}"] if own else []
        if foreign:
            waits.append(f"this operator does not move pods of other owners: {', '.join(map('/'.join, foreign))}")
        await self._report_request(kind, request, trim("; ".join(waits), 1024))

    async def _report_request(self, kind: str, request: _DrainRequest, message: str) -> None:
        """Write the condition of a DrainRequest if it changes. ``message``: what it waits for; empty: nothing.

        Raises: ClusterError, Refused.
        """
        conditions = (request.status and request.status.conditions) or []
        before: Object = next((condition for condition in conditions if condition.get("type") == self.condition), {})
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
        await self._write_status(kind, request.metadata, {"conditions": [*others, after]})

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

    def _follow_eviction(self, kind: str, item: Object, found: Drains) -> Report | None:
        """Follow an Eviction while the operator is its active responder. Raises: msgspec.ValidationError."""
        eviction = msgspec.convert(item, _Eviction)
        status = eviction.status
        active = {target.name for target in status.target_responders or () if target.state == "Active"}
        responders = {str(responder["name"]): responder for responder in status.responders or ()}
        own = responders.get(EVICTION_RESPONDER, {"name": EVICTION_RESPONDER})
        pod = eviction.spec.target.pod
        if EVICTION_RESPONDER not in active or own.get("completionTime") or pod is None:
            return None
        now = self.clock()
        key = self._find_owner(eviction.metadata.namespace, pod.name, uid=pod.uid)
        if key is None:
            after = {"completionTime": format_time(now), "message": "the pod has ended"}
        else:
            names = [requester.name for requester in status.requesters or () if requester.intent == "Eviction"]
            found[key][pod.name] = trim(f"eviction requested by {', '.join(names)}", 300)
            if now - (parse_time(own.get("heartbeatTime")) or EPOCH) < HEARTBEAT:
                return None
            after = {"heartbeatTime": format_time(now), "message": f"the pod of DDPTrainingJob {key} saves and moves"}
        responders[EVICTION_RESPONDER] = own | after
        return partial(self._write_status, kind, eviction.metadata, {"responders": list(responders.values())})

    def _find_owner(self, namespace: str, name: str, *, uid: str = "", node: str = "") -> Key | None:
        """Return the resource of a pod that runs, with a UID or on a node.

        None: the pod has ended, runs on another node, or is no pod of a training job.
        """
        entry = self.store.entry("Pod", namespace, name)
        if entry is None or (uid and entry.uid != uid):
            return None
        pod: dict[str, Any] = msgspec.json.decode(entry.body)
        if (pod.get("status") or {}).get("phase") in _ENDED:
            return None
        # A request is about a node: whoever may create it must not move the pods of all others.
        return entry.key if not node or (pod.get("spec") or {}).get("nodeName") == node else None

    async def _write_status(self, kind: str, meta: _Meta, status: Object) -> None:
        """Write the status of a request at the version that was read. Raises: ClusterError, Refused."""
        body = {"metadata": {"resourceVersion": meta.resource_version}, "status": status}
        options = {"params": {"fieldManager": MANAGED_BY}, "content_type": "application/merge-patch+json", "body": body}
        await call(self.client, "PATCH", kind, meta.namespace, meta.name, "status", refusable=True, **options)


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

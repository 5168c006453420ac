"""The stand-in's HTTP interface: the API server's paths, mapped to the storage."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from aiohttp import web

from .errors import ApiFailure, not_found
from .faults import Faults
from .patches import json_patch, merge, strategic
from .resources import BUILTIN, Kind, custom_kind
from .scale import from_scale, to_scale
from .selectors import labels_of, parse
from .storage import Object, Storage, check_version, copied
from .validation import admit, default_builtin
from .watching import Watches

VERBS = {"GET": "get", "POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}
FINISHED = ("Succeeded", "Failed")
PRECONDITIONS = (
    ("uid", "UID", "deleted and then recreated"),
    ("resourceVersion", "ResourceVersion", "modified"),
)


class Ask(NamedTuple):
    """One parsed request."""

    method: str
    path: str
    query: Mapping[str, str]
    body: bytes = b""
    content_type: str = "application/json"
    accept: str = ""


class RequestTarget(NamedTuple):
    """The target of a request."""

    verb: str
    kind: Kind
    namespace: str | None
    name: str | None
    subresource: str | None

    @property
    def resource(self) -> str:
        """The plural, with the subresource."""
        return f"{self.kind.plural}/{self.subresource}" if self.subresource else self.kind.plural


class Call(NamedTuple):
    """One call: the request, the HTTP status of the response (0: interrupted) and the caller's bearer token."""

    verb: str
    resource: str
    status: int
    user: str


EVENTS = "events.k8s.io"
CORE_NAMES = {"regarding": "involvedObject", "note": "message", "reportingController": "reportingComponent"}


class StandInApi:
    """Responds to requests. Lives in one event loop; ``running.py`` gives it a thread."""

    def __init__(self, storage: Storage, faults: Faults, *, bookmark_interval: float = 1.0) -> None:
        self.storage = storage
        self.faults = faults
        self.watches = Watches(storage, bookmark_interval)
        self.kinds: list[Kind] = list(BUILTIN)
        self.calls: list[Call] = []
        """Every call except those of discovery."""
        self.allow: Callable[[dict[str, Any]], bool] = lambda attributes: True
        """Answers SelfSubjectAccessReviews."""
        self.webhook: Callable[[Object], None] | None = None
        """Changes a Job at its creation, as a mutating admission webhook."""
        self.logs: dict[tuple[str, str], list[str]] = {}
        """Lines of each pod's log, by namespace and name, each after the kubelet's time."""

    def app(self) -> web.Application:
        """Return the aiohttp application."""
        app = web.Application(client_max_size=1 << 24)
        app.router.add_get("/{page:healthz|readyz|livez}", self._well)
        app.router.add_get("/version", self._version)
        app.router.add_get("/{root:api|apis}", self._discovery)
        app.router.add_get("/{root:api}/{version}", self._discovery)
        app.router.add_get("/{root:apis}/{group}", self._discovery)
        app.router.add_get("/{root:apis}/{group}/{version}", self._discovery)
        app.router.add_post("/apis/authorization.k8s.io/v1/selfsubjectaccessreviews", self._review)
        app.router.add_route("*", "/{tail:apis?/.+}", self._serve)
        return app

    def kind(self, name: str) -> Kind:
        """Return a served kind by its name."""
        return next(kind for kind in self.kinds if kind.kind == name)

    def install(self, crd: Object) -> None:
        """Serve a custom resource and store its definition."""
        self.kinds.append(custom_kind(crd))
        self.storage.create(self.kind("CustomResourceDefinition"), copied(crd))

    async def _well(self, _: web.Request) -> web.Response:
        return web.Response(text="ok")

    async def _version(self, _: web.Request) -> web.Response:
        return web.json_response({"major": "1", "minor": "36", "gitVersion": "v1.36.0", "platform": "linux/amd64"})

    async def _discovery(self, request: web.Request) -> web.Response:
        info = request.match_info
        group = info.get("group", "")
        version = info.get("version")
        if info["root"] == "api" and version is None:
            return web.json_response({"kind": "APIVersions", "versions": ["v1"]})
        groups = [
            _group(name, {kind.version for kind in self.kinds if kind.group == name})
            for name in sorted({kind.group for kind in self.kinds} - {""})
        ]
        if version is None:
            results = [entry for entry in groups if entry["name"] == group]
            if group and not results:
                return _answer(ApiFailure(404, "the server could not find the requested resource"))
            return web.json_response(
                {"kind": "APIGroup", **results[0]} if group else {"kind": "APIGroupList", "groups": groups}
            )
        resources = [
            entry for kind in self.kinds if (kind.group, kind.version) == (group, version) for entry in kind.discovery()
        ]
        if not resources:
            return _answer(ApiFailure(404, "the server could not find the requested resource"))
        name = f"{group}/{version}" if group else version
        return web.json_response({"kind": "APIResourceList", "groupVersion": name, "resources": resources})

    async def _review(self, request: web.Request) -> web.Response:
        review = await request.json()
        allowed = self.allow(review["spec"].get("resourceAttributes", {}))
        return web.json_response(review | {"status": {"allowed": allowed}}, status=201)

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        accept = request.headers.get("Accept", "")
        body = await request.read()
        ask = Ask(request.method, request.path, request.query, body, request.content_type, accept)
        try:
            place = self.route(ask)
        except ApiFailure as failure:
            return _answer(failure)
        verb, kind, namespace, name, subresource = place
        resource = place.resource
        user = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if impersonated := request.headers.get("Impersonate-User"):
            return _answer(forbidden(place, impersonated))
        fault = self.faults.match(verb, resource, name or "")
        if fault is not None and fault.status == "timeout":
            await asyncio.sleep(3600)
        elif fault is not None and fault.status == "drop":
            self.calls.append(Call(verb, resource, 0, user))
            return _cut(request)
        try:
            if fault is not None and isinstance(fault.status, int):
                raise ApiFailure(fault.status, fault.message, retry_after=fault.retry_after)
            if verb == "watch":
                self.calls.append(Call(verb, resource, 200, user))
                return await self.watches.serve(request, kind, namespace)
            if subresource == "log" and name is not None:
                self.calls.append(Call(verb, resource, 200, user))
                return await self._log(request, namespace or "", name)
            status, answer = self.perform(ask, place)
            if "as=PartialObjectMetadata;" in accept and verb != "list":
                answer = _view_metadata(answer)
        except ApiFailure as failure:
            self.calls.append(Call(verb, resource, failure.code, user))
            return _answer(failure)
        self.calls.append(Call(verb, resource, status, user))
        if fault is not None and fault.status == "lost answer":
            return _cut(request)
        return web.Response(body=self.watches.encode(answer), status=status, content_type="application/json")

    async def _log(self, request: web.Request, namespace: str, name: str) -> web.StreamResponse:
        """Send a pod's log, and with ``follow`` further lines until the pod has ended."""
        pods = self.kind("Pod")
        self.storage.get(pods, namespace, name)
        answer = web.StreamResponse()
        await answer.prepare(request)
        tail = request.query.get("tailLines")
        lines = self.logs.setdefault((namespace, name), [])
        sent = max(0, len(lines) - int(tail)) if tail is not None else 0
        while True:
            pod = self.storage.find(pods, namespace, name)
            ended = pod is None or pod["status"].get("phase") in FINISHED
            while sent < len(lines):
                await answer.write(f"{lines[sent]}\n".encode())
                sent += 1
            if ended or request.query.get("follow") != "true":
                return answer
            await asyncio.sleep(0.02)

    def route(self, ask: Ask) -> RequestTarget:
        """Return the target of a request. Raises: ApiFailure 404."""
        parts = ask.path.strip("/").split("/")
        group, version, rest = ("", parts[1], parts[2:]) if parts[0] == "api" else (parts[1], parts[2], parts[3:])
        namespace = None
        if len(rest) > 2 and rest[0] == "namespaces":
            namespace = rest[1]
            rest = rest[2:]
        if (group, rest[:1]) == (EVENTS, ["events"]):
            group = ""  # the same objects in another form
        for kind in self.kinds:
            if rest and (kind.group, kind.version, kind.plural) == (group, version, rest[0]):
                name, subresource = (*rest[1:3], None, None)[:2]
                if subresource is None or subresource in kind.subresources:
                    verb = VERBS[ask.method]
                    if verb == "get" and name is None:
                        verb = "watch" if ask.query.get("watch") in ("true", "1") else "list"
                    return RequestTarget(verb, kind, namespace, name, subresource)
        raise ApiFailure(404, "the server could not find the requested resource")

    def perform(self, ask: Ask, place: RequestTarget) -> tuple[int, Object]:
        """Perform a request. Return the HTTP status and the response. Raises: ApiFailure."""
        verb, kind, namespace, name, subresource = place
        body = ask.body
        if verb == "list":
            return 200, self._list(ask, kind, namespace)
        where = namespace or ""
        if verb == "create" and subresource == "binding" and name is not None:
            return 201, self._bind(kind, where, name, json.loads(body))
        if verb == "create":
            return 201, self._create(ask, kind, where, _parse(body))
        if name is None:
            raise ApiFailure(405, "the server does not allow this method on the requested resource")
        if verb == "patch" and "apply-patch" in ask.content_type and self.storage.find(kind, where, name) is None:
            return 201, self._create(ask, kind, where, _parse(body))
        stored = self.storage.get(kind, where, name)
        if verb == "get":
            return 200, to_scale(kind, stored) if subresource == "scale" else stored
        if verb == "delete":
            return 200, self._delete(kind, stored, json.loads(body) if body else {})
        return 200, self._change(ask, verb, kind, stored, subresource)

    def _list(self, ask: Ask, kind: Kind, namespace: str | None) -> Object:
        matches = parse(ask.query.get("labelSelector", ""))
        fields = [part.partition("=")[::2] for part in ask.query.get("fieldSelector", "").split(",") if part]
        items = [
            obj
            for obj in self.storage.list(kind, namespace)
            if matches(labels_of(obj)) and all(_field(obj, path) == value for path, value in fields)
        ]
        # The token is the start of a page. A real server returns the state of the first page, this one the current.
        version, _, start = ask.query.get("continue", "").partition(":")
        first = int(start or 0)
        limit = int(ask.query.get("limit") or 0)
        meta = {"resourceVersion": version or str(self.storage.version)}
        if limit and len(items) > first + limit:
            meta["continue"] = f"{meta['resourceVersion']}:{first + limit}"
        items = items[first : first + limit] if limit else items[first:]
        if "as=PartialObjectMetadataList" in ask.accept:
            partial = [_view_metadata(obj) for obj in items]
            return {
                "kind": "PartialObjectMetadataList", "apiVersion": "meta.k8s.io/v1", "metadata": meta, "items": partial,
            }  # fmt: skip
        return {"kind": f"{kind.kind}List", "apiVersion": kind.api_version, "metadata": meta, "items": items}

    def _create(self, ask: Ask, kind: Kind, namespace: str, obj: Object) -> Object:
        if kind.namespaced:
            if self.storage.find(self.kind("Namespace"), "", namespace) is None:
                raise not_found("namespaces", namespace)
            obj["metadata"]["namespace"] = namespace
        elif "namespace" in obj["metadata"]:
            del obj["metadata"]["namespace"]
        if obj.get("apiVersion") == f"{EVENTS}/v1":
            obj = _to_core_event(obj)
        obj |= {"apiVersion": kind.api_version, "kind": kind.kind}
        if kind.kind == "Event" and obj.get("involvedObject", {}).get("namespace") != namespace:
            where = "involvedObject.namespace: Invalid value: does not match event.namespace"
            raise ApiFailure(422, f'Event "{obj["metadata"].get("name")}" is invalid: {where}')
        if self.webhook is not None and kind.kind == "Job":
            self.webhook(obj)
        if "status" in kind.subresources and kind.schema is not None:
            obj.pop("status", None)
        obj = admit(kind, obj, None, strictness=ask.query.get("fieldValidation", "Warn"))
        dry_run = ask.query.get("dryRun") == "All"
        obj["metadata"].setdefault("uid", "")
        if kind.kind in ("Job", "Pod", "Namespace"):
            default_builtin(kind, obj)
        created = self.storage.create(kind, obj, dry_run=dry_run)
        if kind.kind == "CustomResourceDefinition" and not dry_run:
            self.kinds.append(custom_kind(created))
        return created

    def _change(self, ask: Ask, verb: str, kind: Kind, stored: Object, subresource: str | None) -> Object:
        before = to_scale(kind, stored) if subresource == "scale" else stored
        if verb == "update":
            changed = _parse(ask.body)
        elif "json-patch" in ask.content_type:
            changed = json_patch(before, json.loads(ask.body))
        elif "strategic" in ask.content_type:
            changed = strategic(before, _parse(ask.body, partial=True))
        else:  # merge patches; apply patches are treated as such, which is enough for kubectl here
            changed = merge(before, _parse(ask.body, partial=True))
        if subresource == "scale":
            after = from_scale(kind, stored, changed)
        elif subresource == "status":
            after = copied(stored) | {"status": changed.get("status", {})}
            kept = ("uid", "resourceVersion", *(["labels"] if kind.kind == "Pod" else []))
            after["metadata"] |= {key: changed["metadata"][key] for key in kept if key in changed["metadata"]}
        else:
            after = changed
            if "status" in kind.subresources:
                after.pop("status", None)
                if "status" in stored:
                    after["status"] = stored["status"]
        check_version(kind, stored, after)
        _check_metadata(kind, stored["metadata"], after["metadata"])
        strictness = ask.query.get("fieldValidation", "Warn")
        after = admit(kind, after, stored, strictness=strictness, status_only=subresource == "status")
        _keep_template(kind, stored, after)
        label = f"{verb} {subresource}" if subresource else verb
        dry_run = ask.query.get("dryRun") == "All"
        updated = self.storage.update(kind, stored, after, dry_run=dry_run, verb=label)
        return to_scale(kind, updated) if subresource == "scale" else updated

    def _delete(self, kind: Kind, stored: Object, options: Object) -> Object:
        meta = stored["metadata"]
        for name, words, guess in PRECONDITIONS:
            expected = options.get("preconditions", {}).get(name)
            if expected is not None and expected != meta[name]:
                differs = (
                    f"the {words} in the precondition ({expected}) does not match the {words} in record ({meta[name]})"
                )
                which = f'Operation cannot be fulfilled on {kind.named} "{meta["name"]}"'
                raise ApiFailure(409, f"{which}: {differs}. The object might have been {guess}")
        grace = None
        if kind.kind == "Pod" and stored["spec"].get("nodeName") and stored["status"].get("phase") not in FINISHED:
            expected = options.get("gracePeriodSeconds")
            grace = stored["spec"].get("terminationGracePeriodSeconds", 30) if expected is None else expected
        if options.get("propagationPolicy") == "Orphan":
            self._orphan(meta["uid"])
        remaining = self.storage.delete(kind, stored, grace=grace)
        if remaining is not None:
            return remaining
        if kind.kind == "Pod":
            return stored | {
                "metadata": {"deletionTimestamp": self.storage.timestamp(), **meta, "deletionGracePeriodSeconds": 0}
            }
        details = {"name": meta["name"], "kind": kind.plural, "uid": meta["uid"]}
        return {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "details": details}

    def _orphan(self, uid: str) -> None:
        for kind, obj in self.storage.peek():
            owners = obj["metadata"].get("ownerReferences") or []
            if any(owner["uid"] == uid for owner in owners):
                free = copied(obj)
                free["metadata"]["ownerReferences"] = [owner for owner in owners if owner["uid"] != uid]
                self.storage.update(kind, copied(obj), free)

    def _bind(self, kind: Kind, namespace: str, name: str, binding: Object) -> Object:
        pod = self.storage.get(kind, namespace, name)
        bound = copied(pod)
        bound["spec"]["nodeName"] = binding["target"]["name"]
        self.storage.update(kind, pod, bound, verb="bind")
        return {"kind": "Status", "apiVersion": "v1", "status": "Success"}


def _keep_template(kind: Kind, before: Object, after: Object) -> None:
    """A Job's template may not change (except scheduling fields of a suspended Job, which no test changes)."""
    if kind.kind != "Job":
        return
    wrong = None
    old = before["spec"]
    new = after["spec"]
    if old["template"] != new["template"]:
        wrong = "spec.template.spec: Invalid value: field is immutable"
    elif old["completions"] != new["completions"] != new["parallelism"]:
        wrong = "spec.completions: Invalid value: can only be modified in tandem with spec.parallelism"
    if wrong:
        raise ApiFailure(422, f'Job.batch "{before["metadata"]["name"]}" is invalid: {wrong}')


def forbidden(place: RequestTarget, user: str) -> ApiFailure:
    """The refusal of a client without permission."""
    verb, kind, namespace, name, _ = place
    subject = f'{kind.resource} "{name}"' if name else kind.resource
    where = "at the cluster scope" if namespace is None else f'in the namespace "{namespace}"'
    does = f'cannot {verb} resource "{place.resource}" in API group "{kind.group}" {where}'
    return ApiFailure(403, f'{subject} is forbidden: User "{user}" {does}')


def _check_metadata(kind: Kind, before: Object, after: Object) -> None:
    """Refuse changes of an object's immutable metadata."""
    if after.get("uid", before["uid"]) != before["uid"]:
        raise ApiFailure(
            422, f'{kind.named} "{before["name"]}" is invalid: metadata.uid: Invalid value: field is immutable'
        )
    added = set(after.get("finalizers") or ()) - set(before.get("finalizers") or ())
    if added and "deletionTimestamp" in before:
        words = f"no new finalizers can be added if the object is being deleted, found new finalizers {sorted(added)}"
        raise ApiFailure(422, f'{kind.named} "{before["name"]}" is invalid: metadata.finalizers: Forbidden: {words}')


def _parse(body: bytes, *, partial: bool = False) -> Object:
    try:
        obj = json.loads(body)
    except ValueError:
        raise ApiFailure(400, "the body is not JSON") from None
    if not isinstance(obj, dict) or not (partial or isinstance(obj.get("metadata"), dict)):
        raise ApiFailure(400, "the body is not an object")
    return obj


def _group(name: str, versions: set[str]) -> dict[str, Any]:
    entries = [{"groupVersion": f"{name}/{version}", "version": version} for version in sorted(versions)]
    return {"name": name, "versions": entries, "preferredVersion": entries[0]}


def _field(obj: Object, path: str) -> str:
    value: Any = obj
    for part in path.split("."):
        value = value.get(part, "") if isinstance(value, dict) else ""
    return str(value)


def _view_metadata(obj: Object) -> Object:
    return {"kind": "PartialObjectMetadata", "apiVersion": "meta.k8s.io/v1", "metadata": obj["metadata"]}


def _answer(failure: ApiFailure) -> web.Response:
    headers = {"Retry-After": str(failure.retry_after)} if failure.retry_after is not None else {}
    return web.json_response(failure.body(), status=failure.code, headers=headers)


def _cut(request: web.Request) -> web.Response:
    if request.transport is not None:
        request.transport.abort()
    return web.Response()


def _to_core_event(event: Object) -> Object:
    """Return an Event of ``events.k8s.io`` as ``v1`` has it. Raises: ApiFailure 422, for what ``v1`` accepts."""
    required = ("eventTime", "reportingController", "reportingInstance", "action", "reason", "type")
    errors = [f"{name}: Required value" for name in required if not event.get(name)]
    if len(event.get("note", "").encode()) > 1024:
        errors.append("message: Invalid value: can have at most 1024 characters")
    if errors:
        raise ApiFailure(422, f'Event.{EVENTS} "{event["metadata"].get("name")}" is invalid: {", ".join(errors)}')
    return {CORE_NAMES.get(name, name): value for name, value in event.items()}

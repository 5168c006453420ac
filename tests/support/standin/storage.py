"""The stand-in's etcd: objects, one counter of versions, a history, and watchers.

Everything runs in the server's event loop, so nothing is locked. Returned objects are copies, except those of
``peek``, which are read-only.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec

from .errors import ApiFailure, not_found
from .resources import Kind

Object = dict[str, Any]


def copied(obj: Object) -> Object:
    """Return a deep copy by way of JSON, which is ten times as fast as ``deepcopy``."""
    copy: Object = msgspec.json.decode(msgspec.json.encode(obj))
    return copy


def utc_now() -> datetime:
    """Return the time."""
    return datetime.now(UTC)


@dataclass(frozen=True)
class StoredChange:
    """One step of the history: the object before and after (None: it did not exist)."""

    version: int
    kind: Kind
    before: Object | None
    after: Object | None

    @property
    def namespace(self) -> str:
        obj = self.after or self.before
        assert obj is not None
        return str(obj["metadata"].get("namespace", ""))


class Storage:
    """All objects by kind, namespace and name. ``clock`` returns the time."""

    def __init__(self, clock: Callable[[], datetime] = utc_now) -> None:
        self.clock = clock
        self.new_uid: Callable[[], str] = lambda: str(uuid.uuid4())
        self.version = 1000
        self.history: list[StoredChange] = []
        self.compacted = 1000
        """Watches from a version below this one are answered with 410."""
        self.writes: list[tuple[str, str, str, str]] = []
        """Every write with an effect: verb, plural, namespace, name."""
        self._objects: dict[tuple[Kind, str, str], Object] = {}
        self._watchers: dict[object, Callable[[StoredChange], None]] = {}

    def get(self, kind: Kind, namespace: str, name: str) -> Object:
        """Return one object. Raises: ApiFailure 404."""
        try:
            return copied(self._objects[kind, namespace, name])
        except KeyError:
            raise not_found(kind.resource, name) from None

    def find(self, kind: Kind, namespace: str, name: str) -> Object | None:
        """Return one object or None."""
        result = self._objects.get((kind, namespace, name))
        return None if result is None else copied(result)

    def list(self, kind: Kind, namespace: str | None = None) -> list[Object]:
        """Return the objects of a kind, in all namespaces (None) or one, in the order of their names."""
        results = [
            (where, name, obj)
            for (of, where, name), obj in self._objects.items()
            if of == kind and (namespace is None or where == namespace)
        ]
        return [copied(obj) for _, _, obj in sorted(results, key=lambda item: item[:2])]

    def peek(self, kind: Kind | None = None) -> Iterator[tuple[Kind, Object]]:
        """Yield every object (of a kind), with its kind. They are the stored ones: do not change them."""
        for (of, _, _), obj in list(self._objects.items()):
            if kind in (None, of):
                yield of, obj

    def create(self, kind: Kind, obj: Object, *, dry_run: bool = False) -> Object:
        """Store a new object and return it as stored. Raises: ApiFailure 409."""
        meta = obj["metadata"]
        if not meta.get("name") and meta.get("generateName"):
            meta["name"] = meta["generateName"] + uuid.uuid4().hex[:5]
        ident = (kind, str(meta.get("namespace", "")), str(meta["name"]))
        if ident in self._objects:
            raise ApiFailure(409, f'{kind.resource} "{meta["name"]}" already exists', reason="AlreadyExists")
        meta |= {"uid": self.new_uid(), "creationTimestamp": self.timestamp(), "generation": 1}
        meta.pop("deletionTimestamp", None)
        if dry_run:
            return obj
        self._put("create", kind, None, obj)
        return copied(obj)

    def update(
        self, kind: Kind, before: Object, after: Object, *, dry_run: bool = False, verb: str = "update"
    ) -> Object:
        """Store a changed object; an equal one gets no new version. Raises: ApiFailure 409."""
        check_version(kind, before, after)
        for name in ("uid", "creationTimestamp", "resourceVersion", "generation", "deletionTimestamp"):
            if name in before["metadata"]:
                after["metadata"][name] = before["metadata"][name]
        if after == before or dry_run:
            return after
        if _generation_of(before) != _generation_of(after):
            after["metadata"]["generation"] = before["metadata"].get("generation", 1) + 1
        if after["metadata"].get("deletionTimestamp") and not _is_held(after):
            self._remove(verb, kind, after)
        else:
            self._put(verb, kind, before, after)
        return copied(after)

    def delete(self, kind: Kind, obj: Object, *, grace: int | None = None) -> Object | None:
        """Delete an object, or mark it if finalizers or a grace time keep it. Return it if it still exists."""
        marked = copied(obj)
        meta = marked["metadata"]
        meta["deletionGracePeriodSeconds"] = grace or 0
        if not meta.get("finalizers") and not grace:
            self._remove("delete", kind, marked)
            return None
        if "deletionTimestamp" not in meta:
            meta["deletionTimestamp"] = self.timestamp(grace or 0)
            meta["generation"] = meta.get("generation", 1) + 1
        if marked != obj:
            self._put("delete", kind, obj, marked)
        return marked

    def put_unchecked(self, kind: Kind, namespace: str, name: str, obj: Object) -> None:
        """Store an object of any shape, as a definition without a schema lets it through, and report it to watches."""
        self.version += 1
        before = self._objects.get((kind, namespace, name))
        self._objects[kind, namespace, name] = obj
        change = StoredChange(self.version, kind, before, obj)
        self.history.append(change)
        for tell in list(self._watchers.values()):
            tell(change)

    def compact(self) -> None:
        """Delete the history: every watch that resumes from an earlier version gets 410."""
        self.history.clear()
        self.compacted = self.version

    def watch(self, tell: Callable[[StoredChange], None]) -> Callable[[], None]:
        """Call ``tell`` for every change from now on. Return a function that ends the subscription."""
        token = object()
        self._watchers[token] = tell
        return lambda: self._watchers.pop(token, None) and None

    def timestamp(self, ahead: int = 0) -> str:
        """Return the time, or the time in some seconds, as Kubernetes writes it."""
        return (self.clock() + timedelta(seconds=ahead)).strftime("%Y-%m-%dT%H:%M:%SZ")

    def _put(self, verb: str, kind: Kind, before: Object | None, after: Object) -> None:
        self.version += 1
        meta = after["metadata"]
        meta["resourceVersion"] = str(self.version)
        namespace = str(meta.get("namespace", ""))
        stored = copied(after)
        self._objects[kind, namespace, str(meta["name"])] = stored
        self._record(verb, StoredChange(self.version, kind, before, stored))

    def _remove(self, verb: str, kind: Kind, obj: Object) -> None:
        self.version += 1
        meta = obj["metadata"]
        before = self._objects.pop((kind, str(meta.get("namespace", "")), str(meta["name"])))
        last = copied(obj)
        last["metadata"]["resourceVersion"] = str(self.version)
        self._record(verb, StoredChange(self.version, kind, before | {"metadata": last["metadata"]}, None))

    def _record(self, verb: str, change: StoredChange) -> None:
        obj = change.after or change.before
        assert obj is not None
        self.writes.append((verb, change.kind.plural, change.namespace, str(obj["metadata"]["name"])))
        self.history.append(change)
        for tell in list(self._watchers.values()):
            tell(change)


def check_version(kind: Kind, before: Object, after: Object) -> None:
    """Refuse a change of another version. Raises: ApiFailure 409."""
    expected = after["metadata"].get("resourceVersion")
    if expected and expected != before["metadata"]["resourceVersion"]:
        raise ApiFailure(
            409,
            f'Operation cannot be fulfilled on {kind.resource} "{before["metadata"]["name"]}": the object has been '
            "modified; please apply your changes to the latest version and try again",
        )


def _generation_of(obj: Object) -> Object:
    """Return the part of an object whose change makes a new generation."""
    return {key: value for key, value in obj.items() if key not in ("metadata", "status")}


def _is_held(obj: Object) -> bool:
    meta = obj["metadata"]
    return bool(meta.get("finalizers") or meta.get("deletionGracePeriodSeconds"))


class Mailbox:
    """A watcher's queue, for one event loop."""

    def __init__(self, storage: Storage) -> None:
        self.queue: asyncio.Queue[StoredChange] = asyncio.Queue()
        self.close = storage.watch(self.queue.put_nowait)

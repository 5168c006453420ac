"""The operator's cache of the cluster, updated by watch events, by its own writes, and by comparisons with lists.

The three sources deliver objects in any order, so an entry has its resourceVersion, and only a newer version replaces
it. The UID of a deleted object is kept for a while, so that a late event does not restore it.

Bodies are stored as JSON bytes and parsed on read. That takes some microseconds per reconcile, saves four fifths of the
memory, and makes them immutable.
"""

import hashlib
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from ddp_operator.api.cluster import Key, Object, Snapshot
from ddp_operator.api.constants import KIND
from ddp_operator.api.resources import claim_of
from ddp_operator.api.size import OVERSIZE
from ddp_operator.kube.children import CHILD_KINDS, has_metadata_only, key_of, trim_object
from ddp_operator.kube.incoming import LARGE, OMITTED, omit_large

TOMBSTONES: Final = 10_000
"""Maximum deleted objects of one period whose UIDs are kept."""
TOMBSTONE_SECONDS: Final = 200.0
"""Seconds of such a period, longer than a source lags: a frozen watch (150 s), its pause and a call's time limit.

A watch that lags longer restores a deleted object until its next event, which deletes it.
"""
GONE: Final = float("inf")

Id = tuple[str, str, str]
"""Kind, namespace, name."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One cached object."""

    uid: str
    version: str
    key: Key
    body: bytes
    content: bytes = b""
    """A digest of a resource without its version: annotations that the operator does not read change only that."""
    claim: str | None = None
    """The claim or the URL of a resource's checkpoints."""
    claimant: Object | None = None
    """The fields that other jobs with that claim read, so that no body is parsed for them."""
    is_brief: bool = False
    """Whether the body lacks the large members of the spec."""


class ObjectCache:
    """All custom resources and their children. Not thread-safe; use it in the operator's event loop."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._objects: dict[Id, Entry] = {}
        self._children: dict[Key, set[Id]] = {}
        self._tombstones: dict[str, float] = {}
        """Versions of deleted objects by UID, of this period."""
        self._former_tombstones: dict[str, float] = {}
        """Those of the period before."""
        self._period_ends = 0.0

    def __len__(self) -> int:
        """Return the number of cached objects."""
        return len(self._objects)

    def apply(self, kind: str, obj: Object) -> Key | None:
        """Store an object. Returns the resource it belongs to; None if nothing has changed, or it is not a child.

        An object whose labels or controller no longer make it a child is dropped. Raises: any exception for an object
        of an odd shape, which is ignored from then on.
        """
        meta = obj["metadata"]
        uid = str(meta.get("uid", ""))
        version = str(meta.get("resourceVersion", ""))
        key = key_of(kind, meta)
        ident = (kind, str(meta.get("namespace", "")), str(meta["name"]))
        old = self._objects.get(ident)
        if key is None:
            return self._disown(ident, uid, version)
        if not self._is_after_tombstone(uid, version):
            return None
        if old is not None and not _supersedes(version, old.version):
            return None
        try:
            kept = trim_object(kind, obj)
            body = msgspec.json.encode(kept)
            is_brief = kind == KIND and (len(body) > LARGE or OMITTED in (kept.get("spec") or {}))
            if is_brief:
                kept = _shorten(kept)
                body = msgspec.json.encode(kept)
            content = _digest_content(kept) if kind == KIND else b""
            claim = claim_of(obj) if kind == KIND else None
            claimant = _describe_claimant(kept) if claim is not None else None
        except Exception:
            # Its next version may be readable. Until then nothing waits for it.
            self._bury(uid, version_number(version))
            raise
        if old is not None:
            self._drop(ident, old)
        self._objects[ident] = Entry(uid, version, key, body, content, claim, claimant, is_brief)
        if kind != KIND:
            self._children.setdefault(key, set()).add(ident)
        is_unchanged = bool(content) and old is not None and (old.uid, old.content) == (uid, content)
        return None if is_unchanged else key

    def remove(self, kind: str, obj: Object) -> Key | None:
        """Remove an object after a DELETED event. Returns the resource it belonged to, or None."""
        meta = obj["metadata"]
        # A filtered watch also sends DELETED for an object that loses its label. It may get the label back, so only
        # events up to this version are outdated.
        version = version_number(meta.get("resourceVersion"))
        return self.mark_deleted(
            kind, str(meta.get("namespace", "")), str(meta["name"]), str(meta.get("uid", "")), version
        )

    def mark_deleted(self, kind: str, namespace: str, name: str, uid: str, version: int | None = None) -> Key | None:
        """Remove an object with this UID, and ignore later events up to ``version`` (default: all)."""
        self._bury(uid, version)
        ident = (kind, namespace, name)
        entry = self._objects.get(ident)
        if entry is None or entry.uid != uid:
            return None
        self._drop(ident, entry)
        if kind == KIND:
            # The garbage collector deletes its children. The watches may report that after a new resource's creation.
            for child in list(self._children.get(entry.key, ())):
                if has_metadata_only(child[0]):
                    self._drop(child, self._objects[child])
        return entry.key

    def snapshot(self, key: Key) -> Snapshot | None:
        """Return the cached resource and its children, children in the order of their names.

        The spec of a large resource has only its small members.
        """
        resource = self._objects.get((KIND, key.namespace, key.name))
        if resource is None:
            return None
        children: defaultdict[str, list[Any]] = defaultdict(list)
        shared = self._children.get(Key(key.namespace, ""), ())
        for ident in sorted((*self._children.get(key, ()), *shared)):
            child = msgspec.json.decode(self._objects[ident].body)
            children[ident[0]].append(child)
        return build_snapshot(msgspec.json.decode(resource.body), children)

    def count_children(self, key: Key) -> int:
        """Return the number of cached children of a resource."""
        return len(self._children.get(key, ()))

    def is_large(self, key: Key) -> bool:
        """Return whether the spec of a resource is not in the cache."""
        entry = self._objects.get((KIND, key.namespace, key.name))
        return entry is not None and entry.is_brief

    def entry(self, kind: str, namespace: str, name: str) -> Entry | None:
        """Return the entry of one object."""
        return self._objects.get((kind, namespace, name))

    def entries(self, kind: str, namespaces: Iterable[str] = ()) -> dict[str, tuple[Id, Entry]]:
        """Return the cached objects of a kind by UID, in these namespaces; in all if none are named."""
        selected = frozenset(namespaces)
        return {
            entry.uid: (ident, entry)
            for ident, entry in self._objects.items()
            if ident[0] == kind and (not selected or ident[1] in selected)
        }

    def bodies(self, kind: str) -> Iterator[bytes]:
        """Yield the cached objects of a kind as JSON. Other threads may call this."""
        for ident, entry in list(self._objects.items()):
            if ident[0] == kind:
                yield entry.body

    def resources_on_claim(self, namespace: str, claim: str) -> Iterator[Object]:
        """Yield name, age and state of the resources in a namespace that store checkpoints in this claim or URL."""
        for (kind, where, _), entry in self._objects.items():
            if kind == KIND and where == namespace and entry.claim == claim and entry.claimant is not None:
                yield entry.claimant

    def is_current(self, kind: str, meta: Mapping[str, Any]) -> bool:
        """Return whether the cached object is at least as new as ``meta``, or known to be deleted."""
        uid = str(meta.get("uid", ""))
        version = str(meta.get("resourceVersion", ""))
        entry = self._objects.get((kind, str(meta.get("namespace", "")), str(meta["name"])))
        if entry is not None and not _supersedes(version, entry.version):
            return True
        return not self._is_after_tombstone(uid, version)

    def _disown(self, ident: Id, uid: str, version: str) -> Key | None:
        """Drop an object that is no longer a child. Returns the resource it belonged to."""
        entry = self._objects.get(ident)
        if entry is None or entry.uid != uid or not _supersedes(version, entry.version):
            return None
        self._drop(ident, entry)
        return entry.key

    def _bury(self, uid: str, version: int | None) -> None:
        """Ignore versions of an object up to this one; None: all."""
        now = self._clock()
        if now >= self._period_ends or len(self._tombstones) >= TOMBSTONES:
            self._period_ends = now + TOMBSTONE_SECONDS
            self._former_tombstones = self._tombstones
            self._tombstones = {}
        self._tombstones[uid] = GONE if version is None else version

    def _is_after_tombstone(self, uid: str, version: str) -> bool:
        """Return whether a version is newer than the deletion of its object."""
        tombstone = self._tombstones.get(uid, self._former_tombstones.get(uid))
        number = version_number(version)
        return tombstone is None or (number is not None and number > tombstone)

    def _drop(self, ident: Id, entry: Entry) -> None:
        del self._objects[ident]
        siblings = self._children.get(entry.key)
        if siblings is not None:
            siblings.discard(ident)
            if not siblings:
                del self._children[entry.key]


def build_snapshot(resource: Object, children: Mapping[str, Iterable[Object]]) -> Snapshot:
    """Return a resource with its children. ``children``: by kind."""
    return Snapshot(
        resource=resource,
        services=tuple(children.get("Service", ())),
        config_maps=tuple(children.get("ConfigMap", ())),
        jobs=tuple(children.get("Job", ())),
        pods=tuple(children.get("Pod", ())),
        others=tuple(child for kind in children if kind not in CHILD_KINDS for child in children[kind]),
    )


def _shorten(resource: Object) -> Object:
    """Return a large resource with the small members of its spec, and without the profile in its status."""
    spec = resource.get("spec") or {}
    if OMITTED not in spec and OVERSIZE not in spec:
        spec = msgspec.json.decode(omit_large(msgspec.json.encode(spec)))
    status = {name: value for name, value in (resource.get("status") or {}).items() if name != "profile"}
    return {**resource, "spec": {**spec, OMITTED: True}, "status": status}


def _digest_content(resource: Object) -> bytes:
    """Return a digest of a resource without its version."""
    metadata = {name: value for name, value in resource["metadata"].items() if name != "resourceVersion"}
    return hashlib.sha256(msgspec.json.encode({**resource, "metadata": metadata})).digest()


def _describe_claimant(resource: Object) -> Object:
    meta = resource["metadata"]
    status = resource.get("status") or {}
    return {
        "metadata": {name: meta[name] for name in ("namespace", "name", "uid", "creationTimestamp") if name in meta},
        "status": {name: status[name] for name in ("phase", "attempt") if name in status},
    }


def version_number(text: Any) -> int | None:
    """Return a resource version as a number, or None. Kubernetes guarantees numbers since 1.35."""
    try:
        return int(text)
    except (TypeError, ValueError):
        return None


def _supersedes(version: str, old: str) -> bool:
    """Return whether ``version`` is newer than ``old``."""
    number = version_number(version)
    old_number = version_number(old)
    if number is None or old_number is None:
        return version != old  # versions without an order: trust the order of delivery
    return number > old_number

"""What the operator remembers of the cluster: fed by watch events, by its own writes, and by comparisons with lists.

Three sources tell of the same objects in any order, so every entry carries its resourceVersion and only newer news
counts. An object that is gone is remembered by its UID for a while, so that old news cannot bring it back.

Bodies are kept as JSON bytes and parsed when they are asked for: that costs some microseconds for each reconcile and
saves four fifths of the memory. It also makes them immutable.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from ddp_operator.cluster import Key, Object, Snapshot, claim_of
from ddp_operator.constants import KIND
from ddp_operator.kube.children import CHILD_KINDS, UNWATCHED_KINDS, key_of, trim_object

TOMBSTONES: Final = 20_000
GONE: Final = float("inf")

Id = tuple[str, str, str]
"""Kind, namespace, name."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One object as last seen."""

    uid: str
    version: str
    key: Key
    body: bytes
    claim: str | None = None
    """Of a resource: the claim or the URL of its checkpoints."""
    claimant: Object | None = None
    """What other jobs on that claim read of it: a body may have a megabyte, and they read those of a namespace."""


class ObjectCache:
    """All custom resources and their children. Not thread-safe: it lives in the operator's event loop."""

    def __init__(self) -> None:
        self._objects: dict[Id, Entry] = {}
        self._children: dict[Key, set[Id]] = {}
        self._shared: dict[Id, Object] = {}
        """What many share, as an object: it may name a thousand owners, and is in each of their snapshots."""
        self._tombstones: OrderedDict[str, float] = OrderedDict()

    def __len__(self) -> int:
        """Return the number of remembered objects."""
        return len(self._objects)

    def apply(self, kind: str, obj: Object) -> Key | None:
        """Take in an object. Returns the resource it belongs to, or None when that was no news (or not ours).

        One that is no child any more, by its labels or its controller, is dropped.
        """
        meta = obj["metadata"]
        uid, version = str(meta.get("uid", "")), str(meta.get("resourceVersion", ""))
        key = key_of(kind, meta)
        ident = (kind, str(meta.get("namespace", "")), str(meta["name"]))
        old = self._objects.get(ident)
        if key is None:
            return self._disown(ident, uid, version)
        if not _newer(version, self._tombstones.get(uid)):
            return None
        if old is not None:
            if not _supersedes(version, old.version):
                return None
            self._drop(ident, old)
        kept = trim_object(kind, obj)
        claim = claim_of(kept) if kind == KIND else None
        claimant = _describe_claimant(kept) if claim is not None else None
        self._objects[ident] = Entry(uid, version, key, msgspec.json.encode(kept), claim, claimant)
        if not key.name:
            self._shared[ident] = kept
        if kind != KIND:
            self._children.setdefault(key, set()).add(ident)
        return key

    def remove(self, kind: str, obj: Object) -> Key | None:
        """Take in that an object is gone, as a watch event says it. Returns the resource it belonged to, or None."""
        meta = obj["metadata"]
        # An object whose label was taken away leaves a filtered watch as DELETED, too, and comes back with the label:
        # so only news up to this version is old.
        version = version_number(meta.get("resourceVersion"))
        return self.mark_deleted(
            kind, str(meta.get("namespace", "")), str(meta["name"]), str(meta.get("uid", "")), version
        )

    def mark_deleted(self, kind: str, namespace: str, name: str, uid: str, version: int | None = None) -> Key | None:
        """Forget an object of this UID, and ignore later news of it up to ``version`` (by default: all)."""
        self._tombstones[uid] = GONE if version is None else version
        self._tombstones.move_to_end(uid)
        while len(self._tombstones) > TOMBSTONES:
            self._tombstones.popitem(last=False)
        ident = (kind, namespace, name)
        entry = self._objects.get(ident)
        if entry is None or entry.uid != uid:
            return None
        self._drop(ident, entry)
        if kind == KIND:
            # The garbage collector takes its children, and no watch will tell of these.
            for child in [one for one in self._children.get(entry.key, ()) if one[0] in UNWATCHED_KINDS]:
                self._drop(child, self._objects[child])
        return entry.key

    def snapshot(self, key: Key) -> Snapshot | None:
        """Return the resource and its children as last seen, children in the order of their names."""
        resource = self._objects.get((KIND, key.namespace, key.name))
        if resource is None:
            return None
        found: dict[str, list[Any]] = {kind: [] for kind in CHILD_KINDS}
        shared = self._children.get(Key(key.namespace, ""), ())
        for ident in sorted((*self._children.get(key, ()), *shared)):
            shared_one = self._shared.get(ident)
            found[ident[0]].append(shared_one or msgspec.json.decode(self._objects[ident].body))
        return build_snapshot(msgspec.json.decode(resource.body), found)

    def count_children(self, key: Key) -> int:
        """Return how many children of a resource are remembered."""
        return len(self._children.get(key, ()))

    def entry(self, kind: str, namespace: str, name: str) -> Entry | None:
        """Return what is remembered of one object."""
        return self._objects.get((kind, namespace, name))

    def entries(self, kind: str, namespaces: Iterable[str] = ()) -> dict[str, tuple[Id, Entry]]:
        """Return the remembered objects of a kind by UID, in these namespaces (none given: in all)."""
        wanted = frozenset(namespaces)
        return {
            entry.uid: (ident, entry)
            for ident, entry in self._objects.items()
            if ident[0] == kind and (not wanted or ident[1] in wanted)
        }

    def bodies(self, kind: str) -> Iterator[bytes]:
        """Yield the remembered objects of a kind as JSON; another thread than the event loop's may ask for them."""
        for ident, entry in list(self._objects.items()):
            if ident[0] == kind:
                yield entry.body

    def resources_on_claim(self, namespace: str, claim: str) -> Iterator[Object]:
        """Yield name, age and state of the resources of a namespace whose checkpoints go to this claim or URL."""
        for (kind, where, _), entry in self._objects.items():
            if kind == KIND and where == namespace and entry.claim == claim and entry.claimant is not None:
                yield entry.claimant

    def is_current(self, kind: str, meta: Mapping[str, Any]) -> bool:
        """Say whether an object is remembered at least as new as ``meta`` says, or known to be gone."""
        uid, version = str(meta.get("uid", "")), str(meta.get("resourceVersion", ""))
        entry = self._objects.get((kind, str(meta.get("namespace", "")), str(meta["name"])))
        if entry is not None and not _supersedes(version, entry.version):
            return True
        return not _newer(version, self._tombstones.get(uid))

    def _disown(self, ident: Id, uid: str, version: str) -> Key | None:
        """Drop an object that is a child no longer. Returns the resource that it belonged to."""
        entry = self._objects.get(ident)
        if entry is None or entry.uid != uid or not _supersedes(version, entry.version):
            return None
        self._drop(ident, entry)
        return entry.key

    def _drop(self, ident: Id, entry: Entry) -> None:
        del self._objects[ident]
        self._shared.pop(ident, None)
        family = self._children.get(entry.key)
        if family is not None:
            family.discard(ident)
            if not family:
                del self._children[entry.key]


def build_snapshot(resource: Object, found: Mapping[str, Iterable[Object]]) -> Snapshot:
    """Return a resource with its children, which are ``found`` by kind."""
    return Snapshot(
        resource=resource,
        services=tuple(found["Service"]),
        config_maps=tuple(found["ConfigMap"]),
        jobs=tuple(found["Job"]),
        pods=tuple(found["Pod"]),
        policies=tuple(found["NetworkPolicy"]),
    )


def _describe_claimant(resource: Object) -> Object:
    meta = resource["metadata"]
    status = resource.get("status") or {}
    return {
        "metadata": {name: meta[name] for name in ("namespace", "name", "uid", "creationTimestamp") if name in meta},
        "status": {name: status[name] for name in ("phase", "attempt") if name in status},
    }


def version_number(text: Any) -> int | None:
    """Return a resource version as a number, which it is since Kubernetes 1.35 by contract; None where it is none."""
    try:
        return int(text)
    except (TypeError, ValueError):
        return None


def _newer(version: str, tombstone: float | None) -> bool:
    number = version_number(version)
    return tombstone is None or (number is not None and number > tombstone)


def _supersedes(version: str, old: str) -> bool:
    """Say whether ``version`` is newer than ``old``."""
    new, then = version_number(version), version_number(old)
    # Of another server's idea of a version: trust the order in which news comes.
    return version != old if new is None or then is None else new > then

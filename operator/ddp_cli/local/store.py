"""The local cluster's objects in memory, with the API server's UIDs, versions, deletion and owners."""

import itertools
import uuid
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime, timedelta
from typing import Any

from ddp_operator.api.cluster import Object
from ddp_operator.api.cluster_errors import AlreadyExists
from ddp_operator.api.constants import ENV_GRACE_SECONDS
from ddp_operator.api.kubeobjects import format_time

Json = dict[str, Any]
Place = tuple[str, str, str]
"""Kind, namespace, name."""


def place_of(item: Object) -> Place:
    """Return an object's kind, namespace and name."""
    metadata = item["metadata"]
    return item["kind"], metadata.get("namespace") or "default", metadata["name"]


class Store:
    """Objects by place. A change replaces the object and never modifies it, so readers may keep it.

    ``on_change`` is called with every object that was added or changed, and with ``gone=True`` after a deletion.
    """

    def __init__(self, clock: Callable[[], datetime]) -> None:
        self._clock = clock
        self._objects: dict[Place, Json] = {}
        self._versions = itertools.count(1)
        self._held: set[str] = set()
        self.on_change: Callable[[Object, bool], None] = lambda item, gone: None

    def get(self, kind: str, namespace: str, name: str) -> Json | None:
        """Return the current object; None: it does not exist."""
        return self._objects.get((kind, namespace, name))

    def list(self, kind: str, namespace: str | None = None, labels: Mapping[str, str] | None = None) -> list[Json]:
        """Return the objects of a kind that have all of ``labels``, in the order of their creation."""
        selector = (labels or {}).items()
        return [
            item
            for (item_kind, item_namespace, _), item in self._objects.items()
            if item_kind == kind
            and namespace in (None, item_namespace)
            and selector <= (item["metadata"].get("labels") or {}).items()
        ]

    def add(self, item: Object) -> Json:
        """Store a new object and return it as stored. Raises: AlreadyExists."""
        place = place_of(item)
        if place in self._objects:
            raise AlreadyExists(existing=self._objects[place])
        metadata = {
            **item["metadata"],
            "namespace": place[1],
            "uid": str(uuid.uuid4()),
            "generation": 1,
            "creationTimestamp": format_time(self._clock()),
        }
        return self._put(place, {**item, "metadata": metadata})

    def change(self, item: Object, *, meta: Object | None = None, **members: Any) -> Json | None:
        """Replace top-level members and merge ``meta`` into the metadata of the object in ``item``'s place.

        A change of ``spec`` increments the generation; a call without a change keeps the version. None: it was deleted.
        """
        place = place_of(item)
        old = self._objects.get(place)
        if old is None or old["metadata"]["uid"] != item["metadata"]["uid"]:
            return None
        metadata = {**old["metadata"], **(meta or {})}
        new = {**old, **members, "metadata": metadata}
        if new == old:
            return old
        if new.get("spec") != old.get("spec"):
            metadata["generation"] = old["metadata"]["generation"] + 1
        if metadata.get("deletionTimestamp") and not self._is_kept(new):
            self._drop(place, new)
            return None
        return self._put(place, new)

    def hold(self, item: Object) -> None:
        """Keep an object after its deletion until ``release``: its process still runs."""
        self._held.add(item["metadata"]["uid"])

    def release(self, item: Object, **members: Any) -> None:
        """Write the last status and end ``hold``."""
        self._held.discard(item["metadata"]["uid"])
        current = self.change(item, **members)
        if current is not None and current["metadata"].get("deletionTimestamp") and not self._is_kept(current):
            self._drop(place_of(current), current)

    def delete(self, item: Object, *, grace_seconds: int = 0) -> None:
        """Delete an object. One that is held or has finalizers is marked, and deleted when neither applies."""
        place = place_of(item)
        current = self._objects.get(place)
        if current is None or current["metadata"]["uid"] != item["metadata"]["uid"]:
            return
        if not self._is_kept(current):
            self._drop(place, current)
        elif not current["metadata"].get("deletionTimestamp"):
            # As in Kubernetes, the timestamp is the end of the grace period.
            end = self._clock() + timedelta(seconds=grace_seconds)
            marks = {"deletionTimestamp": format_time(end), "deletionGracePeriodSeconds": grace_seconds}
            self.change(current, meta=marks)

    def _is_kept(self, item: Object) -> bool:
        return bool(item["metadata"].get("finalizers")) or item["metadata"]["uid"] in self._held

    def _put(self, place: Place, item: Json) -> Json:
        item["metadata"]["resourceVersion"] = str(next(self._versions))
        self._objects[place] = item
        self.on_change(item, False)
        return item

    def _drop(self, place: Place, item: Json) -> None:
        self._objects.pop(place, None)
        self.on_change(item, True)
        for child in self._dependents(item["metadata"]["uid"]):
            self.delete(child, grace_seconds=grace_of(child))

    def _dependents(self, uid: str) -> Iterable[Json]:
        """Yield the objects whose last owner was deleted, which the garbage collector deletes."""
        alive = {item["metadata"]["uid"] for item in self._objects.values()}
        for item in list(self._objects.values()):
            owners = {owner["uid"] for owner in item["metadata"].get("ownerReferences") or ()}
            if uid in owners and not owners & alive:
                yield item


def grace_of(item: Object) -> int:
    """Return an object's grace period for deletion, in seconds."""
    return int(item.get("spec", {}).get("terminationGracePeriodSeconds", 30)) if item["kind"] == "Pod" else 0


def workers_grace_of(pod: Object) -> int:
    """Return the seconds that a pod's launcher gives its workers after SIGTERM."""
    values = [
        variable.get("value", "")
        for container in pod["spec"].get("containers") or ()
        for variable in container.get("env") or ()
        if variable["name"] == ENV_GRACE_SECONDS
    ]
    return int(values[0]) if values else grace_of(pod)

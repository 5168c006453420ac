"""Merge a job's own values into those of its profile, with the rules of a strategic merge patch of Kubernetes.

No maintained Python library implements them. Only pod templates have lists that are merged, so one function serves the
template and the remaining spec.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Final

MERGE_KEYS: Final = {
    "containers": "name",
    "ephemeralContainers": "name",
    "initContainers": "name",
    "env": "name",
    "ports": "containerPort",
    "volumeDevices": "devicePath",
    "volumeMounts": "mountPath",
    "volumes": "name",
    "hostAliases": "ip",
    "imagePullSecrets": "name",
    "resourceClaims": "name",
    "schedulingGates": "name",
    "topologySpreadConstraints": "topologyKey",
}
"""Lists of a pod template that are merged item by item, and the field that identifies an item: the
``x-kubernetes-patch-merge-key`` of Kubernetes' OpenAPI. Every other list, such as args and tolerations, is replaced."""
ALTERNATIVES: Final = frozenset({"env", "resourceClaims", "volumes"})
"""Lists whose items have exactly one of several sources. An own item keeps no member of the base's item that it does
not name, because an item with two sources is invalid: ``retainKeys`` in Kubernetes, which env does not have there."""
DIRECTIVE: Final = "$patch"


def merge(base: Any, own: Any, field: str = "") -> Any:
    """Return ``own`` merged into ``base``, without changing either. ``field``: the name of the member that has them.

    A null removes a member. ``$patch: replace`` in an object or in a list keeps nothing of the base, and an item of a
    merged list with ``$patch: delete`` removes the base's.
    """
    if isinstance(own, Mapping):
        if own.get(DIRECTIVE) in ("replace", "delete"):
            return {name: value for name, value in own.items() if name != DIRECTIVE and own[DIRECTIVE] == "replace"}
        merged = dict(base) if isinstance(base, Mapping) else {}
        for name, value in own.items():
            if value is None:
                merged.pop(name, None)
            else:
                merged[name] = merge(merged.get(name), value, name)
        return merged
    key = MERGE_KEYS.get(field)
    if key is not None and _is_keyed(own, key):
        return _merge_items(base if _is_keyed(base, key) else (), own, key, keep=field not in ALTERNATIVES)
    return own


def _is_keyed(items: Any, key: str) -> bool:
    return isinstance(items, list) and all(
        isinstance(item, Mapping) and (isinstance(item.get(key), str | int) or DIRECTIVE in item) for item in items
    )


def _merge_items(base: Sequence[Any], own: Sequence[Any], key: str, *, keep: bool) -> list[Any]:
    """Merge lists of objects. Own items keep their order; an item of the base alone stays before its successors.

    ``keep``: an own item keeps the members of the base's item that it does not name.
    """
    if any(item.get(DIRECTIVE) == "replace" for item in own):
        return [item for item in own if DIRECTIVE not in item]
    dropped = {item.get(key) for item in own if item.get(DIRECTIVE) == "delete"}
    own = [item for item in own if DIRECTIVE not in item]
    places = {item[key]: place for place, item in enumerate(base) if item[key] not in dropped}
    named = {item[key] for item in own}
    alone = deque(name for name in places if name not in named)
    merged = []
    for item in own:
        former = base[places[item[key]]] if item[key] in places else {}
        while alone and places[alone[0]] < places.get(item[key], -1):
            merged.append(base[places[alone.popleft()]])
        merged.append(merge(former if keep else {name: former[name] for name in item if name in former}, item))
    return merged + [base[places[name]] for name in alone]

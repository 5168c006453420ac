"""Merge patches, strategic merge patches and JSON patches."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from .errors import ApiFailure


def merge(target: Any, patch: Any) -> Any:
    """Apply a JSON merge patch (RFC 7386); the arguments stay unchanged."""
    if not isinstance(patch, dict):
        return deepcopy(patch)
    result = dict(target) if isinstance(target, dict) else {}
    for name, value in patch.items():
        if value is None:
            result.pop(name, None)
        else:
            result[name] = merge(result.get(name), value)
    return result


def strategic(target: Any, patch: Any) -> Any:
    """Apply a strategic merge patch with support for owner references; all other lists are replaced, as by a merge
    patch.

    An owner is identified by its UID, and one with ``$patch: delete`` is removed.
    """
    result = merge(target, patch)
    added = (patch.get("metadata") or {}).get("ownerReferences")
    if added:
        owners = {owner["uid"]: owner for owner in target["metadata"].get("ownerReferences") or []}
        for owner in added:
            if owner.get("$patch") == "delete":
                owners.pop(owner["uid"], None)
            else:
                owners[owner["uid"]] = owners.get(owner["uid"], {}) | owner
        result["metadata"]["ownerReferences"] = list(owners.values())
    return result


def json_patch(target: Any, operations: list[dict[str, Any]]) -> Any:
    """Apply a JSON patch (RFC 6902): add, remove, replace and test."""
    result = deepcopy(target)
    for operation in operations:
        *parents, last = [
            part.replace("~1", "/").replace("~0", "~") for part in operation["path"].removeprefix("/").split("/")
        ]
        node = result
        try:
            for part in parents:
                node = node[int(part)] if isinstance(node, list) else node[part]
            _operate(node, last, operation)
        except (KeyError, IndexError, ValueError, TypeError):
            raise ApiFailure(422, f"the JSON patch cannot be applied at {operation['path']}") from None
    return result


def _operate(node: Any, last: str, operation: dict[str, Any]) -> None:
    operator = operation["op"]
    value = operation.get("value")
    if isinstance(node, list):
        if operator == "add":
            node.insert(len(node) if last == "-" else int(last), value)
        elif operator == "remove":
            del node[int(last)]
        elif operator == "replace":
            node[int(last)] = value
    elif operator == "remove":
        del node[last]
    elif operator == "test":
        if node.get(last) != value:
            raise ValueError
    else:
        node[last] = value

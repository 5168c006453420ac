"""A container's environment, command and arguments as the kubelet makes them. Pure.

Kubernetes expands ``$(NAME)`` itself, without a shell: in a variable's value from the variables before it, in command
and args from all of them. A name that is not set stays as it is written, and ``$$(NAME)`` is a literal ``$(NAME)``.
"""

import base64
import binascii
import re
from collections.abc import Callable, Mapping

from ddp_operator.cluster import Object

Lookup = Callable[[str, str], Object | None]
"""Find a ConfigMap or Secret of the pod's namespace by kind and name."""

_REFERENCE = re.compile(r"\$(?:\$|\(([^)]*)\))")
_VALID_NAME = re.compile(r"[-._a-zA-Z][-._a-zA-Z0-9]*")


class MissingReference(Exception):
    """The container refers to something that is not there; the message is for the user."""


def expand(text: str, variables: Mapping[str, str]) -> str:
    """Expand ``$(NAME)`` and ``$$`` in ``text``."""

    return _REFERENCE.sub(lambda match: "$" if match[1] is None else variables.get(match[1], match[0]), text)


def build_environment(pod: Object, container: Object, lookup: Lookup) -> dict[str, str]:
    """Return the variables that the pod gives to this container.

    Raises: MissingReference.
    """
    found: dict[str, str] = {}
    for source in container.get("envFrom") or ():
        prefix = source.get("prefix", "")
        for kind, member in (("ConfigMap", "configMapRef"), ("Secret", "secretRef")):
            if reference := source.get(member):
                data = read_reference(kind, reference, lookup) or {}
                found |= {prefix + key: _text(value) for key, value in data.items() if _VALID_NAME.fullmatch(key)}
    for variable in container.get("env") or ():
        name = variable["name"]
        origin = variable.get("valueFrom")
        if not origin:
            found[name] = expand(str(variable.get("value") or ""), found)
            continue
        value = _value_from(pod, name, origin, lookup)
        if value is not None:
            found[name] = value
    return found


def read_data(item: Object) -> dict[str, bytes]:
    """Return the files that a ConfigMap or Secret holds."""
    data: dict[str, bytes] = {}
    secret = item.get("kind") == "Secret"
    for member in ("data", "binaryData"):
        encoded = secret if member == "data" else True
        for key, value in (item.get(member) or {}).items():
            try:
                data[key] = base64.b64decode(value, validate=False) if encoded else str(value).encode()
            except (binascii.Error, ValueError, TypeError):
                where = f"{item['kind']} {item['metadata']['name']}: {member}.{key}"
                raise MissingReference(f"{where} is not valid base64; encode it or use stringData") from None
    data |= {key: str(value).encode() for key, value in (item.get("stringData") or {}).items()}
    return data


def read_reference(kind: str, reference: Object, lookup: Lookup, *, name: str = "name") -> dict[str, bytes] | None:
    """Return the files of the ConfigMap or Secret that a reference names, or None where it is optional and not there.

    Raises: MissingReference.
    """
    item = lookup(kind, reference[name])
    if item is not None:
        return read_data(item)
    if reference.get("optional"):
        return None
    raise MissingReference(
        f'{kind} "{reference[name]}" is not in the file; add it as another document, or make the reference optional'
    )


def _value_from(pod: Object, name: str, origin: Object, lookup: Lookup) -> str | None:
    if field := origin.get("fieldRef"):
        return _field(pod, name, field["fieldPath"])
    for kind, member in (("ConfigMap", "configMapKeyRef"), ("Secret", "secretKeyRef")):
        if reference := origin.get(member):
            data = read_reference(kind, reference, lookup) or {}
            if reference["key"] in data:
                return _text(data[reference["key"]])
            if reference.get("optional"):
                return None
            raise MissingReference(f'{kind} "{reference["name"]}" has no key "{reference["key"]}" (variable {name})')
    raise MissingReference(f"variable {name}: valueFrom.{next(iter(origin), '')} is not supported on this machine")


def _field(pod: Object, name: str, path: str) -> str:
    metadata = pod["metadata"]
    if match := re.fullmatch(r"metadata\.(labels|annotations)\['(.*)'\]", path):
        return str((metadata.get(match[1]) or {}).get(match[2], ""))
    values = {
        "metadata.name": metadata["name"],
        "metadata.namespace": metadata["namespace"],
        "metadata.uid": metadata["uid"],
        "spec.nodeName": "local",
        "spec.serviceAccountName": pod["spec"].get("serviceAccountName", "default"),
        **dict.fromkeys(("status.hostIP", "status.hostIPs", "status.podIP", "status.podIPs"), "127.0.0.1"),
    }
    if path not in values:
        raise MissingReference(f"variable {name}: unknown field {path}; use one of {', '.join(values)}")
    return str(values[path])


def _text(value: bytes) -> str:
    return value.decode("utf-8", "surrogateescape")

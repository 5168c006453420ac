"""The CustomResourceDefinition, generated from ``spec.py``, ``status.py`` and ``rules.py``.

``python -m ddp_operator.api.crd`` prints it; ``make generate`` writes it to ``deploy/crds/ddptrainingjobs.yaml``.
A structural schema has no ``$ref`` and no ``anyOf`` over types, so this walks the types itself and inlines everything.
"""

import inspect
import sys
from collections.abc import Mapping
from typing import Any, Final

import msgspec
import yaml
from msgspec import inspect as mi

from ddp_operator import constants
from ddp_operator.api.rules import RULES
from ddp_operator.api.spec import Spec
from ddp_operator.api.status import Status

_SCALARS = {mi.IntType: "integer", mi.FloatType: "number", mi.StrType: "string", mi.BoolType: "boolean"}


def build_schema(cls: type[msgspec.Struct]) -> dict[str, Any]:
    """Return the structural schema of a struct, with descriptions and with defaults at every level that has any."""
    return _convert(mi.type_info(cls))


def _convert(info: mi.Type) -> dict[str, Any]:
    if isinstance(info, mi.Metadata):
        schema = _convert(info.type)
        schema.update(info.extra_json_schema or {})
        return schema
    if isinstance(info, mi.StructType):
        return _convert_struct(info)
    if isinstance(info, mi.UnionType):
        return _convert_union(info)
    if isinstance(info, mi.LiteralType):
        return {"type": "string", "enum": list(info.values)}
    if isinstance(info, mi.VarTupleType | mi.ListType):
        return {"type": "array", "items": _convert(info.item_type)}
    if isinstance(info, mi.AnyType):
        # Kubernetes' own types (a pod's spec) are not repeated here: the API server checks them at dry-run. No type is
        # given either: of an object whose members it does not know, the API server's == in CEL compares the number, and
        # the values only of those that both sides have.
        return {"x-kubernetes-preserve-unknown-fields": True}
    if isinstance(info, mi.DateTimeType):
        return {"type": "string", "format": "date-time"}
    return {"type": _SCALARS[type(info)]}


def _convert_union(info: mi.UnionType) -> dict[str, Any]:
    members = [member for member in info.types if not isinstance(member, mi.NoneType)]
    if len(members) == 1:
        return _convert(members[0])
    assert {type(member) for member in members} == {mi.IntType, mi.StrType}, f"no structural schema for {members}"
    return {"x-kubernetes-int-or-string": True}


def _convert_struct(info: mi.StructType) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object"}
    if info.cls.__doc__:
        schema["description"] = " ".join(inspect.cleandoc(info.cls.__doc__).split())
    properties: dict[str, Any] = {}
    required: list[str] = []
    for field in info.fields:
        child = _convert(field.type)
        if field.default is not msgspec.NODEFAULT:
            if field.default is not None:
                child["default"] = msgspec.json.decode(msgspec.json.encode(field.default))
        elif field.default_factory is not msgspec.NODEFAULT:
            # An empty object here lets the API server fill in the defaults of the level below.
            child["default"] = {}
        elif field.required:
            required.append(field.encode_name)
        properties[field.encode_name] = child
    schema["properties"] = properties
    if required:
        schema["required"] = required
    return schema


def without_defaults(schema: Any) -> Any:
    """Return a copy without ``default`` (status is written whole; a default there would invent facts)."""
    if not isinstance(schema, dict):
        return schema
    return {name: without_defaults(value) for name, value in schema.items() if name != "default"}


DEFAULTED: Final = ("nodes", "suspend")
"""Fields of a spec that the API server fills in: the scale subresource reads the number of nodes."""


def build_spec_schema() -> dict[str, Any]:
    """Return the schema of a spec as it is stored: the operator fills in the other defaults when it reads one."""
    whole = build_schema(Spec)
    schema: dict[str, Any] = without_defaults(whole)
    for name in DEFAULTED:
        schema["properties"][name] = whole["properties"][name]
    return schema


COLUMNS: tuple[tuple[str, str, str, int], ...] = (
    # name, type, JSONPath, priority (0: always shown; 1: with -o wide)
    ("Phase", "string", ".status.phase", 0),
    ("Reason", "string", ".status.reason", 0),
    ("Nodes", "integer", ".spec.nodes", 0),
    ("Progress", "string", ".status.progress.percent", 0),
    ("ETA", "string", ".status.progress.eta", 0),
    ("Throughput", "string", ".status.progress.throughput", 0),
    ("Loss", "string", ".status.progress.loss", 0),
    ("Restarts", "integer", ".status.restarts.all", 0),
    ("Age", "date", ".metadata.creationTimestamp", 0),
    ("Ready", "integer", ".status.nodes.ready", 1),
    ("Epoch", "integer", ".status.progress.epoch", 1),
    ("Val-Accuracy", "string", ".status.progress.valAccuracy", 1),
    ("Attempt", "integer", ".status.attempt", 1),
    ("Failure", "string", ".status.lastFailure.category", 1),
    ("Code", "string", ".status.code.revision", 1),
)


def print_columns(status: Status) -> list[Any]:
    """Return what `kubectl get ddp` prints of a status."""
    resource = {"status": msgspec.to_builtins(status)}
    return [read_column(resource, path) for _, _, path, priority in COLUMNS if not priority]


def read_column(resource: Mapping[str, Any], path: str) -> Any:
    """Return the value at a column's JSONPath; None: there is none."""
    value: Any = resource
    for step in path.strip(".").split("."):
        value = value.get(step) if isinstance(value, Mapping) else None
    return value


def build_crd() -> dict[str, Any]:
    """Return the CustomResourceDefinition as JSON. Pure: the same classes give the same object."""
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": constants.CRD_NAME, "labels": {"app.kubernetes.io/name": constants.MANAGED_BY}},
        "spec": {
            "group": constants.GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": constants.KIND,
                "listKind": f"{constants.KIND}List",
                "plural": constants.PLURAL,
                "singular": constants.SINGULAR,
                "shortNames": list(constants.SHORT_NAMES),
                "categories": ["all"],
            },
            "versions": [
                {
                    "name": constants.VERSION,
                    "served": True,
                    "storage": True,
                    "schema": {"openAPIV3Schema": build_resource_schema()},
                    "subresources": {
                        "status": {},
                        "scale": {
                            "specReplicasPath": ".spec.nodes",
                            "statusReplicasPath": ".status.nodes.desired",
                            "labelSelectorPath": ".status.selector",
                        },
                    },
                    "additionalPrinterColumns": [
                        {"name": name, "type": kind, "jsonPath": path} | ({"priority": priority} if priority else {})
                        for name, kind, path, priority in COLUMNS
                    ],
                }
            ],
        },
    }


def build_resource_schema() -> dict[str, Any]:
    """Return the schema of the whole resource, with the CEL rules of ``rules.RULES`` at their nodes."""
    status = without_defaults(build_schema(Status))
    conditions = status["properties"]["conditions"]
    conditions["x-kubernetes-list-type"] = "map"
    conditions["x-kubernetes-list-map-keys"] = ["type"]
    schema: dict[str, Any] = {
        "type": "object",
        "description": "Distributed PyTorch training: torchrun in as many pods as asked for, watched and restarted.",
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            "metadata": {"type": "object"},
            "spec": build_spec_schema(),
            "status": status,
        },
    }
    for rule in RULES:
        node = schema
        for name in rule.at.split(".") if rule.at else ():
            node = node["properties"][name]
        entry = {"rule": rule.cel, "message": rule.message}
        entry |= {"messageExpression": rule.explanation} if rule.explanation else {}
        entry |= {"fieldPath": rule.field} if rule.field and rule.field != ".metadata.name" else {}
        node.setdefault("x-kubernetes-validations", []).append(entry)
    _bound_lists(schema["properties"]["spec"])
    return schema


def _bound_lists(spec: dict[str, Any]) -> None:
    """Give lists under CEL a length: the API server estimates a rule's cost from it and refuses unbounded ones."""
    spec["properties"]["recovery"]["properties"]["nonRetryableExitCodes"]["maxItems"] = 255
    code = [("code", name) for name, one in spec["properties"]["code"]["properties"].items() if one["type"] == "string"]
    inputs = spec["properties"]["inputs"]
    inputs["maxItems"] = 16  # what is reported of each fits into a termination message
    for name in ("url", "mountPath", "claimName", "checksum", "name"):
        inputs["items"]["properties"][name]["maxLength"] = 2048
    saves = [("checkpoint", name) for name in ("path", "claimName", "url")]
    for path in (("shm", "sizeLimit"), *saves, *code):
        node = spec
        for name in path:
            node = node["properties"][name]
        node["maxLength"] = 4096


def render_crd() -> str:
    """Return the CRD as YAML, with a note that it is generated."""
    header = "# Generated from operator/ddp_operator/api by `make generate`. Do not edit.\n"
    return header + yaml.safe_dump(build_crd(), sort_keys=False, width=120, allow_unicode=True)


if __name__ == "__main__":
    sys.stdout.write(render_crd())

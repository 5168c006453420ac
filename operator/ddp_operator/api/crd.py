"""The CustomResourceDefinitions, generated from ``spec.py``, ``status.py`` and ``rules.py``.

``python -m ddp_operator.api.crd`` prints the job's, or that of a kind of profiles; ``make generate`` writes them to
``deploy/crds``.
A structural schema has no ``$ref`` and no ``anyOf`` over types, so this walks the types itself and inlines everything.
"""

import inspect
import sys
from collections.abc import Iterable, Mapping
from typing import Any, Final

import msgspec
import yaml
from msgspec import inspect as mi

from ddp_operator import constants
from ddp_operator.api.rules import RULES, Rule
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
    """Return the schema of a spec as it is stored, which a profile may complete; the operator fills in the defaults."""
    whole = build_schema(Spec)
    spec, needed = _optional(whole)
    for name in DEFAULTED:
        spec["properties"][name] = whole["properties"][name]
    spec["properties"]["profileRef"]["required"] = [needed.pop(needed.index("profileRef.name")).partition(".")[2]]
    # A schema's own `required` would ask it of a job with a profile too.
    there = {path: _unless_there(path) for path in needed}
    listed = " + ".join(f"({one} ? '' : 'spec.{path} ')" for path, one in there.items())
    spec["x-kubernetes-validations"] = [
        {
            "rule": f"has(self.profileRef) || ({' && '.join(there.values())})",
            "message": f"{', '.join(needed)} have no default; add what is missing, or name a profile that has it",
            "messageExpression": f"({listed}).trim().replace(' ', ', ')"
            " + ': no default; add it, or name a profile that has it in spec.profileRef'",
            "reason": "FieldValueRequired",
        }
    ]
    return spec


def _optional(schema: dict[str, Any], path: str = "") -> tuple[dict[str, Any], list[str]]:
    """Return a schema in which objects may lack members and get no defaults, and the paths of what was required.

    What has no type stays required: CEL could not ask for it.
    """
    kept = {name: value for name, value in schema.items() if name not in ("default", "required")}
    if "properties" not in schema:
        return kept, []
    required = schema.get("required", ())
    untyped = [name for name in required if "type" not in schema["properties"][name]]
    kept |= {"required": untyped} if untyped else {}
    kept["properties"], paths = {}, [f"{path}{name}" for name in required if name not in untyped]
    for name, child in schema["properties"].items():
        kept["properties"][name], below = _optional(child, f"{path}{name}.")
        paths += below
    return kept, paths


def _unless_there(path: str) -> str:
    """Return CEL that is true where the member at a path is there, or an object that would hold it is not."""
    holders = (path[:end] for end, letter in enumerate(path) if letter == ".")
    return f"({' || '.join([*(f'!has(self.{one})' for one in holders), f'has(self.{path})'])})"


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
    scale = {
        "specReplicasPath": ".spec.nodes",
        "statusReplicasPath": ".status.nodes.desired",
        "labelSelectorPath": ".status.selector",
    }
    columns = [
        {"name": name, "type": kind, "jsonPath": path} | ({"priority": priority} if priority else {})
        for name, kind, path, priority in COLUMNS
    ]
    names = {"kind": constants.KIND, "shortNames": list(constants.SHORT_NAMES), "categories": ["all"]}
    return _define(names, "Namespaced", build_resource_schema(), columns, {"status": {}, "scale": scale})


_PROFILES: Final = {
    constants.CLUSTER_PROFILE_KIND: ("Cluster", "cddpprofile"),
    constants.PROFILE_KIND: ("Namespaced", "ddpprofile"),
}


def build_profile_crd(kind: str) -> dict[str, Any]:
    """Return the CustomResourceDefinition of a kind of profiles: for all namespaces, or of one."""
    scope, short = _PROFILES[kind]
    columns = [
        {"name": "Locked", "type": "string", "jsonPath": ".spec.locked"},
        {"name": "Age", "type": "date", "jsonPath": ".metadata.creationTimestamp"},
    ]
    return _define({"kind": kind, "shortNames": [short]}, scope, build_profile_schema(), columns)


def _define(
    names: dict[str, Any],
    scope: str,
    schema: dict[str, Any],
    columns: list[Any],
    subresources: dict[str, Any] | None = None,
) -> dict[str, Any]:
    kind = names["kind"]
    plural = f"{kind.lower()}s"
    version = {"name": constants.VERSION, "served": True, "storage": True, "schema": {"openAPIV3Schema": schema}}
    version |= {"subresources": subresources} if subresources else {}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {
            "name": f"{plural}.{constants.GROUP}",
            "labels": {"app.kubernetes.io/name": constants.MANAGED_BY},
        },
        "spec": {
            "group": constants.GROUP,
            "scope": scope,
            "names": {"kind": kind, "listKind": f"{kind}List", "plural": plural, "singular": kind.lower()} | names,
            "versions": [version | {"additionalPrinterColumns": columns}],
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
    _add_rules(schema, "", RULES)
    _bound_lists(schema["properties"]["spec"])
    return schema


def build_profile_schema() -> dict[str, Any]:
    """Return the schema of a profile. Of its job the rules hold that lie within a group of fields."""
    job, _ = _optional(build_schema(Spec))
    _bound_lists(job)
    job["description"] = "A part of a DDPTrainingJob's spec, under the job's own values."
    for name in NOT_OF_PROFILES:
        del job["properties"][name]
    lockable = [path for path in list_fields(job) if not path.startswith("template")]
    in_template = r"^template[.](spec|metadata)([.][A-Za-z]+|\[[^\[\]]+\])*$"
    locked = {
        "type": "array",
        "description": "Fields that a job may not set otherwise than job has them; where job has none, not at all. "
        "Such as recovery.maxRestarts or, in the template, template.spec.nodeSelector, "
        "template.spec.containers[trainer].env[NCCL_DEBUG]: [NAME] is an item by its name, or a member of any name.",
        "maxItems": 256,
        "items": {"type": "string", "maxLength": 512},
        "x-kubernetes-list-type": "set",
        "x-kubernetes-validations": [
            {
                "rule": f"self.all(path, path in {lockable} || path.matches(r'{in_template}'))",
                "message": "must be fields of a job's spec without the leading spec., such as recovery.maxRestarts or "
                f"template.spec.nodeSelector, and not {', '.join(NOT_OF_PROFILES)}; correct or remove the others",
            }
        ],
    }
    schema: dict[str, Any] = {
        "type": "object",
        "description": "What a platform gives the jobs that name it in spec.profileRef, and what they may not change.",
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            "metadata": {"type": "object"},
            "spec": {
                "type": "object",
                "description": "What jobs get.",
                "properties": {"job": job, "locked": locked},
            },
        },
    }
    of_groups = [rule for rule in RULES if rule.at.startswith("spec.") and rule.at.split(".")[1] in job["properties"]]
    _add_rules({"properties": {"spec": job}}, "spec.job", of_groups)
    return schema


NOT_OF_PROFILES: Final = ("nodes", "suspend", "profileRef", "code")
"""Fields of a spec that are each job's own."""


def list_fields(schema: Mapping[str, Any], path: str = "") -> list[str]:
    """Return the paths of all members of an object, of those in objects below too."""
    found = []
    for name, child in schema.get("properties", {}).items():
        found += [f"{path}{name}", *list_fields(child, f"{path}{name}.")]
    return found


def _add_rules(schema: dict[str, Any], root: str, rules: Iterable[Rule]) -> None:
    """Put CEL rules at their nodes."""
    for rule in rules:
        node = schema
        for name in rule.at.split(".") if rule.at else ():
            node = node["properties"][name]
        entry = {"rule": rule.cel, "message": rule.message}
        entry |= {"messageExpression": rule.explanation} if rule.explanation else {}
        entry |= {"fieldPath": rule.field} if rule.field and rule.field != ".metadata.name" else {}
        node.setdefault("x-kubernetes-validations", []).append(entry)


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


def render_crd(definition: Mapping[str, Any]) -> str:
    """Return a definition as YAML, with a note that it is generated."""
    header = "# Generated from operator/ddp_operator/api by `make generate`. Do not edit.\n"
    return header + yaml.safe_dump(definition, sort_keys=False, width=120, allow_unicode=True)


if __name__ == "__main__":
    definitions = [build_crd(), *(build_profile_crd(kind) for kind in _PROFILES)]
    [wanted] = [one for one in definitions if one["spec"]["names"]["kind"] == (sys.argv[1:] or [constants.KIND])[0]]
    sys.stdout.write(render_crd(wanted))

"""The CustomResourceDefinitions, generated from ``spec.py``, ``status.py`` and ``rules.py``.

``python -m ddp_operator.api.crd`` prints the definition of the job, or that of a kind of profile. ``make generate``
writes them to ``deploy/crds``. A structural schema has neither ``$ref`` nor ``anyOf`` over types, so this module walks
the types and inlines all of them.
"""

import inspect
import sys
from collections.abc import Iterable, Mapping
from typing import Any, Final

import msgspec
from msgspec import inspect as mi

from ddp_operator.api import constants
from ddp_operator.api.profile import LOCKS_REMOVED
from ddp_operator.api.rules import RULES, CelRule
from ddp_operator.api.spec import Spec
from ddp_operator.api.status import OPAQUE, Status
from ddp_operator.api.yaml_writer import format_documents

_SCALARS = {mi.IntType: "integer", mi.FloatType: "number", mi.StrType: "string", mi.BoolType: "boolean"}


def build_schema(cls: type[msgspec.Struct]) -> dict[str, Any]:
    """Return the structural schema of a struct, with its descriptions and defaults at every level."""
    return _convert(mi.type_info(cls))


def _convert(info: mi.Type) -> dict[str, Any]:
    if isinstance(info, mi.Metadata):
        schema = _convert(info.type)
        schema.update(info.extra_json_schema or {})
        if OPAQUE in schema:
            schema.pop("properties", None)
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
        # The API server checks types of Kubernetes, such as a pod's spec, in the dry run. The schema has no type: for
        # an object with unknown members, == in CEL would compare the number of members and only the common ones.
        return {OPAQUE: True}
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
            # With an empty object here the API server fills in the defaults of the level below.
            child["default"] = {}
        elif field.required:
            required.append(field.encode_name)
        properties[field.encode_name] = child
    schema["properties"] = properties
    if required:
        schema["required"] = required
    return schema


def without_defaults(schema: Any) -> Any:
    """Return a copy without ``default``: a default in the status would look like an observation."""
    if not isinstance(schema, dict):
        return schema
    return {name: without_defaults(value) for name, value in schema.items() if name != "default"}


DEFAULTED: Final = ("nodes", "suspend")
"""Fields of a spec with a default in the CRD: the scale subresource reads the number of nodes."""


def build_spec_schema() -> dict[str, Any]:
    """Return the schema of a stored spec. The operator adds the values of a profile, and the defaults."""
    complete = build_schema(Spec)
    spec, required = _make_optional(complete)
    for name in DEFAULTED:
        spec["properties"][name] = complete["properties"][name]
    required.remove("profileRef.name")
    spec["properties"]["profileRef"]["required"] = ["name"]

    # `required` in the schema would apply to jobs with a profile too, so a CEL rule checks these fields.
    checks = {path: _is_set_or_not_needed(path) for path in required}
    missing = " + ".join(f"({check} ? '' : 'spec.{path} ')" for path, check in checks.items())
    spec["x-kubernetes-validations"] = [
        {
            "rule": f"has(self.profileRef) || ({' && '.join(checks.values())})",
            "message": f"{', '.join(required)} have no default; add them, or name a profile that has them",
            "messageExpression": f"({missing}).trim().replace(' ', ', ')"
            " + ': no default; add it, or name a profile that has it in spec.profileRef'",
            "reason": "FieldValueRequired",
        }
    ]
    return spec


def _make_optional(schema: dict[str, Any], path: str = "") -> tuple[dict[str, Any], list[str]]:
    """Return the schema without defaults and required members, and the paths of the formerly required members.

    A member without a type stays required, because CEL cannot read it.
    """
    optional = {name: value for name, value in schema.items() if name not in ("default", "required")}
    if "properties" not in schema:
        return optional, []

    required = schema.get("required", ())
    untyped = [name for name in required if "type" not in schema["properties"][name]]
    if untyped:
        optional["required"] = untyped
    paths = [f"{path}{name}" for name in required if name not in untyped]

    optional["properties"] = {}
    for name, child in schema["properties"].items():
        optional_child, child_paths = _make_optional(child, f"{path}{name}.")
        optional["properties"][name] = optional_child
        paths += child_paths
    return optional, paths


def _is_set_or_not_needed(path: str) -> str:
    """Return CEL that is true if the member at ``path`` is set, or an object above it is not."""
    parents = [path[:end] for end, letter in enumerate(path) if letter == "."]
    conditions = [f"!has(self.{parent})" for parent in parents]
    conditions.append(f"has(self.{path})")
    return f"({' || '.join(conditions)})"


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
    ("Position", "integer", ".status.queue.position", 1),
    ("Start", "string", ".status.queue.startP50", 1),
)


def render_columns(status: Status) -> list[Any]:
    """Return the cells that `kubectl get ddp` prints for a status."""
    resource = {"status": msgspec.to_builtins(status)}
    return [read_column(resource, path) for _, _, path, priority in COLUMNS if not priority]


def read_column(resource: Mapping[str, Any], path: str) -> Any:
    """Return the value at a column's JSONPath, or None if there is none."""
    value: Any = resource
    for step in path.strip(".").split("."):
        value = value.get(step) if isinstance(value, Mapping) else None
    return value


def build_crd() -> dict[str, Any]:
    """Return the CustomResourceDefinition of the job."""
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
    """Return the CustomResourceDefinition of a kind of profile, cluster-scoped or namespaced."""
    scope, short = _PROFILES[kind]
    columns = [
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
    # An API server removes fields without a schema also when it reads a stored resource. The operator takes over those
    # of the release before (operator_state.py), and an operator of that release may run beside a newer definition.
    for group in (status, *(status["properties"][name] for name in ("restarts", "usage"))):
        group[OPAQUE] = True
    schema: dict[str, Any] = {
        "type": "object",
        "description": "Distributed PyTorch training: torchrun in a number of pods, monitored and restarted.",
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            "metadata": {"type": "object"},
            "spec": build_spec_schema(),
            "status": status,
        },
    }
    _add_rules(schema, RULES)
    _bound_lists(schema["properties"]["spec"])
    return schema


def build_profile_schema() -> dict[str, Any]:
    """Return the schema of a profile. It includes the rules that concern a single group of fields."""
    job, _ = _make_optional(build_schema(Spec))
    _bound_lists(job)
    job["description"] = "Part of a DDPTrainingJob's spec. The job's own values take precedence."
    for name in NOT_OF_PROFILES:
        del job["properties"][name]
    locked = {
        "type": "array",
        "description": f"Fields that a job may not change: {LOCKS_REMOVED}.",
        "maxItems": 256,
        "items": {"type": "string", "maxLength": 512},
        "x-kubernetes-validations": [{"rule": "size(self) == 0", "message": LOCKS_REMOVED}],
    }
    schema: dict[str, Any] = {
        "type": "object",
        "description": "Values for the jobs that name this profile in spec.profileRef.",
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            "metadata": {"type": "object"},
            "spec": {
                "type": "object",
                "description": "Values for jobs.",
                "properties": {"job": job, "locked": locked},
            },
        },
    }
    group_rules = [rule for rule in RULES if rule.at.startswith("spec.") and rule.at.split(".")[1] in job["properties"]]
    _add_rules({"properties": {"spec": job}}, group_rules)
    return schema


NOT_OF_PROFILES: Final = ("nodes", "suspend", "managedBy", "profileRef", "code")
"""Fields of a spec that a profile cannot have."""


def _add_rules(schema: dict[str, Any], rules: Iterable[CelRule]) -> None:
    """Add CEL rules to their schema nodes."""
    for rule in rules:
        node = schema
        for name in rule.at.split(".") if rule.at else ():
            node = node["properties"][name]
        entry = {"rule": rule.cel, "message": rule.message}
        if rule.explanation:
            entry["messageExpression"] = rule.explanation
        if rule.field and rule.field != ".metadata.name":
            entry["fieldPath"] = rule.field
        node.setdefault("x-kubernetes-validations", []).append(entry)


def _bound_lists(spec: dict[str, Any]) -> None:
    """Bound lists and strings that CEL rules read: the API server estimates a rule's cost from these bounds."""
    recovery = spec["properties"]["recovery"]["properties"]
    recovery["nonRetryableExitCodes"]["maxItems"] = 255
    for name in ("conditions", "taints"):
        recovery["nodeHealth"]["properties"][name] |= {"maxItems": 32, "items": {"type": "string", "maxLength": 316}}

    inputs = spec["properties"]["inputs"]
    inputs["maxItems"] = 16  # a termination message has room for the reports of as many
    for name in ("url", "mountPath", "claimName", "checksum", "name"):
        inputs["items"]["properties"][name]["maxLength"] = 2048

    code_fields = spec["properties"]["code"]["properties"]
    code_paths = [("code", name) for name, field in code_fields.items() if field["type"] == "string"]
    checkpoint_paths = [("checkpoint", name) for name in ("path", "claimName", "url")]
    for path in (("shm", "sizeLimit"), *checkpoint_paths, *code_paths):
        node = spec
        for name in path:
            node = node["properties"][name]
        node["maxLength"] = 4096


def render_crd(definition: Mapping[str, Any]) -> str:
    """Return a definition as YAML, with a note that it is generated."""
    header = "# Generated from operator/ddp_operator/api by `make generate`. Do not edit.\n"
    return header + format_documents([definition])


if __name__ == "__main__":
    kind = sys.argv[1] if len(sys.argv) > 1 else constants.KIND
    sys.stdout.write(render_crd(build_crd() if kind == constants.KIND else build_profile_crd(kind)))

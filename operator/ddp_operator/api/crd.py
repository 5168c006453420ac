"""The CustomResourceDefinitions, generated from a ``Schema`` and ``status.py``.

``make generate`` writes them to ``deploy/crds`` (``python -m ddp_operator.features.crd``).
"""

from collections.abc import Iterable, Mapping
from typing import Any, Final

from msgspec import structs

from ddp_operator.api import constants
from ddp_operator.api.cel_rule import CelRule
from ddp_operator.api.columns import COLUMNS
from ddp_operator.api.completion import find_completing
from ddp_operator.api.former import FormerField, add_former
from ddp_operator.api.rules import list_rules
from ddp_operator.api.schema import Schema
from ddp_operator.api.status import OPAQUE, Status
from ddp_operator.api.structural import build_schema, without_defaults
from ddp_operator.api.yaml_writer import format_documents

SHORT_NAMES: Final = ("ddp", "ddpjob")

DEFAULTED: Final = ("nodes", "suspend")
"""Fields of a spec with a default in the CRD: the scale subresource reads the number of nodes."""


def build_spec_schema(schema: Schema) -> dict[str, Any]:
    """Return the schema of a stored spec. The operator adds the values of a profile, and the defaults."""
    complete = build_schema(schema.spec)
    spec, required = make_optional(complete)
    add_former(spec, schema.former)
    for name in DEFAULTED:
        spec["properties"][name] = complete["properties"][name]
    may_be_elsewhere = ""
    remedy = "add it"
    part = find_completing(schema)
    if part is not None and part.completion is not None:
        for name in part.names:
            spec["properties"][name] = without_defaults(complete["properties"][name])
        required = [path for path in required if path.partition(".")[0] not in part.names]
        may_be_elsewhere = " || ".join(f"has(self.{name})" for name in part.names) + " || "
        remedy = f"add it, or {part.completion.remedy}"

    # `required` in the schema would apply to jobs with a profile too, so a CEL rule checks these fields.
    checks = {path: _is_set_or_not_needed(path, schema.former) for path in required}
    missing = " + ".join(f"({check} ? '' : 'spec.{path} ')" for path, check in checks.items())
    spec["x-kubernetes-validations"] = [
        {
            "rule": f"{may_be_elsewhere}({' && '.join(checks.values())})",
            "message": f"one of {', '.join(required)} has no default; {remedy}",
            "messageExpression": f"({missing}).trim().replace(' ', ', ') + ': no default; {remedy}'",
            "reason": "FieldValueRequired",
        }
    ]
    return spec


def make_optional(schema: dict[str, Any], path: str = "") -> tuple[dict[str, Any], list[str]]:
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
        optional_child, child_paths = make_optional(child, f"{path}{name}.")
        optional["properties"][name] = optional_child
        paths += child_paths
    return optional, paths


def _is_set_or_not_needed(path: str, former: Iterable[FormerField]) -> str:
    """Return CEL that is true if the member at ``path`` is set, or an object above it is not.

    A job may have a former member beside it instead.
    """
    group = path.rpartition(".")[0]
    beside = [field.path for field in former if group and field.path.rpartition(".")[0] == group]
    parents = [path[:end] for end, letter in enumerate(path) if letter == "."]
    conditions = [f"!has(self.{parent})" for parent in parents]
    conditions += [f"has(self.{set_path})" for set_path in (path, *beside)]
    return f"({' || '.join(conditions)})"


def build_crd(schema: Schema) -> dict[str, Any]:
    """Return the CustomResourceDefinition of the job."""
    scale = {
        "specReplicasPath": ".spec.nodes",
        "statusReplicasPath": ".status.nodes.desired",
        "labelSelectorPath": ".status.selector",
    }
    names = {"kind": constants.KIND, "shortNames": list(SHORT_NAMES), "categories": ["all"]}
    return define_kind(
        names, "Namespaced", build_resource_schema(schema), build_columns(schema), {"status": {}, "scale": scale}
    )


def define_kind(
    names: dict[str, Any],
    scope: str,
    schema: dict[str, Any],
    columns: list[Any],
    subresources: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the CustomResourceDefinition of a kind of this project. ``schema``: of its objects."""
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


def build_resource_schema(schema: Schema) -> dict[str, Any]:
    """Return the schema of the whole resource, with the CEL rules at their nodes."""
    status = without_defaults(build_schema(Status))
    conditions = status["properties"]["conditions"]
    conditions["x-kubernetes-list-type"] = "map"
    conditions["x-kubernetes-list-map-keys"] = ["type"]
    # An API server removes fields without a schema also when it reads a stored resource. The operator takes over those
    # of the release before (operator_state.py), and an operator of that release may run beside a newer definition.
    for group in (status, *(status["properties"][name] for name in ("restarts", "usage"))):
        group[OPAQUE] = True
    resource: dict[str, Any] = {
        "type": "object",
        "description": "Distributed PyTorch training: torchrun in a number of pods, monitored and restarted.",
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            "metadata": {"type": "object"},
            "spec": build_spec_schema(schema),
            "status": status,
        },
    }
    add_rules(resource, list_rules(schema))
    bound_lists(resource["properties"]["spec"])
    return resource


def add_rules(root: dict[str, Any], rules: Iterable[CelRule]) -> None:
    """Add CEL rules to their schema nodes."""
    for rule in rules:
        node = root
        for name in rule.at.split(".") if rule.at else ():
            node = node["properties"][name]
        entry = {"rule": rule.cel, "message": rule.message}
        if rule.explanation:
            entry["messageExpression"] = rule.explanation
        if rule.field and rule.field != ".metadata.name":
            entry["fieldPath"] = rule.field
        node.setdefault("x-kubernetes-validations", []).append(entry)


def bound_lists(spec: dict[str, Any]) -> None:
    """Bound lists and strings that CEL rules read: the API server estimates a rule's cost from these bounds."""
    spec["properties"]["recovery"]["properties"]["nonRetryableExitCodes"]["maxItems"] = 255
    checkpoint_paths = [("checkpoint", name) for name in ("path", "claimName", "url")]
    for path in (("sharedMemory",), *checkpoint_paths):
        node = spec
        for name in path:
            node = node["properties"][name]
        node["maxLength"] = 4096


def render_crd(definition: Mapping[str, Any]) -> str:
    """Return a definition as YAML, with a note that it is generated."""
    header = "# Generated from operator/ddp_operator/api by `make generate`. Do not edit.\n"
    return header + format_documents([definition])


def build_columns(schema: Schema) -> list[dict[str, Any]]:
    """Return the printer columns of the job, of which a feature that is not there has none."""
    members = {member.encode_name for member in structs.fields(schema.spec)}
    return [
        {"name": name, "type": kind, "jsonPath": path} | ({"priority": priority} if priority else {})
        for name, kind, path, priority in COLUMNS
        if not path.startswith(".spec.") or path.split(".")[2] in members
    ]

"""The CustomResourceDefinitions of profiles, generated from the ``Schema`` of jobs."""

from typing import Any, Final

from ddp_operator.api.crd import add_rules, bound_lists, define_kind, make_optional
from ddp_operator.api.former import add_former
from ddp_operator.api.other_kinds import CLUSTER_PROFILE_KIND, PROFILE_KIND
from ddp_operator.api.rules import list_rules
from ddp_operator.api.schema import Schema
from ddp_operator.api.structural import build_schema
from ddp_operator.features.profiles.values import LOCKS_REMOVED

_KINDS: Final = {
    CLUSTER_PROFILE_KIND: ("Cluster", "cddpprofile"),
    PROFILE_KIND: ("Namespaced", "ddpprofile"),
}
NOT_OF_PROFILES: Final = ("nodes", "suspend", "managedBy", "profileRef", "code")
"""Fields of a spec that a profile cannot have."""


def build_definitions(schema: Schema) -> dict[str, dict[str, Any]]:
    """Return the CustomResourceDefinition of each kind of profile, cluster-scoped and namespaced."""
    columns = [{"name": "Age", "type": "date", "jsonPath": ".metadata.creationTimestamp"}]
    profile = _build_schema(schema)
    return {
        kind: define_kind({"kind": kind, "shortNames": [short]}, scope, profile, columns)
        for kind, (scope, short) in _KINDS.items()
    }


def _build_schema(schema: Schema) -> dict[str, Any]:
    """Return the schema of a profile. It includes the rules that concern a single group of fields."""
    job, _ = make_optional(build_schema(schema.spec))
    add_former(job, schema.former)
    bound_lists(job)
    job["description"] = "Part of a DDPTrainingJob's spec. The job's own values take precedence."
    for name in NOT_OF_PROFILES:
        job["properties"].pop(name, None)  # one of a feature may be absent
    locked = {
        "type": "array",
        "description": f"Fields that a job may not change: {LOCKS_REMOVED}.",
        "maxItems": 256,
        "items": {"type": "string", "maxLength": 512},
        "x-kubernetes-validations": [{"rule": "size(self) == 0", "message": LOCKS_REMOVED}],
    }
    profile: dict[str, Any] = {
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
    members = job["properties"]
    rules = [rule for rule in list_rules(schema) if rule.at.startswith("spec.") and rule.at.split(".")[1] in members]
    add_rules({"properties": {"spec": job}}, rules)
    return profile

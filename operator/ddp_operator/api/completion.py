"""Complete the spec of a job that names an object with further values, such as a profile. Pure."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from msgspec import structs

from ddp_operator.api.errors import FieldError, InvalidManifest
from ddp_operator.api.faults import name_object
from ddp_operator.api.former import find_former
from ddp_operator.api.job import DDPTrainingJob
from ddp_operator.api.parse import parse_resource
from ddp_operator.api.parts import call_owner
from ddp_operator.api.schema import OwnFields, Schema
from ddp_operator.api.size import refuse_oversize
from ddp_operator.api.spec import Spec, SpecFields
from ddp_operator.api.status import Profile


def find_completing(schema: Schema) -> OwnFields[SpecFields] | None:
    """Return the fields by which a spec names what completes it, which are one feature's at most; None: none are."""
    return next((part for part in schema.owned if part.completion is not None), None)


def is_completed(schema: Schema, spec: Spec) -> bool:
    """Return whether a spec names what completes it; parsing has completed it."""
    part = find_completing(schema)
    return part is not None and part.is_set(spec)


def names_values(schema: Schema, spec: Any) -> bool:
    """Return whether a written spec, of any shape, names what completes it."""
    part = find_completing(schema)
    return part is not None and isinstance(spec, Mapping) and any(spec.get(name) for name in part.names)


def complete_spec(schema: Schema, resource: Mapping[str, Any], values: Profile) -> Mapping[str, Any]:
    """Return the spec of a resource, completed by values. Raises: InvalidManifest, also for a fault."""
    part = find_completing(schema)
    if part is None or part.completion is None:
        raise InvalidManifest([FieldError("status.profile", "no feature of this operator completes jobs")])
    own = schema.take_over(resource["spec"])
    values = structs.replace(values, job=schema.take_over(values.job))
    completed = call_owner(part, name_object(resource), partial(part.completion.merge, own, values), Mapping)
    spec = dict(completed)
    for switched in schema.owned:
        if switched.switch:
            _drop_disabled(spec, own, switched.switch)
    return spec


def complete_job(resource: Mapping[str, Any], profile: Profile | None, schema: Schema) -> DDPTrainingJob:
    """Return the typed resource, completed by its profile. Raises: InvalidManifest."""
    former = None
    if profile is not None:
        refuse_oversize(resource.get("spec"))
        former = _list_former(schema, resource, profile)
        resource = {**resource, "spec": complete_spec(schema, resource, profile)}
    job = parse_resource(resource, schema)
    if former is not None:
        job = replace(job, former=former)
    return replace(job, is_completed=is_completed(schema, job.spec))


def _list_former(schema: Schema, resource: Mapping[str, Any], values: Profile) -> Mapping[str, Any] | None:
    """Return what the release before digested of a spec and its profile, which it merged; None: as this one."""
    part = find_completing(schema)
    own = resource["spec"]
    if part is None or part.completion is None:
        return None
    if not find_former(own, schema.former) and not find_former(values.job, schema.former):
        return None
    hook = partial(part.completion.merge, own, values)
    return schema.list_former(call_owner(part, name_object(resource), hook, Mapping))


def _drop_disabled(spec: dict[str, Any], own: Mapping[str, Any], switch: str) -> None:
    """Drop what completes a group that the job switches off: without the switch those members would be refused."""
    group, _, name = switch.partition(".")
    members = spec.get(group)
    if isinstance(members, Mapping) and not members.get(name):
        kept = {name, *(own.get(group) or ())}
        spec[group] = {member: value for member, value in members.items() if member in kept}

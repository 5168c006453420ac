"""Profiles: values that a platform gives to jobs, and locked fields. Pure."""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from ddp_operator.api.constants import CLUSTER_PROFILE_KIND, TRAINER_CONTAINER
from ddp_operator.api.errors import FieldError, InvalidManifest
from ddp_operator.api.kubeobjects import find_trainer
from ddp_operator.api.locks import compared_form, list_containers, list_places, select, split_lock
from ddp_operator.api.merge import DIRECTIVE, MERGE_KEYS, merge
from ddp_operator.api.size import refuse_oversize
from ddp_operator.api.status import Profile

_MAX_CHANGES: Final = 16
"""Locked fields that a spec may change and still be completed: each takes the time of a merge."""


def profile_reference(resource: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return kind and name of the profile that a resource names; None if it names none, or the name is no string."""
    spec = resource.get("spec")
    reference = spec.get("profileRef") if isinstance(spec, Mapping) else None
    if not isinstance(reference, Mapping) or not isinstance(reference.get("name"), str):
        return None
    return str(reference.get("kind") or CLUSTER_PROFILE_KIND), reference["name"]


def read_profile(raw: Mapping[str, Any], defaults: Profile | None = None) -> Profile:
    """Return a copy of a profile's values and locks, with their digest. Raises: InvalidManifest.

    ``defaults``: values of fields that neither the job nor the profile sets.
    """
    spec = raw.get("spec") or {}
    refuse_oversize(spec)
    members = spec if isinstance(spec, Mapping) else {"job": spec}
    job = members.get("job") or {}
    locked = members.get("locked") or []
    has_paths = isinstance(locked, list) and all(isinstance(path, str) for path in locked)
    if not isinstance(job, Mapping) or not has_paths:
        problem = "job must be an object and locked a list of paths; correct the profile, see docs/profiles.md"
        raise InvalidManifest([FieldError("spec", problem)])
    if defaults is not None:
        job = {**job, **merge(defaults.job, {name: job[name] for name in defaults.job if name in job})}
    digest = hashlib.sha256(json.dumps([job, locked], sort_keys=True).encode()).hexdigest()[:16]
    return Profile(kind=raw["kind"], name=raw["metadata"]["name"], digest=digest, job=job, locked=tuple(locked))


def complete_spec(own: Mapping[str, Any], profile: Profile) -> tuple[dict[str, Any], list[FieldError]]:
    """Return a job's complete spec, and the errors of own values that differ from locked ones.

    In the returned spec a locked field has the profile's value. ``own``: the written spec, without defaults.
    ``manifests.locked_pods`` compares what other fields add to the pods. Raises: InvalidManifest for very many changes.
    """
    base, own = unify_trainer_names(profile.job, own)
    spec: dict[str, Any] = merge(base, own)
    base_form = compared_form(base)
    form = compared_form(spec)
    errors = []
    for path in profile.locked:
        steps = split_lock(path, find_trainer_name(profile.job))
        locked_values = select(base_form, steps)
        values = select(form, steps)
        if values != locked_values:
            errors.append(_explain_lock(path, profile, locked_values, values))
            if len(errors) > _MAX_CHANGES:
                raise InvalidManifest(errors)
            own, spec = _drop_change(own, base, steps)
            form = compared_form(spec)
    return _adapt_policy(spec, own), errors


def merge_profile(own: Mapping[str, Any], profile: Profile) -> dict[str, Any]:
    """Return a job's complete spec without a comparison with the locks."""
    base, own = unify_trainer_names(profile.job, own)
    return _adapt_policy(merge(base, own), own)


def _adapt_policy(spec: dict[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Drop the members of the profile's policy if the job disables it: without ``enabled`` they would be refused."""
    policy = spec.get("networkPolicy")
    if isinstance(policy, Mapping) and not policy.get("enabled"):
        kept = {"enabled", *(own.get("networkPolicy") or ())}
        spec["networkPolicy"] = {name: value for name, value in policy.items() if name in kept}
    return spec


def _drop_change(own: Mapping[str, Any], base: Mapping[str, Any], steps: list[str]) -> tuple[Any, dict[str, Any]]:
    """Return a job's own values without their change at these steps, and the spec that results.

    The change is the value itself or, if the result still differs, an object around it.
    """
    locked_values = select(compared_form(base), steps)
    own_steps = steps.copy()
    if steps[2:4] == ["containers", TRAINER_CONTAINER]:
        own_steps[3] = find_trainer_name(own)
    spec: dict[str, Any] = merge(base, own)
    for end in range(len(steps), 0, -1):
        if select(compared_form(spec), steps) == locked_values:
            break
        own = _without(own, own_steps[:end])
        spec = merge(base, own)
    return own, spec


def find_locked_part(pod: Mapping[str, Any], name: str, locked: Sequence[str]) -> Any:
    """Return the locked part of a member of the template's pod spec; None if no part of it is locked and set."""
    value = pod.get(name)
    kept: dict[str, Any] = {}
    for lock in locked:
        steps = split_lock(lock)
        whole = ["template", "spec", name]
        if steps == whole[: len(steps)]:
            return value
        if steps[:3] != whole:
            continue
        if not isinstance(value, Mapping):
            return value
        if steps[3] in value:
            kept[steps[3]] = value[steps[3]]
    return kept or None


def _explain_lock(path: str, profile: Profile, locked_values: list[Any], values: list[Any]) -> FieldError:
    locked_at = f" at {_format_values(locked_values)}" if locked_values else ""
    message = f"locked{locked_at} by {profile.kind} {profile.name}; leave it out, or name another profile"
    if not values:
        return FieldError(f"spec.{path}", message)
    return FieldError(f"spec.{path}", message, values[0] if len(values) == 1 else values)


def _format_values(values: list[Any]) -> str:
    return ", ".join(json.dumps(value, sort_keys=True)[:200] for value in values[:2])


def describe_values(value: Any, path: str = "", field: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every nested value with its path, in the notation of a profile's locks."""
    key = MERGE_KEYS.get(field)
    if isinstance(value, Mapping) and value:
        for name, member in value.items():
            step = name if re.fullmatch(r"\w+", name) else f"[{name}]"
            yield from describe_values(member, f"{path}.{step}" if path and step == name else f"{path}{step}", name)
    elif isinstance(value, list) and key and all(isinstance(item, Mapping) and key in item for item in value):
        for item in value:
            rest = {name: member for name, member in item.items() if name != key}
            yield from describe_values(rest, f"{path}[{item[key]}]")
    else:
        yield path, value


def unify_trainer_names(base: Mapping[str, Any], own: Mapping[str, Any]) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Return both specs with one name for their training containers, so that a merge combines these."""
    base_containers = list_containers(base)
    own_containers = [container for container in list_containers(own) if DIRECTIVE not in container]
    if not base_containers or not own_containers:
        return base, own

    base_trainer = find_trainer(base["template"])
    own_trainer = find_trainer({"spec": {"containers": own_containers}})
    name = own_trainer.get("name") or base_trainer.get("name") or TRAINER_CONTAINER
    if any(container is not base_trainer and container.get("name") == name for container in base_containers):
        return base, own  # another container of the profile has that name

    return _rename_container(base, base_trainer, name), _rename_container(own, own_trainer, name)


def _rename_container(spec: Mapping[str, Any], renamed: Any, name: str) -> dict[str, Any]:
    containers = list_containers(spec)
    containers = [{**container, "name": name} if container is renamed else container for container in containers]
    template = spec["template"]
    return {**spec, "template": {**template, "spec": {**template["spec"], "containers": containers}}}


def find_trainer_name(spec: Mapping[str, Any]) -> str:
    """Return the name of a spec's training container, or the default name."""
    containers = [container for container in list_containers(spec) if DIRECTIVE not in container]
    return str(find_trainer({"spec": {"containers": containers}}).get("name") or TRAINER_CONTAINER)


def _without(value: Any, steps: list[str]) -> Any:
    """Return a copy without the members at these steps."""
    changed = value
    for place in reversed(list_places(value, steps[0])):
        changed = changed.copy()
        if len(steps) > 1:
            changed[place] = _without(value[place], steps[1:])
        else:
            del changed[place]
    return changed

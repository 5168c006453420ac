"""Profiles: values that a platform gives to jobs, and locked fields. Pure."""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from ddp_operator.api.errors import FieldError, InvalidManifest
from ddp_operator.api.merge import MERGE_KEYS, merge
from ddp_operator.api.size import refuse_oversize
from ddp_operator.api.status import Profile
from ddp_operator.constants import CLUSTER_PROFILE_KIND, TRAINER_CONTAINER
from ddp_operator.kubeobjects import find_trainer

_ABSENT: Final[Any] = object()
_POD: Final = "template.spec."
_MOUNTS: Final = f"containers[{TRAINER_CONTAINER}].volumeMounts"
# Fields of a spec outside the template that change the pods -> the paths below template.spec that they change.
_FILLED: Final[Mapping[str, tuple[str, ...]]] = {
    "inputs": ("volumes", _MOUNTS),
    "checkpoint": ("volumes", _MOUNTS),
    "checkpoint.graceSeconds": ("terminationGracePeriodSeconds",),
    "checkpoint.secretRef": (f"containers[{TRAINER_CONTAINER}].envFrom",),
    "code": ("volumes", _MOUNTS),
    "network.profile": (
        "volumes",
        "initContainers",
        _MOUNTS,
        f"containers[{TRAINER_CONTAINER}].env",
        f"containers[{TRAINER_CONTAINER}].resources.limits",
        f"containers[{TRAINER_CONTAINER}].securityContext.capabilities",
    ),
    "scheduling.gang": ("schedulerName", "schedulingGroup"),
    "scheduling.placement": ("affinity.podAffinity", "topologySpreadConstraints"),
    "scheduling.priorityClassName": ("priorityClassName",),
    "scheduling.schedulerName": ("schedulerName",),
    "scheduling.topologyKey": ("affinity.podAffinity", "topologySpreadConstraints"),
    "securityProfile": (
        "securityContext.runAsNonRoot",
        f"containers[{TRAINER_CONTAINER}].securityContext.capabilities",
    ),
    "tracking.mlflow.secretRef": (f"containers[{TRAINER_CONTAINER}].envFrom",),
    "tracking.wandb.secretRef": (f"containers[{TRAINER_CONTAINER}].envFrom",),
}
_BELOW_TEMPLATE: Final = ("checkpoint.graceSeconds", "scheduling.gang")  # the template's value takes precedence
_DEFAULTS: Final[Mapping[str, str]] = {
    "network.profile": "auto",
    "scheduling.gang": "None",
    "scheduling.placement": "Any",
    "securityProfile": "Default",
}
_STEP: Final = re.compile(r"[^.\[\]]+|\[[^\[\]]+\]")


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
    job = spec.get("job") or {}
    locked = spec.get("locked") or []
    if not isinstance(job, Mapping) or not isinstance(locked, list):
        raise InvalidManifest(
            [FieldError("spec", "job must be an object and locked a list; correct the profile, see docs/profiles.md")]
        )
    if defaults is not None:
        job = {**job, **merge(defaults.job, {name: job[name] for name in defaults.job if name in job})}
    digest = hashlib.sha256(json.dumps([job, locked], sort_keys=True).encode()).hexdigest()[:16]
    return Profile(kind=raw["kind"], name=raw["metadata"]["name"], digest=digest, job=job, locked=tuple(locked))


def complete_spec(own: Mapping[str, Any], profile: Profile) -> tuple[dict[str, Any], list[FieldError]]:
    """Return a job's complete spec, and the errors of own values that differ from locked ones.

    In the returned spec a locked field has the profile's value. ``own``: the written spec, without defaults.
    """
    base, own = unify_trainer_names(profile.job, own)
    spec: dict[str, Any] = merge(base, own)
    trainer = find_trainer(spec.get("template") or {}).get("name", TRAINER_CONTAINER)
    errors = []
    for path in profile.locked:
        steps = _STEP.findall(path.replace(f"containers[{TRAINER_CONTAINER}]", f"containers[{trainer}]"))
        locked_value = _read(base, steps)
        value = _read(spec, steps)
        if value != locked_value:
            errors.append(_explain_lock(path, profile, locked_value, value))
            own, spec = _drop_change(own, base, steps)

    for field, path in _list_indirect_changes(profile.locked):
        steps = _STEP.findall(field)
        value = _read_pod_change(spec, field)
        overridden = field in _BELOW_TEMPLATE and _read(spec, _STEP.findall(path)) is not _ABSENT
        if value == _read_pod_change(base, field) or overridden:
            continue
        errors.append(_explain_indirect_change(field, path, profile, value))
        own, spec = _drop_change(own, base, steps)

    policy = spec.get("networkPolicy")
    if isinstance(policy, Mapping) and not policy.get("enabled"):
        # The job disables the profile's policy. The profile's other members would be refused without `enabled`.
        kept = {"enabled", *(own.get("networkPolicy") or ())}
        spec["networkPolicy"] = {name: value for name, value in policy.items() if name in kept}
    return spec, errors


def _drop_change(own: Mapping[str, Any], base: Mapping[str, Any], steps: list[str]) -> tuple[Any, dict[str, Any]]:
    """Return a job's own values without their change at these steps, and the spec that results.

    The change is the value itself or, if the result still differs, an object around it.
    """
    base_value = _read(base, steps)
    spec: dict[str, Any] = merge(base, own)
    for end in range(len(steps), 0, -1):
        if _read(spec, steps) == base_value:
            break
        own = _without(own, steps[:end])
        spec = merge(base, own)
    return own, spec


def _list_indirect_changes(locked: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield each field outside the template that changes a locked path of the template, and that lock."""
    for field, paths in _FILLED.items():
        parts = [_STEP.findall(f"{_POD}{path}") for path in paths]
        for lock in locked:
            steps = _STEP.findall(lock)
            if any(part[: len(steps)] == steps for part in parts):
                yield field, lock
                break


def _read_pod_change(spec: Mapping[str, Any], field: str) -> Any:
    """Return the value of a field that changes pods; _ABSENT for a default, or a checkpoint on a template's volume."""
    value = _read(spec, _STEP.findall(field))
    if value == _DEFAULTS.get(field, _ABSENT):
        return _ABSENT
    if field == "checkpoint" and isinstance(value, Mapping):
        return _read_checkpoint_volume(spec, value)
    return value


def _read_checkpoint_volume(spec: Mapping[str, Any], checkpoint: Mapping[str, Any]) -> Any:
    trainer = find_trainer(spec["template"]) if _list_containers(spec) else {}
    mounts = trainer.get("volumeMounts")
    path = str(checkpoint.get("path")).rstrip("/")
    mounted = isinstance(mounts, list) and path in {
        str(mount.get("mountPath")).rstrip("/") for mount in mounts if isinstance(mount, Mapping)
    }
    return _ABSENT if mounted else (path, checkpoint.get("claimName"))


def _explain_indirect_change(field: str, path: str, profile: Profile, value: Any) -> FieldError:
    message = (
        f"changes {path} of the pods, which {profile.kind} {profile.name} locks; leave it out, or name another profile"
    )
    if isinstance(value, str):
        return FieldError(f"spec.{field}", message, value)
    return FieldError(f"spec.{field}", message)


def find_locked_part(pod: Mapping[str, Any], name: str, locked: Sequence[str]) -> Any:
    """Return the locked part of a member of the template's pod spec; None if no part of it is locked and set."""
    value = pod.get(name)
    kept: dict[str, Any] = {}
    for lock in locked:
        steps = _STEP.findall(lock)
        whole = ["template", "spec", name]
        if steps == whole[: len(steps)]:
            return value
        if steps[:3] != whole:
            continue
        if not isinstance(value, Mapping):
            return value
        place = _find(value, steps[3])
        if place is not _ABSENT:
            kept[place] = value[place]
    return kept or None


def _explain_lock(path: str, profile: Profile, locked_value: Any, value: Any) -> FieldError:
    locked_at = "" if locked_value is _ABSENT else f" at {json.dumps(locked_value, sort_keys=True)[:200]}"
    message = f"locked{locked_at} by {profile.kind} {profile.name}; leave it out, or name another profile"
    if value is _ABSENT:
        return FieldError(f"spec.{path}", message)
    return FieldError(f"spec.{path}", message, value)


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
    base_containers = _list_containers(base)
    own_containers = _list_containers(own)
    if not base_containers or not own_containers:
        return base, own

    base_trainer = find_trainer(base["template"])
    own_trainer = find_trainer(own["template"])
    name = own_trainer.get("name") or base_trainer.get("name") or TRAINER_CONTAINER
    if any(container is not base_trainer and container.get("name") == name for container in base_containers):
        return base, own  # another container of the profile has that name

    return (
        _rename_container(base, base_containers, base_trainer, name),
        _rename_container(own, own_containers, own_trainer, name),
    )


def _list_containers(spec: Mapping[str, Any]) -> list[Any]:
    """Return the containers of a spec's template; none if they are malformed."""
    pod = (spec.get("template") or {}).get("spec")
    containers = pod.get("containers") if isinstance(pod, Mapping) else None
    if not isinstance(containers, list) or not all(isinstance(container, Mapping) for container in containers):
        return []
    return containers


def _rename_container(spec: Mapping[str, Any], containers: list[Any], renamed: Any, name: str) -> dict[str, Any]:
    containers = [{**container, "name": name} if container is renamed else container for container in containers]
    template = spec["template"]
    return {**spec, "template": {**template, "spec": {**template["spec"], "containers": containers}}}


def _find(value: Any, step: str) -> Any:
    """Return the key or the index of a member. [NAME] selects an item by its merge key, or a member of any name."""
    name = step.strip("[]")
    if isinstance(value, Mapping):
        return name if name in value else _ABSENT
    if not isinstance(value, list):
        return _ABSENT
    for index, item in enumerate(value):
        if isinstance(item, Mapping) and name in _list_merge_values(item):
            return index
    return _ABSENT


def _list_merge_values(item: Mapping[str, Any]) -> set[str]:
    """Return the values of an item's members that are a merge key of any list."""
    keys = set(MERGE_KEYS.values())
    return {str(item[key]) for key in keys & item.keys()}


def _read(value: Any, steps: list[str]) -> Any:
    for step in steps:
        place = _find(value, step)
        if place is _ABSENT:
            return _ABSENT
        value = value[place]
    return value


def _without(value: Any, steps: list[str]) -> Any:
    """Return a copy without the member at these steps."""
    place = _find(value, steps[0])
    if place is _ABSENT:
        return value
    changed = value.copy()
    if len(steps) > 1:
        changed[place] = _without(value[place], steps[1:])
    else:
        del changed[place]
    return changed

"""Profiles: what a platform gives a job and locks. Pure: the profile and the job's own spec give the whole one."""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from ddp_operator.api.errors import FieldError, InvalidManifest
from ddp_operator.api.merge import MERGE_KEYS, merge
from ddp_operator.api.status import Profile
from ddp_operator.constants import CLUSTER_PROFILE_KIND, TRAINER_CONTAINER
from ddp_operator.kubeobjects import find_trainer

_ABSENT: Final[Any] = object()
_POD: Final = "template.spec."
_MOUNTS: Final = f"containers[{TRAINER_CONTAINER}].volumeMounts"
# What a job's pods get by fields of its spec beside the template: paths below template.spec by field.
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
    "scheduling.gang": ("schedulerName",),
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
_BELOW_TEMPLATE: Final = ("checkpoint.graceSeconds", "scheduling.gang")  # where the template sets it, that wins
_DEFAULTS: Final[Mapping[str, str]] = {
    "network.profile": "auto",
    "scheduling.gang": "None",
    "scheduling.placement": "Any",
    "securityProfile": "Default",
}
_STEP: Final = re.compile(r"[^.\[\]]+|\[[^\[\]]+\]")


def profile_reference(resource: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return kind and name of the profile that a resource names; None: none, or nothing that could be a name."""
    spec = resource.get("spec")
    reference = spec.get("profileRef") if isinstance(spec, Mapping) else None
    if not isinstance(reference, Mapping) or not isinstance(reference.get("name"), str):
        return None
    return str(reference.get("kind") or CLUSTER_PROFILE_KIND), reference["name"]


def read_profile(raw: Mapping[str, Any], defaults: Profile | None = None) -> Profile:
    """Return what a job takes of a profile as it is now, with a digest of that. Raises: InvalidManifest.

    ``defaults``: what it has where neither the job nor the profile sets it.
    """
    spec = raw.get("spec") or {}
    job, locked = spec.get("job") or {}, spec.get("locked") or []
    if not isinstance(job, Mapping) or not isinstance(locked, list):
        raise InvalidManifest([FieldError("spec", "must have an object job and a list locked; see docs/profiles.md")])
    if defaults is not None:
        job = {**job, **merge(defaults.job, {name: job[name] for name in defaults.job if name in job})}
    digest = hashlib.sha256(json.dumps([job, locked], sort_keys=True).encode()).hexdigest()[:16]
    return Profile(kind=raw["kind"], name=raw["metadata"]["name"], digest=digest, job=job, locked=tuple(locked))


def complete_spec(own: Mapping[str, Any], profile: Profile) -> tuple[dict[str, Any], list[FieldError]]:
    """Return a job's whole spec, and where its own values differ from locked ones: there it has the profile's.

    ``own``: the spec as it is written, without defaults.
    """
    base, own = same_trainer(profile.job, own)
    spec: dict[str, Any] = merge(base, own)
    trainer = find_trainer(spec.get("template") or {}).get("name", TRAINER_CONTAINER)
    errors = []
    for path in profile.locked:
        steps = _STEP.findall(path.replace(f"containers[{TRAINER_CONTAINER}]", f"containers[{trainer}]"))
        wanted, found = _read(base, steps), _read(spec, steps)
        if found != wanted:
            errors.append(_explain_lock(path, profile, wanted, found))
        own, spec = _drop(own, base, steps)
    for field, path in _list_filled(profile.locked):
        steps = _STEP.findall(field)
        wanted = _read_filled(base, field)
        found = _read_filled(spec, field)
        overridden = field in _BELOW_TEMPLATE and _read(spec, _STEP.findall(path)) is not _ABSENT
        if found == wanted or overridden:
            continue
        errors.append(_explain_filled(field, path, profile, found))
        own, spec = _drop(own, base, steps)
    policy = spec.get("networkPolicy")
    if isinstance(policy, Mapping) and not policy.get("enabled"):
        # What the profile would let through was set for one that is enabled, and is refused without.
        kept = {"enabled", *(own.get("networkPolicy") or ())}
        spec["networkPolicy"] = {name: value for name, value in policy.items() if name in kept}
    return spec, errors


def _drop(own: Mapping[str, Any], base: Mapping[str, Any], steps: list[str]) -> tuple[Any, dict[str, Any]]:
    """Return a job's own values without what they change at these steps, and the spec that they give then.

    Left out is the value itself or, where that is not enough, what the job has around it.
    """
    wanted = _read(base, steps)
    spec: dict[str, Any] = merge(base, own)
    for end in range(len(steps), 0, -1):
        if _read(spec, steps) == wanted:
            break
        own = _without(own, steps[:end])
        spec = merge(base, own)
    return own, spec


def _list_filled(locked: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield each field beside the template by which a job would change what is locked there, and the lock."""
    for field, paths in _FILLED.items():
        parts = [_STEP.findall(f"{_POD}{path}") for path in paths]
        for lock in locked:
            steps = _STEP.findall(lock)
            if any(part[: len(steps)] == steps for part in parts):
                yield field, lock
                break


def _read_filled(spec: Mapping[str, Any], field: str) -> Any:
    """Return what a field gives to the pods; a default, and a checkpoint on a volume of the template, is nothing."""
    value = _read(spec, _STEP.findall(field))
    if value == _DEFAULTS.get(field, _ABSENT):
        return _ABSENT
    if field == "checkpoint" and isinstance(value, Mapping):
        return _read_checkpoint_volume(spec, value)
    return value


def _read_checkpoint_volume(spec: Mapping[str, Any], checkpoint: Mapping[str, Any]) -> Any:
    trainer = find_trainer(spec["template"]) if _containers(spec) else {}
    mounts = trainer.get("volumeMounts")
    path = str(checkpoint.get("path")).rstrip("/")
    mounted = isinstance(mounts, list) and path in {
        str(mount.get("mountPath")).rstrip("/") for mount in mounts if isinstance(mount, Mapping)
    }
    return _ABSENT if mounted else (path, checkpoint.get("claimName"))


def _explain_filled(field: str, path: str, profile: Profile, found: Any) -> FieldError:
    words = (
        f"changes what {profile.kind} {profile.name} locks at {path}, as it adds to the pods; leave it out, "
        "or name another profile"
    )
    return FieldError(f"spec.{field}", words, *((found,) if isinstance(found, str) else ()))


def find_locked_part(pod: Mapping[str, Any], name: str, locked: Sequence[str]) -> Any:
    """Return what of a member of a template's pod is locked; None: nothing that the template sets."""
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


def _explain_lock(path: str, profile: Profile, wanted: Any, found: Any) -> FieldError:
    value = "" if wanted is _ABSENT else f" at {json.dumps(wanted, sort_keys=True)[:200]}"
    words = f"locked{value} by {profile.kind} {profile.name}; leave it out, or name another profile"
    return FieldError(f"spec.{path}", words, *(() if found is _ABSENT else (found,)))


def describe_values(value: Any, path: str = "", field: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every value below with its path, in the form in which it can be locked."""
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


def same_trainer(base: Mapping[str, Any], own: Mapping[str, Any]) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Give the training containers of both one name, so that they are merged: they are the same whatever it is."""
    theirs, ours = _containers(base), _containers(own)
    if not theirs or not ours:
        return base, own
    trainer, mine = find_trainer(base["template"]), find_trainer(own["template"])
    name = mine.get("name") or trainer.get("name") or TRAINER_CONTAINER
    if any(one is not trainer and one.get("name") == name for one in theirs):
        return base, own  # another container of the profile's
    return _rename(base, theirs, trainer, name), _rename(own, ours, mine, name)


def _containers(spec: Mapping[str, Any]) -> list[Any]:
    pod = (spec.get("template") or {}).get("spec")
    found = pod.get("containers") if isinstance(pod, Mapping) else None
    usable = isinstance(found, list) and all(isinstance(one, Mapping) for one in found)
    return found if usable and found is not None else []


def _rename(spec: Mapping[str, Any], containers: list[Any], one: Any, name: str) -> dict[str, Any]:
    renamed = [{**item, "name": name} if item is one else item for item in containers]
    template = spec["template"]
    return {**spec, "template": {**template, "spec": {**template["spec"], "containers": renamed}}}


def _find(value: Any, step: str) -> Any:
    """Return the key or the index of a member: [NAME] is an item by its merge key, or a member of any name."""
    name = step.strip("[]")
    if isinstance(value, Mapping):
        return name if name in value else _ABSENT
    items = enumerate(value) if isinstance(value, list) else ()
    keys = set(MERGE_KEYS.values())
    named = (place for place, item in items if isinstance(item, Mapping) and name in _texts(item, keys))
    return next(named, _ABSENT)


def _texts(item: Mapping[str, Any], keys: set[str]) -> set[str]:
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

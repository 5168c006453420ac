"""Profiles: what a platform gives a job and locks. Pure: the profile and the job's own spec give the whole one."""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from ddp_operator.api.errors import FieldError, InvalidManifest
from ddp_operator.api.merge import MERGE_KEYS, merge
from ddp_operator.api.status import Profile
from ddp_operator.constants import CLUSTER_PROFILE_KIND, TRAINER_CONTAINER
from ddp_operator.kubeobjects import find_trainer

_ABSENT: Final[Any] = object()
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
        # What a job may not say is left out: the value itself or, where that is not enough, what it says around it.
        for end in range(len(steps), 0, -1):
            if _read(spec, steps) == wanted:
                break
            own = _without(own, steps[:end])
            spec = merge(base, own)
    policy = spec.get("networkPolicy")
    if isinstance(policy, Mapping) and not policy.get("enabled"):
        # What the profile would let through was set for one that is enabled, and is refused without.
        kept = {"enabled", *(own.get("networkPolicy") or ())}
        spec["networkPolicy"] = {name: value for name, value in policy.items() if name in kept}
    return spec, errors


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

"""The values that a platform gives to jobs by a profile, and their merge with those of a job. Pure."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any, Final

from ddp_operator.api.constants import TRAINER_CONTAINER
from ddp_operator.api.errors import FieldError, InvalidManifest
from ddp_operator.api.kubeobjects import find_trainer
from ddp_operator.api.other_kinds import CLUSTER_PROFILE_KIND
from ddp_operator.api.size import refuse_oversize
from ddp_operator.api.status import Profile
from ddp_operator.features.profiles.merge import DIRECTIVE, merge

LOCKS_REMOVED: Final = (
    "removed; refuse the values in a ValidatingAdmissionPolicy (deploy/profiles/locked.yaml, docs/profiles.md), and "
    "remove locked from the profile"
)


def profile_reference(resource: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return kind and name of the profile that a resource names; None if it names none, or the name is no string."""
    spec = resource.get("spec")
    reference = spec.get("profileRef") if isinstance(spec, Mapping) else None
    if not isinstance(reference, Mapping) or not isinstance(reference.get("name"), str):
        return None
    return str(reference.get("kind") or CLUSTER_PROFILE_KIND), reference["name"]


def read_profile(raw: Mapping[str, Any], defaults: Profile | None = None) -> Profile:
    """Return a copy of a profile's values, with their digest. Raises: InvalidManifest.

    ``defaults``: values of fields that neither the job nor the profile sets.
    """
    spec = raw.get("spec") or {}
    refuse_oversize(spec)
    members = spec if isinstance(spec, Mapping) else {"job": spec}
    job = members.get("job") or {}
    if not isinstance(job, Mapping):
        problem = "job must be an object; correct the profile, see docs/profiles.md"
        raise InvalidManifest([FieldError("spec", problem)])
    if members.get("locked"):  # an ignored lock would allow what it forbids
        raise InvalidManifest([FieldError("spec.locked", LOCKS_REMOVED)])
    if defaults is not None:
        job = {**job, **merge(defaults.job, {name: job[name] for name in defaults.job if name in job})}
    digest = hashlib.sha256(json.dumps(job, sort_keys=True).encode()).hexdigest()[:16]
    return Profile(kind=raw["kind"], name=raw["metadata"]["name"], digest=digest, job=job)


def merge_profile(own: Mapping[str, Any], profile: Profile) -> dict[str, Any]:
    """Return a job's complete spec. ``own``: the written spec, without defaults."""
    base, own = unify_trainer_names(profile.job, own)
    spec: dict[str, Any] = merge(base, own)
    return spec


def unify_trainer_names(base: Mapping[str, Any], own: Mapping[str, Any]) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Return both specs with one name for their training containers, so that a merge combines these."""
    base_containers = _list_containers(base)
    own_containers = [container for container in _list_containers(own) if DIRECTIVE not in container]
    if not base_containers or not own_containers:
        return base, own

    base_trainer = find_trainer(base["template"])
    own_trainer = find_trainer({"spec": {"containers": own_containers}})
    name = own_trainer.get("name") or base_trainer.get("name") or TRAINER_CONTAINER
    if any(container is not base_trainer and container.get("name") == name for container in base_containers):
        return base, own  # another container of the profile has that name

    return _rename_container(base, base_trainer, name), _rename_container(own, own_trainer, name)


def _rename_container(spec: Mapping[str, Any], renamed: Any, name: str) -> dict[str, Any]:
    containers = _list_containers(spec)
    containers = [{**container, "name": name} if container is renamed else container for container in containers]
    template = spec["template"]
    return {**spec, "template": {**template, "spec": {**template["spec"], "containers": containers}}}


def _list_containers(spec: Mapping[str, Any]) -> list[Any]:
    """Return the containers of a spec's template; none if they are malformed."""
    pod = (spec.get("template") or {}).get("spec")
    containers = pod.get("containers") if isinstance(pod, Mapping) else None
    if not isinstance(containers, list) or not all(isinstance(container, Mapping) for container in containers):
        return []
    return containers

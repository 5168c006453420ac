"""Compare the parts of the pods that a profile locks as they are rendered, because many fields add to them. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple

import msgspec

from ddp_operator.api import constants
from ddp_operator.api.errors import FieldError, InvalidManifest
from ddp_operator.api.locks import compared_form, select, split_lock
from ddp_operator.api.parse import parse_resource
from ddp_operator.api.profile import find_trainer_name
from ddp_operator.api.size import OversizeSpec
from ddp_operator.api.spec import Checkpoint
from ddp_operator.api.status import Profile
from ddp_operator.manifests.pod import build_pod_template
from ddp_operator.manifests.template import resolve_template

Resource = Mapping[str, Any]

_NOT_COMPARED: Final = ("template", "nodes", "suspend", "managedBy", "profileRef")
"""Fields of each job. ``complete_spec`` compares the template."""
_ANNOTATIONS: Final = f"metadata.annotations[{constants.KUEUE_POD_SET_PREFIX}*]"
_GRACE: Final = "terminationGracePeriodSeconds"
_ABSENT: Final[Any] = object()


class _Lock(NamedTuple):
    path: str
    steps: list[str]


class _Rendered(NamedTuple):
    """A resource, and the template of its training pods in the compared form."""

    resource: Resource
    pod: Mapping[str, Any]


def keep_locked_pods(resource: Resource, profile: Profile) -> tuple[Resource, list[FieldError]]:
    """Return a resource without the fields that change locked parts of the pods, and their errors.

    ``resource``: with the spec of ``complete_spec``. Each of its fields that differs from the profile's is replaced in
    turn. Raises: InvalidManifest if the pods cannot be built.
    """
    trainer = find_trainer_name(profile.job)
    locks = [_Lock(path, split_lock(path, trainer)) for path in profile.locked if path.startswith("template")]
    if not locks:
        return resource, []

    errors = []
    kept = resource
    current = _Rendered(resource, _render(resource))
    for field in _list_changed(resource, profile):
        replaced = _replace_field(current.resource, field, profile)
        if replaced is None:
            message = "cannot be compared with the locks of the profile; leave it out, or name another profile"
            errors.append(FieldError(field, message))
            continue
        lock = _find_difference(current, replaced, locks)
        if lock is not None:
            message = f"changes {lock} of the pods, which {profile.kind} {profile.name} locks"
            errors.append(FieldError(field, f"{message}; leave it out, or name another profile"))
            kept = _with_value(kept, field, _read(kept, field, profile))
        current = replaced
    if errors and _find_difference(_Rendered(kept, _render(kept)), current, locks) is not None:
        kept = current.resource
    return kept, errors


def _list_changed(resource: Resource, profile: Profile) -> list[str]:
    """Return the fields of a resource that differ from the profile's. Other fields may depend on the annotations."""
    annotations = resource["metadata"].get("annotations") or {}
    changed = [_ANNOTATIONS] if any(map(_is_of_kueue, annotations)) else []
    spec = resource["spec"]
    names = sorted({*spec, *profile.job} - {*_NOT_COMPARED})
    changed += [f"spec.{name}" for name in names if spec.get(name, _ABSENT) != profile.job.get(name, _ABSENT)]
    return changed


def _is_of_kueue(annotation: str) -> bool:
    return annotation.startswith(constants.KUEUE_DOMAIN)


def _read(resource: Resource, field: str, profile: Profile) -> Any:
    """Return the profile's value of a field; of the annotations those that no pod gets."""
    if field == _ANNOTATIONS:
        annotations = resource["metadata"]["annotations"]
        return {name: value for name, value in annotations.items() if not _is_of_kueue(name)}
    return profile.job.get(field.removeprefix("spec."), _ABSENT)


def _with_value(resource: Resource, field: str, value: Any) -> Resource:
    """Return a copy with another value of a field."""
    part, name = ("metadata", "annotations") if field == _ANNOTATIONS else ("spec", field.removeprefix("spec."))
    members = {member: kept for member, kept in resource[part].items() if member != name}
    return {**resource, part: members if value is _ABSENT else {**members, name: value}}


def _replace_field(resource: Resource, field: str, profile: Profile) -> _Rendered | None:
    """Return the resource with the profile's value of a field or, if that is incomplete, without the field.

    None: its pods can be built in neither case.
    """
    for value in (_read(resource, field, profile), _ABSENT):
        replaced = _with_value(resource, field, value)
        try:
            return _Rendered(replaced, _render(replaced))
        except OversizeSpec:
            raise
        except InvalidManifest:
            continue
    return None


def _find_difference(rendered: _Rendered, expected: _Rendered, locks: Sequence[_Lock]) -> str | None:
    """Return the first locked path at which two pods differ."""
    return next((path for path, steps in locks if select(rendered.pod, steps) != select(expected.pod, steps)), None)


def _render(resource: Resource) -> Mapping[str, Any]:
    """Return the template of the training pods in the compared form, without the operator's own parts.

    Raises: InvalidManifest.
    """
    job = parse_resource(resource)
    job = replace(job, status=msgspec.structs.replace(job.status, failed_nodes=()))
    resolved = resolve_template(job)
    template = build_pod_template(job, resolved, "", attempt=1, nodes=job.spec.nodes)

    pod = template["spec"]
    trainer = pod["containers"][resolved.trainer_index]
    written = resolved.training["spec"]["containers"][resolved.trainer_index].get("env") or ()
    variables = {variable["name"] for variable in written}
    del trainer["command"], trainer["args"]
    trainer["env"] = [variable for variable in trainer["env"] if variable["name"] in variables]
    trainer["ports"] = [port for port in trainer["ports"] if port.get("name") not in constants.PORT_NAMES]
    pod["volumes"] = [volume for volume in pod["volumes"] if volume["name"] != constants.SHM_VOLUME]
    saves = job.spec.checkpoint
    has_default_grace = saves is None or saves.grace_seconds == Checkpoint(path="").grace_seconds
    if has_default_grace and _GRACE not in resolved.training["spec"]:
        del pod[_GRACE]
    sidecars = pod.get("initContainers") or ()
    pod["initContainers"] = [container for container in sidecars if container["name"] != constants.INPUTS_VOLUME]
    return compared_form({"template": template})

"""Locked fields of a spec: their notation, and the form of a pod template in which their values are compared. Pure.

Kubernetes has several notations for the same pod: deprecated names of fields, other paths of the same folder, items
that override others. In the compared form equal effects are equal values.
"""

import posixpath
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from ddp_operator.api.constants import TRAINER_CONTAINER
from ddp_operator.api.kubeobjects import find_trainer
from ddp_operator.api.merge import MERGE_KEYS

_STEP: Final = re.compile(r"[^.\[\]]+|\[[^\[\]]+\]")
_POD: Final = ["template", "spec"]
_ACCOUNT: Final = "serviceAccountName"
_DEPRECATED_ACCOUNT: Final = "serviceAccount"
_PATHS: Final = ("mountPath", "devicePath")
_CONTAINER_LISTS: Final = ("containers", "initContainers")
_APPARMOR: Final = "appArmorProfile"
_APPARMOR_ANNOTATION: Final = "container.apparmor.security.beta.kubernetes.io/"
_SHARED_CONTEXT: Final = (
    _APPARMOR, "runAsGroup", "runAsNonRoot", "runAsUser", "seLinuxOptions", "seccompProfile", "windowsOptions",
)  # fmt: skip
"""Members of a pod's securityContext that those of its containers override: a lock on the pod's covers both."""


def split_lock(path: str, trainer: str = TRAINER_CONTAINER) -> list[str]:
    """Return the steps of a locked path in the compared form. ``trainer``: the name of the training container."""
    steps = [step.strip("[]") for step in _STEP.findall(path)]
    if steps[:2] == _POD and steps[2:3] == [_DEPRECATED_ACCOUNT]:
        steps[2] = _ACCOUNT
    if steps[:3] == [*_POD, "containers"] and steps[3:4] == [trainer]:
        steps[3] = TRAINER_CONTAINER
    return steps


def select(value: Any, steps: list[str]) -> list[Any]:
    """Return the values at these steps: none if there is no value, several if items of a list have the same key."""
    values = [value]
    for step in steps:
        values = [child for parent in values for child in _list_children(parent, step)]
    return values


def _list_children(value: Any, step: str) -> Iterator[Any]:
    if isinstance(value, tuple):
        for alternative in value:
            yield from _list_children(alternative, step)
        return
    for place in list_places(value, step):
        yield value[place]


def list_places(value: Any, step: str) -> list[Any]:
    """Return the key, or the indices, of the members that a step selects.

    In a list these are items with this value of any merge key, so that [NAME] may also be the volume of a mount.
    """
    if isinstance(value, Mapping):
        return [step] if step in value else []
    if not isinstance(value, list):
        return []
    wanted = {step, _normalize_path(step)} if step.startswith("/") else {step}
    return [index for index, item in enumerate(value) if isinstance(item, Mapping) and wanted & _list_keys(item)]


def _list_keys(item: Mapping[str, Any]) -> set[str]:
    return {str(item[key]) for key in set(MERGE_KEYS.values()) & item.keys()}


def _normalize_path(path: str) -> str:
    """Return a path as the kubelet resolves it: relative paths start at the root."""
    return posixpath.normpath("/" + path.lstrip("/"))


def compared_form(spec: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a spec with its pod template in the form in which locks compare it. Malformed parts stay unchanged."""
    containers = list_containers(spec)
    if not containers:
        return spec
    template = spec["template"]
    pod = dict(template["spec"])
    trainer = find_trainer(template)
    metadata = template.get("metadata")
    annotations = metadata.get("annotations") if isinstance(metadata, Mapping) else None

    account = pod.pop(_DEPRECATED_ACCOUNT, None)
    if account and not pod.get(_ACCOUNT):
        pod[_ACCOUNT] = account

    contexts = [pod.get("securityContext")]
    for part in _CONTAINER_LISTS:
        items = pod.get(part)
        if not isinstance(items, list):
            continue
        pod[part] = [_compare_container(item, annotations, is_trainer=item is trainer) for item in items]
        contexts += [item["securityContext"] for item in pod[part] if "securityContext" in item]

    shared = _merge_contexts(contexts)
    if shared:
        pod["securityContext"] = {**(pod.get("securityContext") or {}), **shared}
    return {**spec, "template": {**template, "spec": pod}}


def _merge_contexts(contexts: list[Any]) -> dict[str, Any]:
    """Return the members that containers override: the value of all of them, or a tuple of different ones."""
    shared: dict[str, Any] = {}
    for name in _SHARED_CONTEXT:
        values: list[Any] = []
        for context in contexts:
            if isinstance(context, Mapping) and name in context and context[name] not in values:
                values.append(context[name])
        if values:
            shared[name] = values[0] if len(values) == 1 else tuple(values)
    return shared


def _compare_container(container: Any, annotations: Any, *, is_trainer: bool) -> Any:
    """Return a container with normalized paths, and with the security options of the pod's annotations."""
    if not isinstance(container, Mapping):
        return container
    compared = dict(container)
    if is_trainer:
        compared["name"] = TRAINER_CONTAINER
    for part in ("volumeMounts", "volumeDevices"):
        items = container.get(part)
        if isinstance(items, list):
            compared[part] = [_compare_mount(item) for item in items]

    annotation = f"{_APPARMOR_ANNOTATION}{container.get('name')}"
    context = container.get("securityContext") or {}
    if isinstance(annotations, Mapping) and annotation in annotations and isinstance(context, Mapping):
        compared["securityContext"] = {_APPARMOR: annotations[annotation], **context}
    return compared


def _compare_mount(mount: Any) -> Any:
    if not isinstance(mount, Mapping):
        return mount
    paths = {name: _normalize_path(mount[name]) for name in _PATHS if isinstance(mount.get(name), str)}
    return {**mount, **paths}


def list_containers(spec: Mapping[str, Any]) -> list[Any]:
    """Return the containers of a spec's template; none if they are malformed."""
    pod = (spec.get("template") or {}).get("spec")
    containers = pod.get("containers") if isinstance(pod, Mapping) else None
    if not isinstance(containers, list) or not all(isinstance(container, Mapping) for container in containers):
        return []
    return containers

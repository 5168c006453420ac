"""Selection of the children of a DDPTrainingJob, and of the fields that the cache keeps.

Users can add the operator's labels and forged owner references to objects of a megabyte, so every kept field is
bounded.
"""

from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any, Final

from ddp_operator.api import constants
from ddp_operator.api.cluster import Key, Object, controller_of
from ddp_operator.api.kubeobjects import find_trainer

WHOLE_KINDS: Final = (constants.KIND, "Job", "Pod")
METADATA_KINDS: Final = ("Service", "ConfigMap")
CHILD_KINDS: Final = ("Job", "Pod", *METADATA_KINDS)
"""The kernel's. Features add kinds that all attempts of a job share."""

_METADATA: Final = (
    *("name", "namespace", "uid", "resourceVersion", "generation", "creationTimestamp"),
    *("deletionTimestamp", "deletionGracePeriodSeconds", "finalizers"),
)
_JOB_SPEC: Final = ("suspend", "completions", "parallelism")
_POD_SPEC: Final = ("nodeName", "schedulerName", "schedulingGroup")
_POD_TEMPLATE: Final = ("priorityClassName", "schedulingGroup")
_DOMAINS: Final = (f".{constants.GROUP}", f".{constants.KUEUE_DOMAIN}")
_OTHER_KEYS: Final = (constants.LABEL_MANAGED_BY, constants.ANNOTATION_COMPLETION_INDEX)
_MAX_OWNERS: Final = 16
_MAX_CONFIG: Final = 32768
"""Maximum characters of the launcher's configuration in the Job's template."""
_MAX_NAME: Final = 253
_MAX_ITEMS: Final = 64
_MAX_AVOIDED: Final = 16
"""Maximum items of a list or a map."""


def has_metadata_only(kind: str) -> bool:
    """Return whether only the metadata of a watched kind are read, because a ConfigMap contains the launcher."""
    return kind not in WHOLE_KINDS


def key_of(kind: str, meta: Mapping[str, Any]) -> Key | None:
    """Return the resource that an object belongs to, by its label and its controller; None if it is not a child.

    A ConfigMap that all resources of the namespace share has a key without a name.
    """
    namespace = str(meta.get("namespace", ""))
    if kind == constants.KIND:
        return Key(namespace, str(meta["name"]))
    name = (meta.get("labels") or {}).get(constants.LABEL_JOB_NAME)
    if kind == "ConfigMap" and name is not None:
        return Key(namespace, str(name))
    return Key(namespace, str(name)) if name and _is_controlled(kind, meta, str(name)) else None


def trim_object(kind: str, obj: Object) -> Object:
    """Return the object with the fields that the operator reads."""
    if kind == constants.KIND:
        return {**obj, "metadata": trim_metadata(kind, obj["metadata"])}
    meta = trim_metadata(kind, obj["metadata"])
    if has_metadata_only(kind):
        # Lists deliver metadata only, because a ConfigMap contains the launcher.
        return {"apiVersion": "v1", "kind": kind, "metadata": meta}
    spec = obj.get("spec") or {}
    trimmed = {"apiVersion": obj.get("apiVersion"), "kind": kind, "metadata": meta}
    trimmed["spec"] = _trim_job_spec(spec) if kind == "Job" else _trim_pod_spec(spec)
    # Only components of the cluster may write the status, so it is not trimmed.
    return trimmed if "status" not in obj else trimmed | {"status": obj["status"]}


def trim_metadata(kind: str, meta: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metadata of a resource or a child with the fields that the operator reads."""
    trimmed = _choose(meta, _METADATA)
    if trimmed.get("finalizers"):
        trimmed["finalizers"] = trimmed["finalizers"][:_MAX_ITEMS]
    for part in ("labels", "annotations"):
        if meta.get(part):
            trimmed[part] = _choose_keys(meta[part])
    if kind == constants.KIND and meta.get("labels"):  # children may get them
        trimmed["labels"] = trimmed["labels"] | dict(islice(meta["labels"].items(), _MAX_ITEMS))
    owners = meta.get("ownerReferences")
    if owners:
        trimmed["ownerReferences"] = _trim_owners(kind, owners)
    return trimmed


def _is_controlled(kind: str, meta: Mapping[str, Any], name: str) -> bool:
    """Return whether an object's controller is the resource, or for a pod one of its Jobs."""
    controller = controller_of({"metadata": meta})
    owner = str(controller.get("name"))
    if kind == "Pod":
        prefix, _, rest = owner.rpartition("-")  # of an attempt, or of a feature
        return controller.get("kind") == "Job" and prefix == name and rest.isalnum()
    group = str(controller.get("apiVersion")).partition("/")[0]
    return (group, controller.get("kind"), owner) == (constants.GROUP, constants.KIND, name)


def _trim_owners(kind: str, owners: list[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    if kind == "ConfigMap":
        owners = [{"uid": owner["uid"], "controller": owner.get("controller", False)} for owner in owners]
    return sorted(owners, key=lambda owner: not owner.get("controller"))[:_MAX_OWNERS]


def _trim_job_spec(spec: Mapping[str, Any]) -> dict[str, Any]:
    template = spec.get("template") or {}
    pod = template.get("spec") or {}
    trimmed_pod = _choose(pod, _POD_TEMPLATE) | _trim_gates(pod)
    launcher = [volume for volume in pod.get("volumes") or () if volume.get("name") == constants.LAUNCHER_VOLUME]
    if launcher:
        source = launcher[0].get("configMap") or {}
        trimmed_pod["volumes"] = [{"name": constants.LAUNCHER_VOLUME, "configMap": {"name": source.get("name")}}]
    if pod.get("containers"):
        trainer = find_trainer(template)
        env = trainer.get("env") or ()
        trimmed_pod["containers"] = [{"name": trainer.get("name"), "env": _find_config(env) + _find_secret(env)}]
    labels = _choose_keys((template.get("metadata") or {}).get("labels") or {})
    return _choose(spec, _JOB_SPEC) | {"template": {"metadata": {"labels": labels}, "spec": trimmed_pod}}


def _trim_pod_spec(spec: Mapping[str, Any]) -> dict[str, Any]:
    trimmed = _choose(spec, _POD_SPEC) | _trim_gates(spec)
    if spec.get("containers"):
        trimmed["containers"] = [{"name": find_trainer({"spec": spec}).get("name")}]
    containers = spec.get("initContainers") or ()
    sidecars = [_choose(item, ("name", "restartPolicy")) for item in containers if item.get("restartPolicy")]
    if sidecars:
        trimmed["initContainers"] = sidecars[:_MAX_ITEMS]
    affinity = (spec.get("affinity") or {}).get("nodeAffinity") or {}
    required = affinity.get("requiredDuringSchedulingIgnoredDuringExecution") or {}
    fields = [field for term in required.get("nodeSelectorTerms") or () for field in term.get("matchFields") or ()]
    avoided = [field for field in fields if (field.get("key"), field.get("operator")) == ("metadata.name", "NotIn")]
    if avoided:
        # The API server accepts one value, the name of a node.
        kept = [
            _choose(field, ("key", "operator")) | {"values": [str(name)[:_MAX_NAME] for name in field["values"][:1]]}
            for field in avoided[:_MAX_AVOIDED]
        ]
        terms = {"nodeSelectorTerms": [{"matchFields": kept}]}
        trimmed["affinity"] = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}}
    return trimmed


def _trim_gates(pod: Mapping[str, Any]) -> dict[str, Any]:
    gates = pod.get("schedulingGates")
    return {"schedulingGates": gates[:_MAX_ITEMS]} if gates else {}


def _find_config(env: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the variable with the launcher's configuration."""
    return [
        {"name": variable["name"], "value": variable["value"]}
        for variable in env
        if variable.get("name") == constants.ENV_LAUNCHER_CONFIG and len(variable.get("value") or "") <= _MAX_CONFIG
    ][:1]


def _find_secret(env: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the variable with the name of the rendezvous Secret."""
    names = [
        str(variable["valueFrom"]["secretKeyRef"]["name"])[:_MAX_NAME]
        for variable in env
        if variable.get("name") == constants.ENV_RENDEZVOUS_SECRET
    ][:1]
    return [{"name": constants.ENV_RENDEZVOUS_SECRET, "valueFrom": {"secretKeyRef": {"name": name}}} for name in names]


def _choose(item: Mapping[str, Any], members: Iterable[str]) -> dict[str, Any]:
    return {name: item[name] for name in members if name in item}


def _choose_keys(texts: Mapping[str, str]) -> dict[str, str]:
    """Return the labels or annotations in the domains of the operator and Kueue."""
    chosen = {}
    for key, text in texts.items():
        domain = f".{key.partition('/')[0]}"
        known = key in _OTHER_KEYS or domain.endswith(_DOMAINS)
        if known and len(text) <= constants.MAX_ANNOTATION:
            chosen[key] = text
        if len(chosen) == _MAX_ITEMS:
            break
    return chosen

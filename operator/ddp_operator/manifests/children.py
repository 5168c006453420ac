"""Build the objects of an attempt: headless Service, Secret, Indexed Job, and the launcher's ConfigMap for all jobs.

The operator creates them by POST and never overwrites existing objects. Later it patches only the Job: suspend (with an
annotation of the written value), parallelism and completions. Kubernetes deletes the objects with the resource by their
owner references, also while the operator is down. The launcher belongs to no job: see ``build_launcher_config_map``.
"""

import base64
import copy
import hashlib
import io
import json
import re
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from importlib import resources
from importlib.resources.abc import Traversable
from typing import Any, Final

import msgspec

from ddp_operator.api import child_names, constants
from ddp_operator.api.job import DDPTrainingJob, inherited_labels, kueue_metadata, owner_reference
from ddp_operator.api.kubeobjects import find_requests
from ddp_operator.api.parts import ChildBody, call_owner
from ddp_operator.manifests.pod import avoid_nodes, build_pod_template, readmit_nodes
from ddp_operator.manifests.template import ResolvedTemplate, resolve_template

_DOCSTRING: Final = re.compile(r'^( *)"""(?:[^"\\]|\\.|"(?!""))*"""$', re.MULTILINE | re.DOTALL)
# The paths of ddp_sdk's names before version 0.2. Without its ``__init__.py`` the package is complete in no image.
_FORMER_PATHS: Final = ("exporter.py", "memory.py")
LABEL_JOB_NAME: Final = "batch.kubernetes.io/job-name"
LABEL_CONTROLLER_UID: Final = "batch.kubernetes.io/controller-uid"
LABEL_COMPLETION_INDEX: Final = constants.ANNOTATION_COMPLETION_INDEX
# The operator decides about restarts, so the Job controller's limit must never apply.
_UNLIMITED_BACKOFF = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Launcher:
    """The launcher as pods mount it: the text of the file that a pod starts, and the archive of the packages.

    ``digest``: the SHA-256 of names and sources in hex. The archive's bytes also depend on the version of zlib.
    """

    bootstrap: str
    archive: bytes
    digest: str


def load_launcher_of(job: DDPTrainingJob) -> Launcher:
    """Return this version's launcher for the pods of a job."""
    features = set()
    if job.holds_pods:
        features.add("dev")
    if job.spec.checkpoint is not None and job.spec.checkpoint.url:
        features.add("mirror")
    if _records_steps(job):
        features.add("check")
    return load_launcher(frozenset(features))


def _records_steps(job: DDPTrainingJob) -> bool:
    """Return whether the template has the variable of `ddp check`, as that of its local runs has."""
    for container in _list_objects(job.spec.template.spec, "containers"):
        names = [variable.get("name") for variable in _list_objects(container, "env")]
        if constants.CHECK_VARIABLE in names:
            return True
    return False


def _list_objects(owner: Any, member: str) -> list[Mapping[str, Any]]:
    """Return a list's objects; empty if it has another type. The template may not have been checked yet."""
    items = owner.get(member) if isinstance(owner, Mapping) else None
    return [item for item in items if isinstance(item, Mapping)] if isinstance(items, list) else []


@cache
def load_launcher(features: frozenset[str] = frozenset()) -> Launcher:
    """Return this version's launcher. ``features``: those of OPTIONAL_FEATURES that it has."""
    excluded = tuple(f"features/{name}/" for name in constants.OPTIONAL_FEATURES if name not in features)
    modules = _read_modules(resources.files("ddp_pod"))
    own = {path: source for path, source in modules.items() if not path.startswith(excluded)}
    own = {path: source if path == "bootstrap.py" else blank_docstrings(source) for path, source in own.items()}
    sources = {**own, **_read_delivered_modules()}
    bootstrap = sources.pop("bootstrap.py")
    names = sorted(sources)
    hashed = json.dumps([bootstrap, *((name, sources[name]) for name in names)])
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as file:
        for name in names:
            # ZipInfo has a constant date by default.
            file.writestr(zipfile.ZipInfo(name), sources[name], zipfile.ZIP_DEFLATED)
    return Launcher(bootstrap, archive.getvalue(), hashlib.sha256(hashed.encode()).hexdigest())


def blank_docstrings(source: str) -> str:
    """Return a module of the launcher with blank docstrings: a fifth of the archive. All lines keep their numbers.

    They are not empty, or each dataclass would compute one.
    """
    return _DOCSTRING.sub(lambda match: f'{match[1]}" "' + "\n" * match[0].count("\n"), source)


def _read_modules(folder: Traversable, path: str = "") -> dict[str, str]:
    """Return the sources of the modules in and below a folder by their paths, which ``path`` precedes."""
    sources: dict[str, str] = {}
    for entry in folder.iterdir():
        if entry.is_dir():
            sources |= _read_modules(entry, f"{path}{entry.name}/")
        elif entry.name.endswith(".py"):
            sources[path + entry.name] = entry.read_text(encoding="utf-8")
    return sources


def _read_delivered_modules() -> dict[str, str]:
    """Return the modules that users' scripts import in images without them."""
    former = resources.files("ddp_trainer")
    return _read_modules(resources.files("ddp_sdk"), "ddp_sdk/") | {
        f"ddp_trainer/{name}": (former / name).read_text(encoding="utf-8") for name in _FORMER_PATHS
    }


def build_children(job: DDPTrainingJob, *, attempt: int, nodes: int) -> list[dict[str, Any]]:
    """Return the objects of an attempt in the order of their creation. Attempt 0 prepares the job.

    Raises: InvalidManifest for an invalid pod template.
    """
    template = resolve_template(job)
    launcher = load_launcher_of(job)
    config_map = build_launcher_config_map(job, launcher)
    if attempt == 0:
        return [config_map, build_preparing_job(job, template, launcher)]
    children = [build_rendezvous_secret(job), build_service(job), config_map]
    children += build_feature_children(job, attempt=attempt, nodes=nodes)
    return [*children, build_job(job, template, launcher, attempt=attempt, nodes=nodes)]


def build_feature_children(job: DDPTrainingJob, *, attempt: int, nodes: int) -> list[dict[str, Any]]:
    """Return what features add to the children of an attempt. Raises: InvalidManifest."""
    children = []
    for part, child in job.schema.list_children(job):
        body = call_owner(part, job, partial(child.build, job, nodes), ChildBody)
        if child.is_shared:
            metadata = build_metadata(job, child_names.service_name(job.name))
        else:
            metadata = build_metadata(job, child_names.job_name(job.name, attempt), attempt=attempt)
        spec = call_owner(part, job, partial(_copy, body.spec), dict)
        children.append({"apiVersion": body.api_version, "kind": child.kind, "metadata": metadata, "spec": spec})
    return children


def _copy(value: Any) -> Any:
    """Return a copy as an API server reads it. No part of it is another part, which YAML would write as a reference."""
    return msgspec.json.decode(msgspec.json.encode(value))


def build_service(job: DDPTrainingJob) -> dict[str, Any]:
    """Return the headless Service, which publishes the pods' DNS names before they are ready."""
    spec = job.spec
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": build_metadata(job, child_names.service_name(job.name)),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": child_names.child_labels(job.name),
            "ports": [
                {"name": "rendezvous", "port": spec.rendezvous.port, "targetPort": spec.rendezvous.port},
                {"name": "metrics", "port": spec.metrics.port, "targetPort": spec.metrics.port},
            ],
        },
    }


def build_rendezvous_secret(job: DDPTrainingJob) -> dict[str, Any]:
    """Return the Secret with which the pods sign what they exchange in the rendezvous store.

    The attempts that one process starts share it. The executor adds a random value, which the operator cannot read
    afterwards.
    """
    metadata = build_metadata(job, child_names.rendezvous_secret_name(job.name, job.uid, job.nonce))
    return {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "immutable": True}


def build_launcher_config_map(job: DDPTrainingJob, launcher: Launcher) -> dict[str, Any]:
    """Return the immutable ConfigMap with the launcher, one for each namespace, version and choice of features.

    Its name has the hash, so an upgrade creates a new one. It stays when the last job is deleted, as kube-root-ca.crt
    does. The executor adds the custom resource's definition as its owner. It has no labels of the job: other jobs use
    it too, and `kubectl delete configmap -l experiment=a` would delete it.
    """
    metadata = {
        "name": child_names.launcher_config_map_name(launcher.digest),
        "namespace": job.namespace,
        "labels": child_names.child_labels(""),
    }
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata,
        "immutable": True,
        "data": {constants.LAUNCHER_FILE: launcher.bootstrap},
        "binaryData": {constants.LAUNCHER_ARCHIVE: _encode(launcher.archive)},
    }


@cache
def _encode(archive: bytes) -> str:
    return base64.b64encode(archive).decode()


def build_job(
    job: DDPTrainingJob, template: ResolvedTemplate, launcher: Launcher, *, attempt: int, nodes: int
) -> dict[str, Any]:
    """Return the Indexed Job of an attempt with ``nodes`` pods and the spares."""
    pods = job.size_with(nodes).pods
    is_rank_zero_policy = job.spec.success_policy == "RankZero"
    kueue = kueue_metadata(job)  # Kueue queues the child Job, so it reads its labels and annotations there
    metadata = build_metadata(job, child_names.job_name(job.name, attempt), attempt=attempt, extra=kueue["labels"])
    metadata["annotations"] = kueue["annotations"] | _build_job_annotations(job)
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": metadata,
        "spec": {
            "completions": pods,
            "parallelism": pods,
            "completionMode": "Indexed",
            "backoffLimit": _UNLIMITED_BACKOFF,
            "podReplacementPolicy": "Failed",
            # A suspended job has no Job until it is resumed, because a queue could admit it meanwhile.
            "suspend": False,
            "podFailurePolicy": {
                "rules": [
                    {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                    {
                        "action": "FailJob",
                        "onExitCodes": {
                            "containerName": template.trainer["name"],
                            "operator": "NotIn",
                            "values": list(constants.REPLACED_EXIT_CODES),
                        },
                    },
                ]
            },
            **({"successPolicy": {"rules": [{"succeededIndexes": "0"}]}} if is_rank_zero_policy else {}),
            "template": build_pod_template(job, template, launcher.digest, attempt=attempt, nodes=nodes),
        },
    }


def build_pod(
    job: Mapping[str, Any], index: int, *, suffix: str, avoided: Sequence[str] = (), returned: Sequence[str] = ()
) -> dict[str, Any]:
    """Return the pod of a completion index, equal to that of the Job controller. ``suffix``: the end of its name.

    ``avoided``: nodes that were lost since the Job was created; ``returned``: nodes that the Job avoids, because they
    had been lost before, and that the pod may use again.
    """
    name = job["metadata"]["name"]
    uid = job["metadata"]["uid"]
    template = copy.deepcopy(dict(job["spec"]["template"]))
    metadata = dict(template.get("metadata") or {})
    labels = {**metadata.get("labels", {}), LABEL_JOB_NAME: name, "job-name": name}
    labels |= {LABEL_CONTROLLER_UID: uid, "controller-uid": uid, LABEL_COMPLETION_INDEX: str(index)}
    spec: dict[str, Any] = template["spec"]
    spec.setdefault("hostname", f"{name}-{index}")
    if returned:
        readmit_nodes(spec, returned)
    if avoided:
        avoid_nodes(spec, avoided)
    source = {"fieldRef": {"apiVersion": "v1", "fieldPath": f"metadata.labels['{LABEL_COMPLETION_INDEX}']"}}
    for container in (*(spec.get("initContainers") or ()), *spec["containers"]):
        env = container.setdefault("env", [])
        if all(variable["name"] != constants.ENV_COMPLETION_INDEX for variable in env):
            env.append({"name": constants.ENV_COMPLETION_INDEX, "valueFrom": source})
    owner = {"apiVersion": "batch/v1", "kind": "Job", "name": name, "uid": uid}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            **metadata,
            "generateName": f"{name}-{index}-",
            "name": f"{name}-{index}-{suffix}",
            "namespace": job["metadata"]["namespace"],
            "labels": labels,
            "annotations": {**metadata.get("annotations", {}), constants.ANNOTATION_COMPLETION_INDEX: str(index)},
            "finalizers": [constants.JOB_TRACKING_FINALIZER],
            "ownerReferences": [{**owner, "controller": True, "blockOwnerDeletion": True}],
        },
        "spec": spec,
        "status": {"phase": "Pending"},
    }


def build_trial_pod(job: Mapping[str, Any]) -> dict[str, Any]:
    """Return a pod of a Job that may not exist yet, for a dry run."""
    template = job["spec"]["template"]
    place = {"name": f"{job['metadata']['name']}-0", "namespace": job["metadata"]["namespace"]}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": template["metadata"] | place, "spec": template["spec"]}


def build_preparing_job(job: DDPTrainingJob, template: ResolvedTemplate, launcher: Launcher) -> dict[str, Any]:
    """Return the Job without ranks that runs before attempt 1. Raises: InvalidManifest."""
    part = job.schema.find_preparing(job.spec)
    assert part is not None
    assert part.prepare is not None
    spec = call_owner(part, job, partial(part.prepare, job, template, launcher.digest), dict)
    metadata = build_metadata(job, child_names.job_name(job.name, 0), attempt=0)
    metadata["annotations"] = _build_job_annotations(job)
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": metadata,
        "spec": spec,
    }


def _build_job_annotations(job: DDPTrainingJob) -> dict[str, str]:
    return {constants.ANNOTATION_SUSPEND: "false", constants.ANNOTATION_SPEC: job.spec_digest}


def build_metadata(
    job: DDPTrainingJob, name: str, *, attempt: int | None = None, extra: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Return the metadata of a child. ``extra``: labels of it alone; a Job without ranks is one of attempt 0."""
    return {
        "name": name,
        "namespace": job.namespace,
        "labels": inherited_labels(job) | dict(extra or {}) | child_names.child_labels(job.name, attempt),
        "ownerReferences": [owner_reference(job)],
    }


_LIMITED: Final = ("cpu", "memory", "ephemeral-storage")


def raise_requests(small: Mapping[str, Any], pod: Mapping[str, Any], trainer: Mapping[str, Any]) -> dict[str, Any]:
    """Return the spec of a small pod with the requests of the training container, which a LimitRange may demand."""
    raised = copy.deepcopy(dict(small))
    [container] = raised["containers"]
    container["resources"]["requests"] = omit_devices(find_requests(pod, trainer))
    return raised


def omit_devices(amounts: Mapping[str, Any]) -> dict[str, Any]:
    """Return requests or limits without those of devices."""
    return {name: value for name, value in amounts.items() if name in _LIMITED}

"""A Kubeflow PyTorchJob (kubeflow.org/v1) as a DDPTrainingJob. Pure.

Everything of the old resource ends in the new one, or in a note that names it: what was changed on the way, what has no
equivalent and what to do instead.
"""

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, Final

import yaml

from ddp_operator import constants
from ddp_operator.api.errors import FieldError, InvalidManifest
from ddp_operator.manifests.torchrun import OWNED_FLAGS, OWNED_SWITCHES
from ddp_operator.names import is_reserved_variable

Object = dict[str, Any]

_KIND: Final = "PyTorchJob"
_CONTAINER: Final = "pytorch"  # the name that the Training Operator asks for
_PORT: Final = "pytorchjob-port"
_QUEUE_LABEL: Final = "kueue.x-k8s.io/queue-name"
_ENTRYPOINT: Final = "write what the image's entrypoint runs, such as [python, train.py]: it cannot be known here"
_LAUNCHERS: Final = (["-m", "torch.distributed.run"], ["-m", "torch.distributed.launch"])
_SHELLS: Final = ("sh", "bash")
_SHELL_SYNTAX: Final = re.compile(r"[;&|<>`(){}*?\n]")
# restartPolicy ExitCode: 1 to 127 are permanent. The ones that scripts and shells really end with.
_PERMANENT_CODES: Final = [1, 2, 126, 127]
_CARRIED: Final = ("ttlSecondsAfterFinished", "activeDeadlineSeconds", "suspend", "cleanPodPolicy")


@dataclass(slots=True)
class Conversion:
    """The new resource, and what a reader should know of it."""

    resource: Object
    notes: list[str] = field(default_factory=list)

    def note(self, path: str, words: str) -> None:
        """Add a note about a field of the old resource."""
        self.notes.append(f"{path}: {words}")

    def write(self) -> str:
        """Return the YAML, with the notes as comments before it."""
        lines = [f"# Converted from a {_KIND} by `ddp convert`."]
        if self.notes:
            lines += ["# What is different from it, and what has no equivalent:"]
            lines += [f"#   {note}" for note in self.notes]
        body = yaml.safe_dump(self.resource, sort_keys=False, width=120, allow_unicode=True)
        return "\n".join(lines) + "\n" + body


def convert(document: Mapping[str, Any]) -> Conversion:
    """Return a PyTorchJob as a DDPTrainingJob with notes. Raises: InvalidManifest."""
    if document.get("kind") != _KIND or not str(document.get("apiVersion", "")).startswith("kubeflow.org/"):
        found = f"{document.get('apiVersion')} {document.get('kind')}"
        raise InvalidManifest([FieldError("kind", f"must be a kubeflow.org/v1 {_KIND}; found {found}")])
    try:
        return _convert(deepcopy(dict(document)))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        if isinstance(error, InvalidManifest):
            raise
        words = f"is not shaped as a {_KIND} is ({error}); does its own operator take it?"
        raise InvalidManifest([FieldError("spec", words)]) from None


def _convert(document: Object) -> Conversion:
    spec = document.get("spec") or {}
    replicas = spec.get("pytorchReplicaSpecs") or {}
    if not set(replicas) & {"Master", "Worker"}:
        raise InvalidManifest([FieldError("spec.pytorchReplicaSpecs", "must have a Master or a Worker; add it")])
    done = Conversion({"apiVersion": constants.API_VERSION, "kind": constants.KIND, "metadata": {}, "spec": {}})
    done.resource["metadata"] = _metadata(document.get("metadata") or {})
    new = done.resource["spec"]
    new["nodes"] = sum(int(replica.get("replicas", 1)) for replica in replicas.values())
    processes = spec.get("nprocPerNode", (spec.get("elasticPolicy") or {}).get("nProcPerNode"))
    if processes is not None:
        new["procPerNode"] = int(processes) if str(processes).isdigit() else processes
    for name in sorted(set(spec) - {"pytorchReplicaSpecs", "nprocPerNode", "runPolicy", "elasticPolicy"}):
        done.note(f"spec.{name}", "has no equivalent")
    _take_restart_policies(done, replicas)
    _take_elastic_policy(done, spec.get("elasticPolicy") or {})
    new["template"] = _template(done, replicas)
    _take_run_policy(done, spec.get("runPolicy") or {})
    return done


def _metadata(old: Mapping[str, Any]) -> Object:
    annotations = dict(old.get("annotations") or {})
    annotations.pop("kubectl.kubernetes.io/last-applied-configuration", None)
    kept = {"name": old.get("name"), "namespace": old.get("namespace"), "labels": old.get("labels")}
    return {key: value for key, value in (kept | {"annotations": annotations}).items() if value}


def _take_restart_policies(done: Conversion, replicas: Mapping[str, Any]) -> None:
    policies = {str(replica.get("restartPolicy") or "OnFailure") for replica in replicas.values()}
    path = "spec.pytorchReplicaSpecs.*.restartPolicy"
    if policies == {"Never"}:
        done.resource["spec"]["recovery"] = {"maxRestarts": 0}
        done.note(path, "Never: the first failure ends the job; evicted pods are still replaced")
    elif "ExitCode" in policies:
        done.resource["spec"]["recovery"] = {"nonRetryableExitCodes": _PERMANENT_CODES}
        words = f"of the codes 1 to 127 only {_PERMANENT_CODES} end the job; add others that the script has"
        done.note(path, f"ExitCode: {words}")
    elif "Always" in policies:
        done.note(path, "Always: a pod that ends well is not started again")
    if len(policies) > 1:
        done.note(path, f"differ ({', '.join(sorted(policies))}); there is one policy for all ranks")


def _take_elastic_policy(done: Conversion, elastic: Mapping[str, Any]) -> None:
    new, at = done.resource["spec"], "spec.elasticPolicy"
    if "minReplicas" in elastic or "maxReplicas" in elastic:
        least = elastic.get("minReplicas", 1)
        new["elastic"] = {"minNodes": least, "maxNodes": elastic.get("maxReplicas", max(least, new["nodes"]))}
    if "maxRestarts" in elastic:
        new.setdefault("recovery", {}).setdefault("inPlaceRestarts", elastic["maxRestarts"])
    backend, port = elastic.get("rdzvBackend"), elastic.get("rdzvPort")
    rendezvous: Object = {}
    if backend == "c10d" or (backend == "static" and "elastic" not in new):
        rendezvous["backend"] = backend
    elif backend:
        words = "c10d is used, whose store pod 0 has; no server of its own is needed"
        done.note(f"{at}.rdzvBackend", f"{backend}: {words}")
    if isinstance(port, int) and port >= 1024:
        rendezvous["port"] = port
    for pair in elastic.get("rdzvConf") or ():
        if pair.get("key") == "join_timeout" and str(pair.get("value")).isdigit():
            rendezvous["joinTimeoutSeconds"] = max(10, int(pair["value"]))
        else:
            done.note(f"{at}.rdzvConf", f"{pair.get('key')}={pair.get('value')} is left out: the operator sets these")
    if rendezvous:
        new["rendezvous"] = rendezvous
    for name in ("rdzvHost", "rdzvId", "standalone"):
        if elastic.get(name):
            done.note(f"{at}.{name}", "is left out: the operator finds pod 0 and names each attempt itself")
    if elastic.get("metrics"):
        done.note(f"{at}.metrics", "make a HorizontalPodAutoscaler for the job: it has the scale subresource")


def _take_run_policy(done: Conversion, policy: Mapping[str, Any]) -> None:
    new, at = done.resource["spec"], "spec.runPolicy"
    new.update({name: policy[name] for name in _CARRIED if name in policy})
    if "backoffLimit" in policy:
        new.setdefault("recovery", {}).setdefault("maxRestarts", policy["backoffLimit"])
        done.note(f"{at}.backoffLimit", "counts restarts of the whole group now; those of workers are inPlaceRestarts")
    if policy.get("managedBy"):
        done.note(f"{at}.managedBy", "has no equivalent")
    scheduling = policy.get("schedulingPolicy") or {}
    if scheduling.get("priorityClass"):
        new["template"]["spec"].setdefault("priorityClassName", scheduling["priorityClass"])
    if scheduling.get("queue"):
        labels = done.resource["metadata"].setdefault("labels", {})
        labels.setdefault(_QUEUE_LABEL, scheduling["queue"])
        words = f"is the label {_QUEUE_LABEL} now, for Kueue; for Volcano write scheduling (gang, queue) instead"
        done.note(f"{at}.schedulingPolicy.queue", words)
    for name in ("minAvailable", "minResources", "scheduleTimeoutSeconds"):
        if name in scheduling:
            words = "has no equivalent: Kueue, or scheduling.gang, admits all pods or none"
            done.note(f"{at}.schedulingPolicy.{name}", words)


def _template(done: Conversion, replicas: Mapping[str, Any]) -> Object:
    """Return the one pod template that all nodes get: the workers', where there are any."""
    given = {role: (replicas[role].get("template") or {}) for role in ("Worker", "Master") if role in replicas}
    role, template = next(iter(given.items()))
    if len(given) == 2:
        for path in _differences(given["Master"], given["Worker"], "template"):
            done.note(f"spec.pytorchReplicaSpecs.Master.{path}", "differs from the workers'; all pods get the workers'")
    if not isinstance(template.get("spec"), dict) or not template["spec"].get("containers"):
        path = f"spec.pytorchReplicaSpecs.{role}.template.spec.containers"
        raise InvalidManifest([FieldError(path, "Required value: add a container")])
    pod = template["spec"]
    if pod.pop("restartPolicy", None) not in (None, "Never"):
        done.note("template.spec.restartPolicy", "is left out: the operator sets it")
    containers = pod["containers"]
    trainer = next((c for c in containers if c.get("name") == _CONTAINER), containers[0])
    trainer["name"] = constants.TRAINER_CONTAINER
    for other in [c for c in containers if c is not trainer]:
        containers.remove(other)
        pod.setdefault("initContainers", []).append(other | {"restartPolicy": "Always"})
        words = "is a native sidecar now, so that it does not keep the job from ending"
        done.note(f"container {other.get('name')}", words)
    _clean_container(done, trainer)
    _take_shared_memory(done, pod, trainer)
    if any("persistentVolumeClaim" in volume for volume in pod.get("volumes") or ()):
        done.note("template.spec.volumes", "if a claim holds checkpoints, say so in spec.checkpoint (path, claimName)")
    return template


def _clean_container(done: Conversion, container: Object) -> None:
    """Drop what the operator sets itself, and bring the command into a form that it takes."""
    dropped = [entry["name"] for entry in container.get("env") or () if is_reserved_variable(entry["name"])]
    if dropped:
        container["env"] = [entry for entry in container["env"] if entry["name"] not in dropped]
        done.note("env", f"{', '.join(dropped)}: left out, torchrun and the operator set them")
    ports = [port for port in container.get("ports") or () if port.get("name") != _PORT]
    for key, kept in (("env", container.get("env")), ("ports", ports)):
        if key in container and not kept:
            del container[key]
        elif key in container:
            container[key] = kept
    line = [*(container.get("command") or ()), *(container.get("args") or ())]
    if not line:
        return done.note("command", _ENTRYPOINT)
    if line[0].startswith("-") and not line[0].startswith("-m"):
        done.note("command", f"{_ENTRYPOINT}; the args are only its arguments")
    bare = _unwrap_shell(line)
    if bare is None:
        words = "a shell starts the training: if that runs torchrun, write the script itself as the command"
        return done.note("command", words)
    stripped = _strip_torchrun(done, bare)
    if stripped != line:
        container["command"] = stripped
        container.pop("args", None)
    elif "procPerNode" not in done.resource["spec"] and not _launcher_length(bare):
        done.resource["spec"]["procPerNode"] = 1
        done.note("command", "is no torchrun: one process a pod; procPerNode: gpu starts one for each GPU of a pod")


def _unwrap_shell(line: Sequence[str]) -> list[str] | None:
    """Return the words of ``sh -c 'one simple command'``; another line as it is; None for a script."""
    if line[0].rpartition("/")[2] not in _SHELLS:
        return list(line)
    if len(line) != 3 or not re.fullmatch(r"-[a-z]*c", line[1]):
        return None
    text = line[2].replace("\\\n", " ").strip().removeprefix("exec ")
    if _SHELL_SYNTAX.search(re.sub(r"\$\{\w+\}", "", text)):
        return None
    try:
        words = shlex.split(text)
    except ValueError:
        return None
    probe = Conversion({"spec": {}})
    return None if any("$" in word for word in _strip_torchrun(probe, words)) else words


def _launcher_length(line: Sequence[str]) -> int:
    """Return how many words of a command line are torchrun, 0 where it is none."""
    if line[0].rpartition("/")[2] == "torchrun":
        return 1
    return 3 if re.fullmatch(r"(.*/)?python[\d.]*", line[0]) and list(line[1:3]) in _LAUNCHERS else 0


def _strip_torchrun(done: Conversion, line: Sequence[str]) -> list[str]:
    """Return torchrun's command line without the flags that the operator owns."""
    start = _launcher_length(line)
    if not start:
        return list(line)
    kept, dropped, rest = list(line[:start]), [], list(line[start:])
    while rest and rest[0].startswith("-") and rest[0] != "--":
        word = rest.pop(0)
        name, equals, value = word.lstrip("-").replace("_", "-").partition("=")
        if word.startswith("--") and name in OWNED_FLAGS:
            if not equals and name not in OWNED_SWITCHES and rest:
                value = rest.pop(0)
            dropped.append(f"--{name}")
            _take_flag(done, name, value)
        else:
            kept.append(word)
    if dropped:
        done.note("command", f"{', '.join(dropped)}: left out, the operator sets them")
    return rest if "--no-python" in dropped else [*kept, *rest]


def _take_flag(done: Conversion, name: str, value: str) -> None:
    """Keep what a flag says that the manifest does not."""
    if name == "nproc-per-node" and (value.isdigit() or value in ("gpu", "cpu", "auto")):
        done.resource["spec"].setdefault("procPerNode", int(value) if value.isdigit() else value)
    elif name == "max-restarts" and value.isdigit():
        done.resource["spec"].setdefault("recovery", {}).setdefault("inPlaceRestarts", int(value))


def _take_shared_memory(done: Conversion, pod: Object, container: Object) -> None:
    """Turn a memory volume at /dev/shm into spec.shm: the operator mounts one itself."""
    mounts = container.get("volumeMounts") or []
    mount = next((entry for entry in mounts if entry.get("mountPath") == "/dev/shm"), None)
    if mount is None:
        return
    volume: Object = next((entry for entry in pod.get("volumes") or () if entry.get("name") == mount["name"]), {})
    if (volume.get("emptyDir") or {}).get("medium") != "Memory":
        return
    if volume["emptyDir"].get("sizeLimit"):
        done.resource["spec"]["shm"] = {"sizeLimit": str(volume["emptyDir"]["sizeLimit"])}
    pod["volumes"].remove(volume)
    mounts.remove(mount)
    for owner, key in ((pod, "volumes"), (container, "volumeMounts")):
        if not owner[key]:
            del owner[key]
    done.note("volume at /dev/shm", "is spec.shm now")


def _differences(one: Any, other: Any, path: str) -> Iterator[str]:
    """Yield the paths at which two values differ, as deep as both have the same shape."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        for key in sorted({*one, *other}):
            yield from _differences(one.get(key), other.get(key), f"{path}.{key}")
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for place, pair in enumerate(zip(one, other, strict=True)):
            yield from _differences(*pair, f"{path}[{place}]")
    elif one != other:
        yield path

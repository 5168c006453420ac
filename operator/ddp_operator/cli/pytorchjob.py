"""Convert a Kubeflow PyTorchJob (kubeflow.org/v1) to a DDPTrainingJob. Pure.

Every field of the old resource is in the new one, or a note names it: what changed, or what to do instead if the field
has no equivalent.
"""

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, Final

import yaml

from ddp_operator import constants
from ddp_operator.api.child_names import is_reserved_variable
from ddp_operator.api.errors import FieldError, InvalidManifest
from ddp_operator.manifests.torchrun import OWNED_FLAGS
from ddp_operator.manifests.typed_torchrun import count_launcher_arguments, split_flags

Object = dict[str, Any]

_KIND: Final = "PyTorchJob"
_CONTAINER: Final = "pytorch"  # the name that the Training Operator requires
_PORT: Final = "pytorchjob-port"
_QUEUE_LABEL: Final = "kueue.x-k8s.io/queue-name"
_ENTRYPOINT: Final = (
    "`ddp convert` cannot read the image's entrypoint; write the command that it runs: [python, train.py]"
)
_SHELLS: Final = ("sh", "bash")
_SHELL_SYNTAX: Final = re.compile(r"[;&|<>`(){}*?\n]")
# restartPolicy ExitCode: 1 to 127 are permanent. These are the codes that scripts and shells exit with.
_PERMANENT_CODES: Final = [1, 2, 126, 127]
_CARRIED: Final = ("ttlSecondsAfterFinished", "activeDeadlineSeconds", "suspend", "cleanPodPolicy")


@dataclass(slots=True)
class Conversion:
    """The new resource, and notes on its differences from the old one."""

    resource: Object
    notes: list[str] = field(default_factory=list)

    def note(self, path: str, text: str) -> None:
        """Add a note about a field of the old resource."""
        self.notes.append(f"{path}: {text}")

    def write(self) -> str:
        """Return the YAML, with the notes as comments before it."""
        lines = [f"# Converted from a {_KIND} by `ddp convert`."]
        if self.notes:
            lines += ["# Differences, and fields without an equivalent:"]
            lines += [f"#   {note}" for note in self.notes]
        body = yaml.safe_dump(self.resource, sort_keys=False, width=120, allow_unicode=True)
        return "\n".join(lines) + "\n" + body


def convert(document: Mapping[str, Any]) -> Conversion:
    """Return a PyTorchJob as a DDPTrainingJob with notes. Raises: InvalidManifest."""
    if document.get("kind") != _KIND or not str(document.get("apiVersion", "")).startswith("kubeflow.org/"):
        actual = f"{document.get('apiVersion')} {document.get('kind')}"
        raise InvalidManifest([FieldError("kind", f"must be a kubeflow.org/v1 {_KIND}; found {actual}")])
    try:
        return _convert(deepcopy(dict(document)))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        if isinstance(error, InvalidManifest):
            raise
        problem = f"does not have the structure of a {_KIND} ({error}); check that the Training Operator accepts it"
        raise InvalidManifest([FieldError("spec", problem)]) from None


def _convert(document: Object) -> Conversion:
    spec = document.get("spec") or {}
    replicas = spec.get("pytorchReplicaSpecs") or {}
    if not set(replicas) & {"Master", "Worker"}:
        raise InvalidManifest([FieldError("spec.pytorchReplicaSpecs", "must have a Master or a Worker; add it")])
    done = Conversion({"apiVersion": constants.API_VERSION, "kind": constants.KIND, "metadata": {}, "spec": {}})
    done.resource["metadata"] = _convert_metadata(document.get("metadata") or {})
    new = done.resource["spec"]
    new["nodes"] = sum(int(replica.get("replicas", 1)) for replica in replicas.values())
    processes = spec.get("nprocPerNode", (spec.get("elasticPolicy") or {}).get("nProcPerNode"))
    if processes is not None:
        new["procPerNode"] = int(processes) if str(processes).isdigit() else processes
    for name in sorted(set(spec) - {"pytorchReplicaSpecs", "nprocPerNode", "runPolicy", "elasticPolicy"}):
        done.note(f"spec.{name}", "has no equivalent")
    _convert_restart_policies(done, replicas)
    _convert_elastic_policy(done, spec.get("elasticPolicy") or {})
    new["template"] = _convert_template(done, replicas)
    _convert_run_policy(done, spec.get("runPolicy") or {})
    return done


def _convert_metadata(old: Mapping[str, Any]) -> Object:
    annotations = dict(old.get("annotations") or {})
    annotations.pop("kubectl.kubernetes.io/last-applied-configuration", None)
    kept = {"name": old.get("name"), "namespace": old.get("namespace"), "labels": old.get("labels")}
    return {key: value for key, value in (kept | {"annotations": annotations}).items() if value}


def _convert_restart_policies(done: Conversion, replicas: Mapping[str, Any]) -> None:
    policies = {str(replica.get("restartPolicy") or "OnFailure") for replica in replicas.values()}
    path = "spec.pytorchReplicaSpecs.*.restartPolicy"
    if policies == {"Never"}:
        done.resource["spec"]["recovery"] = {"maxRestarts": 0}
        done.note(path, "Never: the first failure ends the job; the operator still replaces evicted pods")
    elif "ExitCode" in policies:
        done.resource["spec"]["recovery"] = {"nonRetryableExitCodes": _PERMANENT_CODES}
        done.note(
            path, f"ExitCode: of the codes 1 to 127, only {_PERMANENT_CODES} end the job; add the script's others"
        )
    elif "Always" in policies:
        done.note(path, "Always: the operator does not restart a pod that succeeded")
    if len(policies) > 1:
        done.note(path, f"differ ({', '.join(sorted(policies))}); a DDPTrainingJob has one policy for all ranks")


def _convert_elastic_policy(done: Conversion, elastic: Mapping[str, Any]) -> None:
    new = done.resource["spec"]
    at = "spec.elasticPolicy"
    if "minReplicas" in elastic or "maxReplicas" in elastic:
        least = elastic.get("minReplicas", 1)
        new["elastic"] = {"minNodes": least, "maxNodes": elastic.get("maxReplicas", max(least, new["nodes"]))}
    if "maxRestarts" in elastic:
        new.setdefault("recovery", {}).setdefault("inPlaceRestarts", elastic["maxRestarts"])
    rendezvous = _convert_rendezvous(done, elastic)
    if rendezvous:
        new["rendezvous"] = rendezvous
    for name in ("rdzvHost", "rdzvId", "standalone"):
        if elastic.get(name):
            done.note(f"{at}.{name}", "left out: the operator sets pod 0's address and each attempt's id")
    if elastic.get("metrics"):
        done.note(f"{at}.metrics", "create a HorizontalPodAutoscaler for the job, which has the scale subresource")


def _convert_rendezvous(done: Conversion, elastic: Mapping[str, Any]) -> Object:
    """Return spec.rendezvous, empty for the operator's defaults."""
    at = "spec.elasticPolicy"
    backend = elastic.get("rdzvBackend")
    port = elastic.get("rdzvPort")
    rendezvous: Object = {}
    if backend == "c10d" or (backend == "static" and "elastic" not in done.resource["spec"]):
        rendezvous["backend"] = backend
    elif backend:
        done.note(f"{at}.rdzvBackend", f"{backend}: replaced by c10d, whose store runs in pod 0 and needs no server")
    if isinstance(port, int) and port >= 1024:
        rendezvous["port"] = port
    for pair in elastic.get("rdzvConf") or ():
        if pair.get("key") == "join_timeout" and str(pair.get("value")).isdigit():
            rendezvous["joinTimeoutSeconds"] = max(10, int(pair["value"]))
        else:
            done.note(f"{at}.rdzvConf", f"{pair.get('key')}={pair.get('value')}: left out, the operator sets it")
    return rendezvous


def _convert_run_policy(done: Conversion, policy: Mapping[str, Any]) -> None:
    new = done.resource["spec"]
    at = "spec.runPolicy"
    new.update({name: policy[name] for name in _CARRIED if name in policy})
    if "backoffLimit" in policy:
        new.setdefault("recovery", {}).setdefault("maxRestarts", policy["backoffLimit"])
        done.note(
            f"{at}.backoffLimit",
            "is spec.recovery.maxRestarts, which counts new attempts; inPlaceRestarts counts restarts of workers",
        )
    if policy.get("managedBy"):
        done.note(f"{at}.managedBy", "has no equivalent")
    scheduling = policy.get("schedulingPolicy") or {}
    if scheduling.get("priorityClass"):
        new["template"]["spec"].setdefault("priorityClassName", scheduling["priorityClass"])
    if scheduling.get("queue"):
        labels = done.resource["metadata"].setdefault("labels", {})
        labels.setdefault(_QUEUE_LABEL, scheduling["queue"])
        done.note(
            f"{at}.schedulingPolicy.queue",
            f"is the label {_QUEUE_LABEL} now, for Kueue; for Volcano, write scheduling (gang, queue) instead",
        )
    for name in ("minAvailable", "minResources", "scheduleTimeoutSeconds"):
        if name in scheduling:
            done.note(
                f"{at}.schedulingPolicy.{name}",
                "has no equivalent: Kueue, or scheduling.gang, admits all pods or none",
            )


def _convert_template(done: Conversion, replicas: Mapping[str, Any]) -> Object:
    """Return the pod template of all nodes: the workers', else the master's. Raises: InvalidManifest."""
    templates = {role: (replicas[role].get("template") or {}) for role in ("Worker", "Master") if role in replicas}
    role, template = next(iter(templates.items()))
    if len(templates) == 2:
        for path in _find_differences(templates["Master"], templates["Worker"], "template"):
            done.note(f"spec.pytorchReplicaSpecs.Master.{path}", "differs from the workers'; all pods get the workers'")
    if not isinstance(template.get("spec"), dict) or not template["spec"].get("containers"):
        path = f"spec.pytorchReplicaSpecs.{role}.template.spec.containers"
        raise InvalidManifest([FieldError(path, "Required value: add a container")])
    pod = template["spec"]
    if pod.pop("restartPolicy", None) not in (None, "Never"):
        done.note("template.spec.restartPolicy", "left out: the operator sets it")
    containers = pod["containers"]
    trainer = next((c for c in containers if c.get("name") == _CONTAINER), containers[0])
    trainer["name"] = constants.TRAINER_CONTAINER
    for sidecar in [container for container in containers if container is not trainer]:
        containers.remove(sidecar)
        pod.setdefault("initContainers", []).append(sidecar | {"restartPolicy": "Always"})
        done.note(f"container {sidecar.get('name')}", "is a native sidecar now, so that the job can end while it runs")
    _clean_container(done, trainer)
    _convert_shared_memory(done, pod, trainer)
    if any("persistentVolumeClaim" in volume for volume in pod.get("volumes") or ()):
        done.note("template.spec.volumes", "if a claim holds checkpoints, name it in spec.checkpoint (path, claimName)")
    return template


def _clean_container(done: Conversion, container: Object) -> None:
    """Remove what the operator sets, and write the command in a form that it accepts."""
    dropped = [entry["name"] for entry in container.get("env") or () if is_reserved_variable(entry["name"])]
    if dropped:
        container["env"] = [entry for entry in container["env"] if entry["name"] not in dropped]
        done.note("env", f"{', '.join(dropped)}: left out, torchrun and the operator set them")
    if "ports" in container:
        container["ports"] = [port for port in container["ports"] or () if port.get("name") != _PORT]
    for key in ("env", "ports"):
        if key in container and not container[key]:
            del container[key]
    _convert_command(done, container)


def _convert_command(done: Conversion, container: Object) -> None:
    line = [*(container.get("command") or ()), *(container.get("args") or ())]
    if not line:
        return done.note("command", _ENTRYPOINT)
    if line[0].startswith("-") and not line[0].startswith("-m"):
        done.note("command", f"{_ENTRYPOINT}; args holds only its arguments")
    bare = _unwrap_shell(line)
    if bare is None:
        return done.note(
            "command", "a shell starts the training; if it runs torchrun, write the script itself as the command"
        )
    stripped = _strip_torchrun(done, bare)
    if stripped != line:
        container["command"] = stripped
        container.pop("args", None)
    elif "procPerNode" not in done.resource["spec"] and not count_launcher_arguments(bare):
        done.resource["spec"]["procPerNode"] = 1
        done.note("command", "does not run torchrun: one process per pod; procPerNode: gpu starts one for each GPU")


def _unwrap_shell(line: Sequence[str]) -> list[str] | None:
    """Return the arguments of ``sh -c 'one simple command'``; None for a shell script; any other line unchanged."""
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


def _strip_torchrun(done: Conversion, line: Sequence[str]) -> list[str]:
    """Return torchrun's command line without the flags that the operator sets."""
    start = count_launcher_arguments(line)
    if not start:
        return list(line)
    flags, rest = split_flags(line[start:], until_script=True)
    owned = [flag for flag in flags if flag.name in OWNED_FLAGS]
    for flag in owned:
        _apply_flag(done, flag.name, flag.value)
    if owned:
        names = ", ".join(f"--{flag.name}" for flag in owned)
        done.note("command", f"{names}: left out, the operator sets them")
    if any(flag.name == "no-python" for flag in owned):
        return rest
    kept = [argument for flag in flags if flag not in owned for argument in flag.arguments]
    return [*line[:start], *kept, *rest]


def _apply_flag(done: Conversion, name: str, value: str) -> None:
    """Set the field that corresponds to a flag, unless the manifest sets it."""
    if name == "nproc-per-node" and (value.isdigit() or value in ("gpu", "cpu", "auto")):
        done.resource["spec"].setdefault("procPerNode", int(value) if value.isdigit() else value)
    elif name == "max-restarts" and value.isdigit():
        done.resource["spec"].setdefault("recovery", {}).setdefault("inPlaceRestarts", int(value))


def _convert_shared_memory(done: Conversion, pod: Object, container: Object) -> None:
    """Replace a memory volume at /dev/shm by spec.shm: the operator mounts that volume."""
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


def _find_differences(master: Any, worker: Any, path: str) -> Iterator[str]:
    """Yield the paths at which two values differ, as deep as their structure is the same."""
    if isinstance(master, Mapping) and isinstance(worker, Mapping):
        for key in sorted({*master, *worker}):
            yield from _find_differences(master.get(key), worker.get(key), f"{path}.{key}")
    elif isinstance(master, list) and isinstance(worker, list) and len(master) == len(worker):
        for index, pair in enumerate(zip(master, worker, strict=True)):
            yield from _find_differences(*pair, f"{path}[{index}]")
    elif master != worker:
        yield path

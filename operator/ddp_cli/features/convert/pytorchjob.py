"""Convert a Kubeflow PyTorchJob (kubeflow.org/v1) to a DDPTrainingJob. Pure.

Every field of the old resource is in the new one, or a note names it: what changed, or what to do instead if the field
has no equivalent.
"""

import json
import posixpath
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, Final

from ddp_cli.client.workdir import ENTRYPOINT, skips_entrypoint
from ddp_operator.api import constants, other_kinds
from ddp_operator.api.child_names import is_reserved_variable
from ddp_operator.api.errors import FieldError, InvalidManifest
from ddp_operator.api.yaml_writer import format_documents
from ddp_operator.manifests.torchrun import OWNED_FLAGS, is_interpreter
from ddp_operator.manifests.typed_torchrun import count_launcher_arguments, split_flags
from ddp_pod.contract.numbers import parse_count

Object = dict[str, Any]

_KIND: Final = "PyTorchJob"
_CONTAINER: Final = "pytorch"  # the name that the Training Operator requires
_PORT: Final = "pytorchjob-port"
_QUEUE_LABEL: Final = "kueue.x-k8s.io/queue-name"
_ENTRYPOINT: Final = (
    "`ddp convert` cannot read the image's entrypoint; write the command that it runs: [python, train.py]"
)
_TRAINING_OPERATOR: Final = "kubeflow.org/training-operator"
_GANGS: Final = {"volcano": "Volcano", "scheduler-plugins-scheduler": "Coscheduling"}
"""Schedulers of gangs, by their names in the deployments of their projects."""
_SHELL_SYNTAX: Final = re.compile(r"[;&|<>`(){}*?\n$]")
_CONTROL_SYNTAX: Final = re.compile(r"[;&|<>`()*?\n]")  # the same without variables
_SHELLS: Final = ("sh", "bash", "dash", "zsh", "ash", "ksh")
# A variable of a template, in a place where a job can have none.
_VARIABLE: Final = re.compile(r"\$\{?[A-Za-z_]\w*\}?|\{\{.*?\}\}")
_WITH_VARIABLES: Final = ("command", "args", "env", "exec", "annotations", "status")
_LABELS: Final = {
    "training.kubeflow.org/replica-index": "batch.kubernetes.io/job-completion-index",
    "training.kubeflow.org/job-name": constants.LABEL_JOB_NAME,
}
"""Labels of the Training Operator's pods, and those with the same meaning here."""
_SERVER_FIELDS: Final = ("uid", "resourceVersion", "generation", "creationTimestamp", "managedFields", "selfLink")
# restartPolicy ExitCode: 1 to 127 are permanent. These are the codes that scripts and shells exit with.
_PERMANENT_CODES: Final = [1, 2, 126, 127]
_ELASTIC_FIELDS: Final = (
    *("minReplicas", "maxReplicas", "maxRestarts", "nProcPerNode", "metrics"),
    *("rdzvBackend", "rdzvPort", "rdzvConf", "rdzvHost", "rdzvId", "standalone"),
)
_CARRIED: Final = ("ttlSecondsAfterFinished", "activeDeadlineSeconds", "suspend", "cleanPodPolicy")


@dataclass(slots=True)
class Conversion:
    """The new resource, and notes on its differences from the old one."""

    resource: Object
    notes: list[str] = field(default_factory=list)

    def note(self, path: str, text: str) -> None:
        """Add a note about a field of the old resource."""
        self.notes.append(" ".join(f"{path}: {text}".split()))

    def note_rest(self, path: str, fields: Mapping[str, Any], known: Iterable[str]) -> None:
        """Add a note about each field of the old resource that is not among the known ones, unless it is empty."""
        for name in sorted(set(fields) - set(known)):
            if fields[name] not in (None, "", [], {}):
                self.note(f"{path}.{name}".lstrip("."), "has no equivalent")

    def write(self) -> str:
        """Return the YAML, with the notes as comments before it."""
        lines = [f"# Converted from a {_KIND} by `ddp convert`."]
        if self.notes:
            lines += ["# Differences, and fields without an equivalent:"]
            lines += [f"#   {note}" for note in self.notes]
        return "\n".join(lines) + "\n" + format_documents([self.resource])


def convert(document: Mapping[str, Any]) -> Conversion:
    """Return a PyTorchJob as a DDPTrainingJob with notes. Raises: InvalidManifest."""
    if document.get("kind") != _KIND or not str(document.get("apiVersion", "")).startswith("kubeflow.org/"):
        actual = f"{document.get('apiVersion')} {document.get('kind')}"
        raise InvalidManifest([FieldError("kind", f"must be a kubeflow.org/v1 {_KIND}; found {actual}")])
    variables = dict.fromkeys(_find_variables(document))
    if variables:
        names = ", ".join(variables)
        remedy = (
            "render it first" if "{{" in names else "substitute them first, as with `envsubst < FILE | ddp convert -`"
        )
        raise InvalidManifest([FieldError("", f"the file is a template with variables ({names}); {remedy}")])
    try:
        return _convert(deepcopy(dict(document)))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        if isinstance(error, InvalidManifest):
            raise
        problem = f"does not have the structure of a {_KIND} ({error}); check that the Training Operator accepts it"
        raise InvalidManifest([FieldError("spec", problem)]) from None


def _find_variables(value: Any) -> Iterator[str]:
    """Yield the variables of a template, except where the container or a shell expands them."""
    if isinstance(value, str):
        yield from _VARIABLE.findall(value)
    elif isinstance(value, list):
        for item in value:
            yield from _find_variables(item)
    elif isinstance(value, Mapping):
        for name, member in value.items():
            if name not in _WITH_VARIABLES:
                yield from _find_variables(member)


def _convert(document: Object) -> Conversion:
    spec = document.get("spec") or {}
    roles = spec.get("pytorchReplicaSpecs") or {}
    counts = {role: _count_replicas(roles[role]) for role in ("Master", "Worker") if role in roles}
    replicas = {role: roles[role] for role, count in counts.items() if count}
    if not replicas:
        message = "must have a Master or a Worker with at least one replica; add it"
        raise InvalidManifest([FieldError("spec.pytorchReplicaSpecs", message)])
    done = Conversion({"apiVersion": constants.API_VERSION, "kind": constants.KIND, "metadata": {}, "spec": {}})
    _convert_metadata(done, document.get("metadata") or {})
    done.note_rest("", document, ("apiVersion", "kind", "metadata", "spec", "status"))
    done.note_rest("spec.pytorchReplicaSpecs", roles, counts)
    for role in counts.keys() - replicas:
        done.note(f"spec.pytorchReplicaSpecs.{role}", "left out, it has no replicas")
    for role, replica in replicas.items():
        done.note_rest(f"spec.pytorchReplicaSpecs.{role}", replica, ("replicas", "restartPolicy", "template"))
    new = done.resource["spec"]
    new["nodes"] = sum(counts.values())
    processes = spec.get("nprocPerNode", (spec.get("elasticPolicy") or {}).get("nProcPerNode"))
    if processes is not None:
        number = parse_count(processes)
        new["procPerNode"] = processes if number is None else number
    done.note_rest("spec", spec, ("pytorchReplicaSpecs", "nprocPerNode", "runPolicy", "elasticPolicy"))
    _convert_restart_policies(done, replicas)
    _convert_elastic_policy(done, spec.get("elasticPolicy") or {})
    new["template"] = _convert_template(done, replicas)
    _convert_run_policy(done, spec.get("runPolicy") or {})
    return done


def _count_replicas(replica: Mapping[str, Any]) -> int:
    count = replica.get("replicas")
    return 1 if count is None else int(count)


def _convert_metadata(done: Conversion, old: Mapping[str, Any]) -> None:
    annotations = dict(old.get("annotations") or {})
    annotations.pop("kubectl.kubernetes.io/last-applied-configuration", None)
    name = old.get("name") or str(old.get("generateName") or "").rstrip("-")
    kept = {"name": name, "namespace": old.get("namespace"), "labels": old.get("labels"), "annotations": annotations}
    done.resource["metadata"] = {key: value for key, value in kept.items() if value}
    if name and not old.get("name"):
        done.note("metadata.generateName", f"the name is {name} now; change it for a further job")
    done.note_rest("metadata", old, (*kept, "generateName", *_SERVER_FIELDS))


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
    done.note_rest(at, elastic, _ELASTIC_FIELDS)


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
    elif port is not None:
        done.note(f"{at}.rdzvPort", f"{port}: left out, ports begin at 1024 here")
    for pair in elastic.get("rdzvConf") or ():
        seconds = parse_count(pair.get("value"))
        if pair.get("key") == "join_timeout" and seconds is not None:
            rendezvous["joinTimeoutSeconds"] = max(10, seconds)
        else:
            done.note(f"{at}.rdzvConf", f"{pair.get('key')}={pair.get('value')}: left out, the operator sets it")
    return rendezvous


def _convert_run_policy(done: Conversion, policy: Mapping[str, Any]) -> None:
    new = done.resource["spec"]
    at = "spec.runPolicy"
    new.update({name: policy[name] for name in _CARRIED if name in policy})
    labels = done.resource["metadata"].get("labels") or {}
    if new.get("suspend") and _QUEUE_LABEL in labels:
        del new["suspend"]
        done.note(f"{at}.suspend", "left out: Kueue sets it for a job with a queue")
    _convert_controller(done, policy.get("managedBy"))
    if "backoffLimit" in policy:
        new.setdefault("recovery", {}).setdefault("maxRestarts", policy["backoffLimit"])
        done.note(
            f"{at}.backoffLimit",
            "is spec.recovery.maxRestarts, which counts new attempts; inPlaceRestarts counts restarts of workers",
        )
    done.note_rest(at, policy, (*_CARRIED, "backoffLimit", "managedBy", "schedulingPolicy"))
    scheduling = policy.get("schedulingPolicy") or {}
    known = ("priorityClass", "queue", "minAvailable", "minResources", "scheduleTimeoutSeconds")
    done.note_rest(f"{at}.schedulingPolicy", scheduling, known)
    if scheduling.get("priorityClass"):
        new["template"]["spec"].setdefault("priorityClassName", scheduling["priorityClass"])
    gang = _GANGS.get(new["template"]["spec"].get("schedulerName"))
    if gang:
        del new["template"]["spec"]["schedulerName"]
        new["scheduling"] = {"gang": gang}
        done.note("template.spec.schedulerName", f"is spec.scheduling.gang: {gang} now")
    if scheduling.get("queue") and gang == "Volcano":
        new["scheduling"]["queue"] = scheduling["queue"]
    elif scheduling.get("queue"):
        done.resource["metadata"].setdefault("labels", {}).setdefault(_QUEUE_LABEL, scheduling["queue"])
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


def _convert_controller(done: Conversion, controller: Any) -> None:
    if controller == other_kinds.MULTIKUEUE:
        done.resource["spec"]["managedBy"] = controller
    elif controller and controller != _TRAINING_OPERATOR:
        done.note("spec.runPolicy.managedBy", f"{controller}: left out, it does not know the new kind")


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
    template = _convert_labels(done, template)
    metadata = template.get("metadata") or {}
    done.note_rest("template.metadata", metadata, ("labels", "annotations", *_SERVER_FIELDS))
    kept = {name: metadata[name] for name in ("labels", "annotations") if metadata.get(name)}
    template = {**({"metadata": kept} if kept else {}), "spec": template["spec"]}
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


def _convert_labels(done: Conversion, template: Object) -> Object:
    """Remove the Training Operator's own labels, and replace them where the pod refers to them."""
    metadata = template.get("metadata") or {}
    for label in [label for label in metadata.get("labels") or () if label.startswith("training.kubeflow.org/")]:
        del metadata["labels"][label]
        done.note("template.metadata.labels", f"{label}: left out, the Training Operator sets it")
    text = json.dumps(template)
    for old, new in _LABELS.items():
        if old in text:
            text = text.replace(old, new)
            done.note("template", f"the label {old} is {new} now; its indices count all pods, from 0")
    for label in sorted(set(re.findall(r"training\.kubeflow\.org/[\w.-]+", text))):
        done.note("template", f"refers to the label {label}, which no pod has; remove it")
    converted: Object = json.loads(text)
    return converted


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
    elif skips_entrypoint(container):
        done.note("command", ENTRYPOINT)

    unwrapped = _unwrap_shell(line)
    with_variables = _unwrap_shell(line, _CONTROL_SYNTAX)
    if count_launcher_arguments(with_variables):
        kept = _strip_torchrun(deepcopy(done), with_variables)
        if not any(map(_SHELL_SYNTAX.search, kept)):  # only flags that the operator sets have variables
            unwrapped = with_variables
    has_launcher = count_launcher_arguments(unwrapped) > 0
    written = _strip_torchrun(done, unwrapped)
    if written != line:
        container["command"] = written
        container.pop("args", None)
    runs_shell = any(posixpath.basename(word) in _SHELLS for word in written)
    is_python = is_interpreter(written[0]) or written[0].startswith("-m") or written[0].endswith(".py")
    if not has_launcher and not is_python:
        program = "a shell" if runs_shell else posixpath.basename(written[0])
        launchers = "torchrun or another launcher"
        done.note("command", f"{program} starts the training; if it runs {launchers}, write the script as the command")
    if not has_launcher and "procPerNode" not in done.resource["spec"]:
        done.resource["spec"]["procPerNode"] = 1
        reason = "one process per pod, as before" if runs_shell else "does not run torchrun: one process per pod"
        done.note("command", f"{reason}; procPerNode: gpu starts one for each GPU")

    if done.resource["spec"].get("procPerNode") == 1:
        return
    if runs_shell:
        done.note("command", "ran once per pod, and runs once in each rank now: move set-up to an init container")
    if runs_shell and re.search(r"\$\{?(?:RANK|WORLD_SIZE)\b", " ".join(written)):
        done.note("command", "RANK and WORLD_SIZE count ranks now; GROUP_RANK and GROUP_WORLD_SIZE count pods")


def _unwrap_shell(line: list[str], syntax: re.Pattern[str] = _SHELL_SYNTAX) -> list[str]:
    """Return the arguments of ``sh -c 'one simple command'``; any other line unchanged. ``syntax``: what is not."""
    if posixpath.basename(line[0]) not in _SHELLS or len(line) != 3 or not re.fullmatch(r"-[a-z]*c", line[1]):
        return line
    text = line[2].replace("\\\n", " ").strip().removeprefix("exec ")
    if syntax.search(text) or re.match(r"\w+=", text):
        return line
    try:
        return shlex.split(text) or line
    except ValueError:
        return line


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
    number = parse_count(value)
    if name == "nproc-per-node" and (number is not None or value in ("gpu", "cpu", "auto")):
        done.resource["spec"].setdefault("procPerNode", value if number is None else number)
    elif name == "max-restarts" and number is not None:
        done.resource["spec"].setdefault("recovery", {}).setdefault("inPlaceRestarts", number)


def _convert_shared_memory(done: Conversion, pod: Object, container: Object) -> None:
    """Replace a memory volume at /dev/shm by spec.sharedMemory: the operator mounts that volume."""
    mounts = container.get("volumeMounts") or []
    mount = next((entry for entry in mounts if entry.get("mountPath") == "/dev/shm"), None)
    if mount is None:
        return
    volume: Object = next((entry for entry in pod.get("volumes") or () if entry.get("name") == mount["name"]), {})
    everywhere = [*pod["containers"], *(pod.get("initContainers") or ())]
    mounted = [
        entry for owner in everywhere for entry in owner.get("volumeMounts") or () if entry["name"] == mount["name"]
    ]
    if (volume.get("emptyDir") or {}).get("medium") != "Memory" or len(mounted) > 1:
        return
    if volume["emptyDir"].get("sizeLimit"):
        done.resource["spec"]["sharedMemory"] = str(volume["emptyDir"]["sizeLimit"])
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

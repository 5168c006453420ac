"""What CEL cannot see: the pod template. Checked once, and resolved into what the builders need.

The checks are those whose failure would otherwise show late or not at all (a sidecar that keeps the Job from ending, a
rank variable that torchrun would overwrite). Everything else about a pod is left to the API server's dry-run.
"""

import ipaddress
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from ddp_operator import constants
from ddp_operator.api.errors import FieldError, InvalidManifest, check_strings
from ddp_operator.api.job import DDPTrainingJob
from ddp_operator.api.pod_fields import find_unknown_fields
from ddp_operator.api.spec import NetworkPolicy, Peer, Spec
from ddp_operator.kubeobjects import count_gpus, cpu_limit, is_quantity
from ddp_operator.launcher.storage import has_credentials
from ddp_operator.manifests.fabric import check_fabric, merge_fabric
from ddp_operator.manifests.inputs import check_inputs
from ddp_operator.manifests.log_patterns import check_log_patterns
from ddp_operator.manifests.torchrun import CommandError, UserCommand, find_nested_launcher, split_user_command
from ddp_operator.names import is_reserved_variable

_POD = "spec.template.spec"
_FOLDERS_OF_OURS = (constants.LAUNCHER_MOUNT_PATH, constants.CODE_MOUNT_PATH, constants.PACKAGES_MOUNT_PATH)


@dataclass(frozen=True, slots=True)
class ResolvedTemplate:
    """The pod template, understood. ``pod``: the job's own; ``training``: metadata and spec with its fabric below."""

    pod: Mapping[str, Any]
    training: Mapping[str, Any]
    trainer_index: int
    command: UserCommand
    nproc: int

    @property
    def trainer(self) -> Mapping[str, Any]:
        """The container that runs the training script."""
        container: Mapping[str, Any] = self.pod["containers"][self.trainer_index]
        return container


def resolve_template(job: DDPTrainingJob) -> ResolvedTemplate:
    """Return the resolved template. Raises: InvalidManifest with every problem found."""
    spec = job.spec
    errors = list(_check_metadata(spec.template.metadata or {}))
    pod = spec.template.spec
    if not isinstance(pod, Mapping):
        raise InvalidManifest([*errors, FieldError(_POD, "Required value: the pods need containers; add it")])
    shape = list(_check_shape(pod))
    if shape:
        raise InvalidManifest(errors + shape)
    index = _find_trainer(pod["containers"])
    if isinstance(index, FieldError):
        raise InvalidManifest([*errors, index])
    trainer = pod["containers"][index]
    path = f"{_POD}.containers[{index}]"
    training = merge_fabric(spec)
    whole = training["spec"]  # what the job says stands where the job has it
    errors += _check_pod(whole, spec)
    errors += _check_trainer(whole["containers"][index], path, spec)
    errors += check_containers(whole, _POD)
    errors += check_fabric(spec, whole)
    errors += check_inputs(spec, trainer)
    errors += _check_urls(spec)
    nproc = _resolve_nproc(trainer, path, job)
    if isinstance(nproc, FieldError):
        errors.append(nproc)
    command: UserCommand | None = None
    try:
        command = split_user_command(trainer.get("command") or [], trainer.get("args") or [])
    except CommandError as error:
        # A misspelt field is why there is no command: the API server stores it, as it knows nothing of the template.
        misspelt = find_unknown_fields(pod) if not trainer.get("command") and not trainer.get("args") else []
        errors += misspelt or [FieldError(f"{path}.command", str(error))]
    errors += _check_launchers(spec, command, nproc, path)
    errors += _check_log_patterns(spec, command)
    errors += _check_scheduling(job, whole)
    if errors:
        raise InvalidManifest(errors)
    assert command is not None
    assert isinstance(nproc, int)
    return ResolvedTemplate(pod, training, index, command, nproc)


def _check_urls(spec: Spec) -> Iterator[FieldError]:
    """Refuse credentials in URLs, which are shown in the status, Events and logs."""
    tracking = spec.tracking
    mlflow = tracking.mlflow if tracking else None
    wandb = tracking.wandb if tracking else None
    for path, url, remedy in (
        ("checkpoint.url", spec.checkpoint and spec.checkpoint.url, "spec.checkpoint.secretRef"),
        ("tracking.mlflow.trackingUri", mlflow and mlflow.tracking_uri, "spec.tracking.mlflow.secretRef"),
        ("tracking.wandb.baseUrl", wandb and wandb.base_url, "spec.tracking.wandb.secretRef"),
    ):
        if url and has_credentials(url):
            yield FieldError(
                f"spec.{path}", f"must not hold a password; put it into a Secret, and name that in {remedy}"
            )


def _check_metadata(metadata: Any) -> Iterator[FieldError]:
    if not isinstance(metadata, Mapping):
        yield FieldError("spec.template.metadata", "must be an object with labels and annotations")
        return
    for part in ("labels", "annotations"):
        problem = check_strings(metadata.get(part), f"spec.template.metadata.{part}")
        if problem:
            yield problem
        for key in metadata.get(part) or () if part == "labels" and not problem else ():
            if key.startswith(f"{constants.GROUP}/") or key == constants.LABEL_MANAGED_BY:
                yield FieldError(f"spec.template.metadata.labels[{key}]", "is set by the operator; remove it")


def _check_shape(pod: Mapping[str, Any]) -> Iterator[FieldError]:
    """Check the types of what is read below, so that reading cannot trip over them."""
    containers = pod.get("containers")
    if isinstance(containers, Mapping):
        yield FieldError(f"{_POD}.containers", "must be a list; write '- ' before the first member of each container")
        return
    if not isinstance(containers, list) or not containers:
        words = "needs one container, named trainer, whose command runs the training script; add it"
        yield FieldError(f"{_POD}.containers", f"Required value: {words}")
        return
    for part in ("containers", "initContainers"):
        if not isinstance(pod.get(part), list | None):
            yield FieldError(f"{_POD}.{part}", "must be a list")
            continue
        for index, container in enumerate(pod.get(part) or []):
            yield from _check_container_shape(container, f"{_POD}.{part}[{index}]")
    for index, volume in enumerate(pod.get("volumes") or []) if _is_list_of_objects(pod.get("volumes")) else ():
        if not isinstance(volume.get("name"), str):
            yield FieldError(f"{_POD}.volumes[{index}].name", "Required value: every volume needs a name; add it")
    for part in ("volumes", "tolerations", "imagePullSecrets"):
        if not _is_list_of_objects(pod.get(part)):
            yield FieldError(f"{_POD}.{part}", "must be a list of objects")
    for part in ("securityContext", "affinity", "nodeSelector"):
        if not isinstance(pod.get(part), Mapping | None):
            yield FieldError(f"{_POD}.{part}", "must be an object")


def _check_container_shape(container: Any, path: str) -> Iterator[FieldError]:
    if not isinstance(container, Mapping):
        yield FieldError(path, "must be an object with name and image")
        return
    if not isinstance(container.get("name"), str) or not container.get("name"):
        yield FieldError(f"{path}.name", "Required value: every container needs a name; add it")
    for part in ("command", "args"):
        value = container.get(part)
        if value is not None and (not isinstance(value, list) or not all(isinstance(v, str) for v in value)):
            words = "must be a list of strings; split it and quote numbers and booleans, for example"
            yield FieldError(f"{path}.{part}", f'{words} [python, train.py, --lr, "0.1"]')
    for part in ("env", "envFrom", "ports", "volumeMounts"):
        if not _is_list_of_objects(container.get(part)):
            example = "; write {name: NAME, value: TEXT} for each variable" if part == "env" else ""
            yield FieldError(f"{path}.{part}", f"must be a list of objects{example}")
    for part, members in (("resources", ("limits", "requests")), ("securityContext", ("capabilities",))):
        value = container.get(part) or {}
        if not isinstance(value, Mapping):
            yield FieldError(f"{path}.{part}", "must be an object")
            continue
        for member in members:
            if not isinstance(value.get(member) or {}, Mapping):
                yield FieldError(f"{path}.{part}.{member}", "must be an object")
            elif member == "capabilities" and not isinstance((value.get(member) or {}).get("add") or [], list):
                yield FieldError(f"{path}.{part}.{member}.add", "must be a list of strings")


def _is_list_of_objects(value: Any) -> bool:
    return value is None or (isinstance(value, list) and all(isinstance(item, Mapping) for item in value))


def _find_trainer(containers: list[Mapping[str, Any]]) -> int | FieldError:
    named = [i for i, c in enumerate(containers) if c["name"] == constants.TRAINER_CONTAINER]
    if len(containers) == 1:
        return 0
    if not named:
        words = f"holds {len(containers)} containers and none is named {constants.TRAINER_CONTAINER}"
        return FieldError(f"{_POD}.containers", f"{words}; give the one that trains that name")
    other = 0 if named[0] else 1
    words = f'container "{containers[other]["name"]}" beside the trainer would keep the job from ending'
    remedy = "move it to initContainers with restartPolicy: Always (a native sidecar)"
    return FieldError(f"{_POD}.containers[{other}]", f"{words}; {remedy}")


def _check_pod(pod: Mapping[str, Any], spec: Spec) -> Iterator[FieldError]:
    for name, remedy in (
        ("subdomain", "the operator's Service needs it; remove it"),
        ("hostname", "the Job controller sets it; remove it"),
        ("activeDeadlineSeconds", "set spec.activeDeadlineSeconds instead"),
    ):
        if pod.get(name) is not None:
            yield FieldError(f"{_POD}.{name}", remedy, pod[name])
    if pod.get("restartPolicy") not in (None, "Never"):
        words = "must be Never: restarts are spec.recovery's; remove it"
        yield FieldError(f"{_POD}.restartPolicy", words, pod["restartPolicy"])
    names = [volume["name"] for volume in pod.get("volumes") or []]
    for reserved in constants.VOLUMES:
        if reserved in names:
            where = f"{_POD}.volumes[{names.index(reserved)}].name"
            yield FieldError(where, "is the operator's; choose another", reserved)
    ours = {spec.rendezvous.port: "spec.rendezvous.port", spec.metrics.port: "spec.metrics.port"}
    for part in ("containers", "initContainers"):
        for i, container in enumerate(pod.get(part) or []):
            for j, port in enumerate(container.get("ports") or []):
                number = port.get("containerPort")
                if isinstance(number, int) and number in ours:
                    words = f"is taken by {ours[number]}, which the operator declares itself; remove it or change one"
                    yield FieldError(f"{_POD}.{part}[{i}].ports[{j}].containerPort", words, number)


def _check_trainer(trainer: Mapping[str, Any], path: str, spec: Spec) -> Iterator[FieldError]:
    for index, port in enumerate(trainer.get("ports") or []):
        if port.get("name") in constants.PORT_NAMES:
            words = "is the name of a port that the operator declares; rename it"
            yield FieldError(f"{path}.ports[{index}].name", words, port["name"])
    if not isinstance(trainer.get("image"), str) or not trainer["image"]:
        yield FieldError(f"{path}.image", "Required value: needs an image with Python and torch; add it")
    for index, env in enumerate(trainer.get("env") or []):
        name = env.get("name")
        if not isinstance(name, str):
            yield FieldError(f"{path}.env[{index}].name", "Required value: every variable needs a name; add it")
        elif is_reserved_variable(name):
            words = "is reserved: torchrun and the operator set it; remove it"
            yield FieldError(f"{path}.env[{index}].name", words, name)
    for index, mount in enumerate(trainer.get("volumeMounts") or []):
        here, where = f"{path}.volumeMounts[{index}].mountPath", mount.get("mountPath")
        if not isinstance(where, str):
            yield FieldError(here, "Required value: every mount needs a path; add it")
        elif where.rstrip("/") in _FOLDERS_OF_OURS:
            yield FieldError(here, "is the operator's; choose another", where)
        elif spec.code and where.rstrip("/") == spec.code.folder:
            yield FieldError(here, "spec.code is unpacked there; remove this mount or set spec.code.mountPath", where)
        elif spec.checkpoint and spec.checkpoint.claim_name and where.rstrip("/") == spec.checkpoint.path.rstrip("/"):
            words = "spec.checkpoint.claimName is mounted there; remove this mount or the claimName"
            yield FieldError(here, words, where)


def _check_scheduling(job: DDPTrainingJob, pod: Mapping[str, Any]) -> Iterator[FieldError]:
    spec = job.spec
    for ours, theirs in (
        (spec.scheduling.scheduler_name, "schedulerName"),
        (spec.scheduling.priority_class_name, "priorityClassName"),
    ):
        if ours is not None and pod.get(theirs):
            words = f"is also set in {_POD}.{theirs}; remove one of the two"
            yield FieldError(f"spec.scheduling.{theirs}", words, ours)
    if spec.scheduling.gang == "Volcano" and constants.KUEUE_QUEUE_LABEL in job.labels:
        label = constants.KUEUE_QUEUE_LABEL
        words = f"must be None or Coscheduling where Kueue queues the job; change it or remove the label {label}"
        yield FieldError("spec.scheduling.gang", words, spec.scheduling.gang)
    fewest = job.annotations.get(constants.KUEUE_MIN_PARALLELISM)
    if fewest is not None and (spec.elastic is None or not fewest.isdecimal() or int(fewest) < spec.elastic.min_nodes):
        least = f"at least spec.elastic.minNodes ({spec.elastic.min_nodes})" if spec.elastic else "for an elastic job"
        words = f"must be {least}, as torchrun waits for all others; change it, or remove it"
        yield FieldError(f"metadata.annotations[{constants.KUEUE_MIN_PARALLELISM}]", words, fewest)
    if spec.network_policy.enabled and pod.get("hostNetwork"):
        words = (
            f"cannot hold pods with {_POD}.hostNetwork, which no NetworkPolicy sees; remove that, or set this to false"
        )
        yield FieldError("spec.networkPolicy.enabled", words)
    yield from check_network_policy(spec.network_policy)


def check_network_policy(policy: NetworkPolicy) -> Iterator[FieldError]:
    """Check what a NetworkPolicy would be made of."""
    for index, cidr in enumerate(policy.egress_cidrs):
        try:
            ipaddress.ip_network(cidr)
        except ValueError as error:
            words = f"is not a network ({error}); write it such as 10.0.0.0/8, or one host as 10.1.2.3/32"
            yield FieldError(f"spec.networkPolicy.egressCidrs[{index}]", words, cidr)
    for index, peer in enumerate(policy.metrics_from or ()):
        if peer == Peer():
            words = "must have namespaceSelector, podSelector or ipBlock; write it as in a NetworkPolicy's `from`"
            yield FieldError(f"spec.networkPolicy.metricsFrom[{index}]", words, {})


def _check_launchers(
    spec: Spec, command: UserCommand | None, nproc: int | FieldError, path: str
) -> Iterator[FieldError]:
    """Refuse a launcher inside the command whose ranks would never meet those that other ranks start."""
    ranks = spec.nodes * nproc if isinstance(nproc, int) else spec.nodes
    launcher = find_nested_launcher(command) if command is not None else None
    if launcher is None or (ranks == 1 and spec.elastic is None) or spec.process_group_policy == "Ignore":
        return
    yield FieldError(
        f"{path}.command",
        f"{launcher} starts ranks of its own in each of the {ranks} that the operator starts, and they never meet: "
        "write the script itself as the command, such as [python, train.py], and set spec.procPerNode; or, for "
        "separate runs, spec.processGroupPolicy: Ignore",
    )


def _check_log_patterns(spec: Spec, command: UserCommand | None) -> Iterator[FieldError]:
    for index, problem in check_log_patterns(spec.metrics.log_patterns):
        yield FieldError(f"spec.metrics.logPatterns[{index}]", problem, spec.metrics.log_patterns[index])
    flags = {flag.partition("=")[0] for flag in command.torchrun_flags} if command else set()
    for flag in sorted(flags & {"--redirects", "--tee", "--logs-specs"} if spec.metrics.log_patterns else ()):
        words = f"sees nothing where torchrun's {flag} takes the output; remove one of the two"
        yield FieldError("spec.metrics.logPatterns", words)


def _resolve_nproc(trainer: Mapping[str, Any], path: str, job: DDPTrainingJob) -> int | FieldError:
    """Return the worker processes of one pod, from procPerNode and the container's limits and claims."""
    resources, here = trainer.get("resources") or {}, f"{path}.resources"
    gpus, cpus, asked = count_gpus(resources) + job.claimed_gpus, cpu_limit(resources), job.spec.proc_per_node
    if asked == "gpu" and not gpus:
        problem = f"needs a GPU in {here}.limits; add nvidia.com/gpu or use auto"
    elif asked == "cpu" and gpus:
        problem = f"{gpus} GPUs in {here} would idle; use gpu or remove them"
    elif asked == "cpu" and (cpus is None or cpus < 1):
        problem = f"needs at least one CPU in {here}.limits; add cpu or use a number"
    elif isinstance(asked, int) and gpus and asked > gpus:
        problem = f"is more than the {gpus} GPUs in {here}; ask for {asked} there or use gpu"
    elif asked == "cpu":
        return int(cpus or 0)
    else:
        return asked if isinstance(asked, int) else gpus or 1
    return FieldError("spec.procPerNode", problem, asked)


_STANDARD: Final = re.compile(r"cpu|memory|ephemeral-storage|hugepages-.+")


def check_containers(pod: Mapping[str, Any], path: str) -> Iterator[FieldError]:
    """Check resources, variables and mounts of every container of a pod whose shape is right; ``path`` is the pod's."""
    volumes = {volume["name"] for volume in pod.get("volumes") or ()} | {*constants.VOLUMES}
    for part in ("containers", "initContainers"):
        for index, container in enumerate(pod.get(part) or ()):
            here = f"{path}.{part}[{index}]"
            yield from _check_resources(container.get("resources") or {}, f"{here}.resources")
            for number, variable in enumerate(container.get("env") or ()):
                if not isinstance(variable.get("value"), str | None):
                    yield FieldError(f"{here}.env[{number}].value", "must be a string; quote it", variable["value"])
            for number, mount in enumerate(container.get("volumeMounts") or ()):
                name = mount.get("name")
                if isinstance(name, str) and name not in volumes:
                    words = f"no such volume; add it to {path}.volumes"
                    yield FieldError(f"{here}.volumeMounts[{number}].name", words, name)


def _check_resources(resources: Mapping[str, Any], path: str) -> Iterator[FieldError]:
    limits = resources.get("limits") or {}
    for part in ("limits", "requests"):
        for name, value in (resources.get(part) or {}).items():
            here = f"{path}.{part}[{name}]"
            if value is not None and not is_quantity(value):
                yield FieldError(here, "must be a quantity: a number, with or without a suffix, such as 8Gi", value)
            elif "/" not in name and not _STANDARD.fullmatch(name):
                words = "is not a resource; use cpu, memory, ephemeral-storage or the full name of a device"
                yield FieldError(here, f"{words}, such as nvidia.com/gpu")
            elif part == "requests" and "/" in name and name not in limits:
                yield FieldError(here, f"devices must be requested as a limit; set it in {path}.limits")
            elif name.startswith("hugepages-") and not {"cpu", "memory"} & {
                *limits,
                *(resources.get("requests") or {}),
            }:
                yield FieldError(
                    here, f"Kubernetes gives huge pages only beside cpu or memory; add one to {path}.limits"
                )

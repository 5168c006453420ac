"""Check the pod template, which CEL rules cannot read, and resolve it for the builders.

The checks cover what the builders read, and what would make a job that never works (a sidecar that keeps the Job
running, a rank variable that torchrun overwrites). The feature ``early_checks`` and the API server check all else.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from ddp_operator.api import constants
from ddp_operator.api.child_names import is_reserved_variable
from ddp_operator.api.errors import FieldError, InvalidManifest, check_strings
from ddp_operator.api.job import DDPTrainingJob
from ddp_operator.api.kubeobjects import count_gpus, find_limits, parse_quantity
from ddp_operator.api.parts import Check, call_if_asked
from ddp_operator.manifests.torchrun import InvalidCommand, UserCommand, split_user_command
from ddp_pod.contract.credentials import has_credentials

_POD = "spec.template.spec"
MAX_TEXT: Final = 131_071
"""Bytes of one argument, or of one variable with its name: MAX_ARG_STRLEN of Linux without the terminating zero."""


@dataclass(frozen=True, slots=True)
class ResolvedTemplate:
    """The checked pod template."""

    pod: Mapping[str, Any]
    trainer_index: int
    command: UserCommand
    nproc: int

    @property
    def trainer(self) -> Mapping[str, Any]:
        """The container that runs the training script."""
        container: Mapping[str, Any] = self.pod["containers"][self.trainer_index]
        return container

    @property
    def limits(self) -> Mapping[str, Any]:
        """The limits of that container, also those of its pod."""
        return find_limits(self.pod, self.trainer)

    @property
    def interpreter(self) -> str:
        """The Python of that container."""
        return self.command.interpreter


def resolve_template(job: DDPTrainingJob) -> ResolvedTemplate:
    """Return the resolved template. Raises: InvalidManifest with every problem found."""
    spec = job.spec
    errors = list(_check_metadata(spec.template.metadata or {}))
    pod = spec.template.spec
    if not isinstance(pod, Mapping):
        raise InvalidManifest([*errors, FieldError(_POD, "Required value: the pods need containers; add it")])
    shape_errors = list(_check_shape(pod))
    if shape_errors:
        raise InvalidManifest(errors + shape_errors)
    index = _find_trainer(pod["containers"])
    if isinstance(index, FieldError):
        raise InvalidManifest([*errors, index])
    trainer = pod["containers"][index]
    path = f"{_POD}.containers[{index}]"

    errors += _check_trainer(trainer, path)
    if spec.checkpoint is not None:
        errors += check_url("spec.checkpoint.url", spec.checkpoint.url, "spec.checkpoint.secretRef")
    owned_errors = list(check_owned_fields(job, pod, trainer))
    errors += owned_errors
    limits = find_limits(pod, trainer)
    nproc = _resolve_nproc(trainer, limits, path, job)
    if isinstance(nproc, FieldError):
        errors.append(nproc)
    command: UserCommand | None = None
    try:
        command = split_user_command(trainer.get("command") or [], trainer.get("args") or [])
    except InvalidCommand as error:
        is_absent = not trainer.get("command") and not trainer.get("args")
        # A misspelled field of the container explains an absent command better.
        if not (is_absent and any(not found.path and f"{path}." in found.message for found in owned_errors)):
            errors.append(FieldError(f"{path}.command", str(error)))
    if errors:
        raise InvalidManifest(errors)
    assert command is not None
    assert isinstance(nproc, int)
    return ResolvedTemplate(pod, index, command, nproc)


def check_url(path: str, url: str | None, remedy: str) -> Iterator[FieldError]:
    """Refuse a password in a URL, which is shown in the status, Events and logs. ``remedy``: the field for it."""
    if url and has_credentials(url):
        yield FieldError(path, f"must not contain a password; put it into a Secret, and name that in {remedy}")


def check_owned_fields(job: DDPTrainingJob, pod: Mapping[str, Any], trainer: Mapping[str, Any]) -> Iterator[FieldError]:
    """Check the fields of features."""
    for part in job.schema.parts:
        if part.check is not None:
            yield from call_if_asked(part, job, partial(_run_check, part.check, job, pod, trainer), list, [])


def _run_check(
    check: Check, job: DDPTrainingJob, pod: Mapping[str, Any], trainer: Mapping[str, Any]
) -> list[FieldError]:
    return list(check(job, pod, trainer))


def _check_metadata(metadata: Any) -> Iterator[FieldError]:
    if not isinstance(metadata, Mapping):
        yield FieldError("spec.template.metadata", "must be an object with labels and annotations")
        return
    for part in ("labels", "annotations"):
        problem = check_strings(metadata.get(part), f"spec.template.metadata.{part}")
        if problem:
            yield problem
        if part == "annotations" or problem:
            continue
        for key in metadata.get("labels") or ():
            if key.startswith(f"{constants.GROUP}/"):
                yield FieldError(f"spec.template.metadata.labels[{key}]", "is set by the operator; remove it")


def _check_shape(pod: Mapping[str, Any]) -> Iterator[FieldError]:
    """Check the types of the fields that the later checks read."""
    containers = pod.get("containers")
    if isinstance(containers, Mapping):
        yield FieldError(f"{_POD}.containers", "must be a list; write '- ' before the first member of each container")
        return
    if not isinstance(containers, list) or not containers:
        message = "Required value: needs a container named trainer with the training command; add it"
        yield FieldError(f"{_POD}.containers", message)
        return
    for part in ("containers", "initContainers"):
        if not isinstance(pod.get(part), list | None):
            yield FieldError(f"{_POD}.{part}", "must be a list")
            continue
        for index, container in enumerate(pod.get(part) or []):
            yield from _check_container_shape(container, f"{_POD}.{part}[{index}]")
    yield from _check_volume_names(pod.get("volumes"))
    for part in ("volumes", "tolerations", "imagePullSecrets"):
        if not _is_list_of_objects(pod.get(part)):
            yield FieldError(f"{_POD}.{part}", "must be a list of objects")
    for part in ("securityContext", "affinity", "nodeSelector"):
        if not isinstance(pod.get(part), Mapping | None):
            yield FieldError(f"{_POD}.{part}", "must be an object")
    yield from _check_members(pod, "resources", ("limits", "requests"), _POD)


def _check_volume_names(volumes: Any) -> Iterator[FieldError]:
    if not _is_list_of_objects(volumes):
        return
    for index, volume in enumerate(volumes or []):
        if not isinstance(volume.get("name"), str):
            yield FieldError(f"{_POD}.volumes[{index}].name", "Required value: every volume needs a name; add it")


def _check_container_shape(container: Any, path: str) -> Iterator[FieldError]:
    if not isinstance(container, Mapping):
        yield FieldError(path, "must be an object with name and image")
        return
    if not isinstance(container.get("name"), str) or not container.get("name"):
        yield FieldError(f"{path}.name", "Required value: every container needs a name; add it")
    for part in ("command", "args"):
        yield from _check_arguments(container.get(part), f"{path}.{part}")
    for part in ("env", "envFrom", "ports", "volumeMounts"):
        if not _is_list_of_objects(container.get(part)):
            example = "; write {name: NAME, value: TEXT} for each variable" if part == "env" else ""
            yield FieldError(f"{path}.{part}", f"must be a list of objects{example}")
    yield from _check_members(container, "resources", ("limits", "requests"), path)
    yield from _check_members(container, "securityContext", ("capabilities",), path)


def _check_members(owner: Mapping[str, Any], part: str, members: Sequence[str], path: str) -> Iterator[FieldError]:
    """Check that a part of a pod or container, and its members, are objects."""
    value = owner.get(part) or {}
    if not isinstance(value, Mapping):
        yield FieldError(f"{path}.{part}", "must be an object")
        return
    for member in members:
        if not isinstance(value.get(member) or {}, Mapping):
            yield FieldError(f"{path}.{part}.{member}", "must be an object")
        elif member == "capabilities" and not isinstance((value.get(member) or {}).get("add") or [], list):
            yield FieldError(f"{path}.{part}.{member}.add", "must be a list of strings")


def _check_arguments(value: Any, path: str) -> Iterator[FieldError]:
    """Check the type of a command or its arguments."""
    if value is not None and (not isinstance(value, list) or not all(isinstance(item, str) for item in value)):
        message = (
            "must be a list of strings; split it and quote numbers and booleans, for example "
            '[python, train.py, --lr, "0.1"]'
        )
        yield FieldError(path, message)


def measure_variable(variable: Mapping[str, Any]) -> int:
    """Return the bytes that a variable takes when a program starts."""
    return len(f"{variable.get('name')}={variable.get('value') or ''}".encode(errors="replace"))


def _is_list_of_objects(value: Any) -> bool:
    return value is None or (isinstance(value, list) and all(isinstance(item, Mapping) for item in value))


def _find_trainer(containers: list[Mapping[str, Any]]) -> int | FieldError:
    """Return the index of the training container, or the refusal of a template with several containers."""
    if len(containers) == 1:
        return 0
    trainers = [index for index, container in enumerate(containers) if container["name"] == constants.TRAINER_CONTAINER]
    if not trainers:
        message = (
            f"has {len(containers)} containers, but none is named {constants.TRAINER_CONTAINER}; rename the training "
            "container"
        )
        return FieldError(f"{_POD}.containers", message)
    sidecar = 0 if trainers[0] else 1
    message = (
        f'container "{containers[sidecar]["name"]}" would keep the job running after the trainer has ended; move it to '
        "initContainers with restartPolicy: Always (a native sidecar)"
    )
    return FieldError(f"{_POD}.containers[{sidecar}]", message)


def _check_trainer(trainer: Mapping[str, Any], path: str) -> Iterator[FieldError]:
    if not isinstance(trainer.get("image"), str) or not trainer["image"]:
        yield FieldError(f"{path}.image", "Required value: needs an image with Python and torch; add it")
    for index, env in enumerate(trainer.get("env") or []):
        name = env.get("name")
        if not isinstance(name, str):
            yield FieldError(f"{path}.env[{index}].name", "Required value: every variable needs a name; add it")
        elif is_reserved_variable(name):
            message = "is reserved: torchrun and the operator set it; remove it"
            yield FieldError(f"{path}.env[{index}].name", message, name)
    for index, mount in enumerate(trainer.get("volumeMounts") or []):
        if not isinstance(mount.get("mountPath"), str):
            mount_path = f"{path}.volumeMounts[{index}].mountPath"
            yield FieldError(mount_path, "Required value: every mount needs a path; add it")


def _resolve_nproc(
    trainer: Mapping[str, Any], limits: Mapping[str, Any], path: str, job: DDPTrainingJob
) -> int | FieldError:
    """Return the worker processes of one pod, from procPerNode and the container's limits."""
    resources = trainer.get("resources") or {}
    resources_path = f"{path}.resources"
    gpus = count_gpus(resources)
    cpus = parse_quantity(limits.get("cpu"))
    value = job.spec.proc_per_node

    if value in ("auto", "gpu") and not gpus and resources.get("claims"):
        problem = (
            f"does not count the devices of {resources_path}.claims; set procPerNode to the number of GPUs that each "
            "pod claims, or to 1 if it claims none"
        )
    elif value == "gpu" and not gpus:
        problem = f"needs a GPU in {resources_path}.limits; add nvidia.com/gpu or use auto"
    elif value == "cpu" and gpus:
        problem = f"would leave the {gpus} GPUs in {resources_path} idle; use gpu or remove them"
    elif value == "cpu" and (cpus is None or cpus < 1):
        problem = f"needs at least one CPU in {resources_path}.limits; add cpu or use a number"
    elif isinstance(value, int) and gpus and value > gpus and not resources.get("claims"):
        problem = f"is more than the {gpus} GPUs in {resources_path}; request {value} GPUs there or use gpu"
    elif value == "cpu":
        return int(cpus or 0)
    elif isinstance(value, int):
        return value
    else:
        return gpus or 1
    return FieldError("spec.procPerNode", problem, value)

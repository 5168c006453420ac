"""What of a pod template the operator would replace, or cannot have beside its own fields. Pure."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from ddp_operator.api import code_paths, constants
from ddp_operator.api.errors import FieldError
from ddp_operator.api.job import DDPTrainingJob
from ddp_operator.api.pod_fields import POD as _POD
from ddp_operator.api.schema import list_mounts
from ddp_operator.api.spec import Spec
from ddp_operator.features.early_checks.containers import VOLUMES
from ddp_operator.manifests.template import MAX_TEXT, measure_variable

PORT_NAMES: Final = ("rendezvous", "metrics")
"""Names of ports in the Service and in the training container."""
_OPERATOR_FOLDERS = (constants.LAUNCHER_MOUNT_PATH, code_paths.CODE_MOUNT_PATH, code_paths.PACKAGES_MOUNT_PATH)


_INTO_FILE: Final = "put it into a file: use `ddp submit --workdir`, mount a ConfigMap, or copy it into the image"


def check_template(job: DDPTrainingJob, pod: Mapping[str, Any], trainer: Mapping[str, Any]) -> Iterator[FieldError]:
    """Refuse a pod's fields, and those of its training container."""
    spec = job.spec
    yield from _check_pod(pod, spec)
    yield from _check_container_ports(pod, spec)
    for part in ("containers", "initContainers"):
        for index, container in enumerate(pod.get(part) or ()):
            path = f"{_POD}.{part}[{index}]"
            yield from _check_sizes(container, path)
            if container is trainer:
                yield from _check_trainer(trainer, path, job)


def _check_sizes(container: Mapping[str, Any], path: str) -> Iterator[FieldError]:
    """Check the length of each argument and variable: Linux starts no program with a longer one."""
    for part in ("command", "args"):
        for index, argument in enumerate(container.get(part) or ()):
            size = len(argument.encode(errors="replace"))
            if size > MAX_TEXT:
                yield FieldError(f"{path}.{part}[{index}]", _describe_size(size, "argument"))
    yield from _check_variables(container.get("env") or (), f"{path}.env")


def _check_trainer(trainer: Mapping[str, Any], path: str, job: DDPTrainingJob) -> Iterator[FieldError]:
    for index, port in enumerate(trainer.get("ports") or []):
        if port.get("name") in PORT_NAMES:
            message = "is the name of a port that the operator declares; rename it"
            yield FieldError(f"{path}.ports[{index}].name", message, port["name"])
    taken = list_mounts(job)
    for index, mount in enumerate(trainer.get("volumeMounts") or []):
        error = _check_mount_path(mount.get("mountPath"), f"{path}.volumeMounts[{index}].mountPath", job.spec, taken)
        if error is not None:
            yield error


def _check_pod(pod: Mapping[str, Any], spec: Spec) -> Iterator[FieldError]:
    for name, remedy in (
        ("subdomain", "is set by the operator; remove it"),
        ("hostname", "is set by the Job controller; remove it"),
        ("activeDeadlineSeconds", "set spec.activeDeadlineSeconds instead"),
    ):
        if pod.get(name) is not None:
            yield FieldError(f"{_POD}.{name}", remedy, pod[name])
    if pod.get("restartPolicy") not in (None, "Never"):
        message = "must be Never, because spec.recovery configures restarts; remove it"
        yield FieldError(f"{_POD}.restartPolicy", message, pod["restartPolicy"])
    names = [volume["name"] for volume in pod.get("volumes") or []]
    for reserved in VOLUMES:
        if reserved in names:
            path = f"{_POD}.volumes[{names.index(reserved)}].name"
            yield FieldError(path, "is reserved for the operator; choose another name", reserved)


def _check_container_ports(pod: Mapping[str, Any], spec: Spec) -> Iterator[FieldError]:
    """Refuse ports that the operator declares."""
    operator_ports = {spec.rendezvous.port: "spec.rendezvous.port", spec.metrics.port: "spec.metrics.port"}
    for part in ("containers", "initContainers"):
        for container_index, container in enumerate(pod.get(part) or []):
            for index, port in enumerate(container.get("ports") or []):
                number = port.get("containerPort")
                if isinstance(number, int) and number in operator_ports:
                    path = f"{_POD}.{part}[{container_index}].ports[{index}].containerPort"
                    message = (
                        f"is the port of {operator_ports[number]}, which the operator declares; remove it, or change "
                        "one of the two"
                    )
                    yield FieldError(path, message, number)


def _check_mount_path(mount_path: Any, path: str, spec: Spec, taken: Mapping[str, str]) -> FieldError | None:
    """Return the refusal of a mount path that the operator uses. ``path``: of the field; ``taken``: by features."""
    if not isinstance(mount_path, str):
        return None  # the kernel refuses it
    folder = mount_path.rstrip("/")
    if folder in _OPERATOR_FOLDERS:
        return FieldError(path, "is reserved for the operator; choose another path", mount_path)
    if folder in taken:
        message = f"is the folder of {taken[folder]}; remove this mount or change that field"
        return FieldError(path, message, mount_path)
    if spec.checkpoint and spec.checkpoint.claim_name and folder == spec.checkpoint.path.rstrip("/"):
        message = "spec.checkpoint.claimName is mounted there; remove this mount or the claimName"
        return FieldError(path, message, mount_path)
    return None


def _check_variables(variables: Iterable[Mapping[str, Any]], path: str) -> Iterator[FieldError]:
    """Check the length of each variable."""
    for index, variable in enumerate(variables):
        size = measure_variable(variable)
        if size > MAX_TEXT:
            yield FieldError(f"{path}[{index}].value", _describe_size(size, "variable with its name"))


def _describe_size(size: int, subject: str) -> str:
    return f"has {size:,} bytes, and Linux allows {MAX_TEXT:,} for one {subject}; {_INTO_FILE}"

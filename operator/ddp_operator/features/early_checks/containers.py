"""What an API server refuses in the containers of a Job: resources, variables, mounts and privileges. Pure."""

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from ddp_operator.api import constants
from ddp_operator.api.errors import FieldError
from ddp_operator.api.kubeobjects import parse_quantity

VOLUMES: Final = (
    *(constants.LAUNCHER_VOLUME, constants.SHM_VOLUME, constants.CHECKPOINT_VOLUME),
    *(constants.CODE_VOLUME, constants.CODE_FOLDER_VOLUME, constants.PACKAGES_VOLUME),
)
"""Names of the operator's volumes."""
_STANDARD: Final = re.compile(r"cpu|memory|ephemeral-storage|hugepages-.+")


def check_containers(pod: Mapping[str, Any], path: str) -> Iterator[FieldError]:
    """Check resources, variables and mounts of all containers, after the pod's shape. ``path``: that of the pod."""
    volumes = {volume["name"] for volume in pod.get("volumes") or ()} | {*VOLUMES}
    yield from _check_resources(pod.get("resources") or {}, f"{path}.resources")
    for part in ("containers", "initContainers"):
        for index, container in enumerate(pod.get(part) or ()):
            here = f"{path}.{part}[{index}]"
            yield from _check_resources(container.get("resources") or {}, f"{here}.resources")
            yield from _check_privileges(container.get("securityContext") or {}, f"{here}.securityContext")
            for number, variable in enumerate(container.get("env") or ()):
                if not isinstance(variable.get("value"), str | None):
                    yield FieldError(f"{here}.env[{number}].value", "must be a string; quote it", variable["value"])
            for number, mount in enumerate(container.get("volumeMounts") or ()):
                name = mount.get("name")
                if isinstance(name, str) and name not in volumes:
                    message = f"the volume does not exist; add it to {path}.volumes"
                    yield FieldError(f"{here}.volumeMounts[{number}].name", message, name)


def _check_privileges(context: Mapping[str, Any], path: str) -> Iterator[FieldError]:
    """Refuse what the API server refuses when it validates the Job."""
    capabilities = (context.get("capabilities") or {}).get("add") or ()
    is_privileged = context.get("privileged") or "CAP_SYS_ADMIN" in capabilities
    if is_privileged and context.get("allowPrivilegeEscalation") is False:
        message = "must not be false beside privileged or the capability CAP_SYS_ADMIN; remove it"
        yield FieldError(f"{path}.allowPrivilegeEscalation", message)


def _check_resources(resources: Mapping[str, Any], path: str) -> Iterator[FieldError]:
    limits = resources.get("limits") or {}
    for part in ("limits", "requests"):
        for name, value in (resources.get(part) or {}).items():
            here = f"{path}.{part}[{name}]"
            if value is not None and parse_quantity(value) is None:
                yield FieldError(here, "must be a quantity: a number, with or without a suffix, such as 8Gi", value)
            elif "/" not in name and not _STANDARD.fullmatch(name):
                message = (
                    "is not a resource; use cpu, memory, ephemeral-storage or the full name of a device, such as "
                    "nvidia.com/gpu"
                )
                yield FieldError(here, message)
            elif part == "requests" and "/" in name and name not in limits:
                yield FieldError(here, f"devices must be requested as a limit; set it in {path}.limits")
            elif name.startswith("hugepages-") and not {"cpu", "memory"} & {
                *limits,
                *(resources.get("requests") or {}),
            }:
                yield FieldError(
                    here, f"Kubernetes allows huge pages only together with cpu or memory; add one to {path}.limits"
                )

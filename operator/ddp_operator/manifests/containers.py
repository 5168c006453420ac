"""Mistakes inside a container that Kubernetes' schemas do not show: an API server refuses them in words of its own."""

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from ddp_operator import constants
from ddp_operator.api.errors import FieldError
from ddp_operator.kubeobjects.containers import is_quantity

_STANDARD: Final = re.compile(r"cpu|memory|ephemeral-storage|hugepages-.+")
_VOLUMES_OF_OURS: Final = (constants.LAUNCHER_VOLUME, constants.SHM_VOLUME, constants.CHECKPOINT_VOLUME)


def check_containers(pod: Mapping[str, Any], path: str) -> Iterator[FieldError]:
    """Check resources, variables and mounts of every container of a pod whose shape is right; ``path`` is the pod's."""
    volumes = {volume["name"] for volume in pod.get("volumes") or ()} | {*_VOLUMES_OF_OURS}
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

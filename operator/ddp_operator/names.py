"""Names and labels of the children: functions of the resource and the attempt, so that no pass invents one."""

import re

from ddp_operator import constants

CODE_PREFIX = "ddp-code-"
"""What the names of ConfigMaps with code begin with that `ddp submit` has made."""


_ATTEMPT = re.compile(r"[1-9][0-9]*")


def service_name(name: str) -> str:
    """Return the headless Service's name: the resource's own, which makes pod DNS names short."""
    return name


def job_name(name: str, attempt: int) -> str:
    """Return the Job's name for an attempt (1, 2, …; 0: that which fetches the inputs before there is one)."""
    return f"{name}-{attempt or 'inputs'}"


def is_job_name(job: str, name: str) -> bool:
    """Return whether ``job`` could be the Job of an attempt of the resource ``name``."""
    own, _, attempt = job.rpartition("-")
    return own == name and (attempt == "inputs" or _ATTEMPT.fullmatch(attempt) is not None)


def launcher_config_map_name(digest: str) -> str:
    """Return the ConfigMap's name for a launcher of this SHA-256 (hex), which all jobs of a namespace share."""
    return f"ddp-launcher-{digest[:12]}"


def code_config_map_name(digest: str) -> str:
    """Return the name of the ConfigMap with the code of this SHA-256 (hex), for all jobs of a namespace that run it."""
    return f"{CODE_PREFIX}{digest[:16]}"


def pod_host(name: str, attempt: int, index: int | str) -> str:
    """Return the DNS name of one pod, relative to the namespace so that any cluster domain works."""
    return f"{job_name(name, attempt)}-{index}.{service_name(name)}"


POD_SUFFIX = r"(?:[a-z0-9]{5}|r[0-9]+)"
"""A pattern of what follows a pod's index in its name: the Job controller's random letters, or a replacement's."""


def replacement_suffix(serial: int) -> str:
    """Return what follows the index in the name of a lost pod's replacement; ``serial``: those of the job before it."""
    return f"r{serial}"


def is_reserved_variable(name: str) -> bool:
    """Return whether torchrun or the operator owns an environment variable of the training container."""
    return name in constants.RESERVED_ENV or name.startswith(constants.RESERVED_ENV_PREFIXES)


def child_labels(name: str, attempt: int | None = None) -> dict[str, str]:
    """Return the labels that every child carries; without a name those of what all jobs of a namespace share."""
    labels = {constants.LABEL_MANAGED_BY: constants.MANAGED_BY, constants.LABEL_JOB_NAME: name}
    return labels if attempt is None else labels | {constants.LABEL_ATTEMPT: str(attempt)}


def pod_selector(name: str) -> str:
    """Return the label selector of a resource's pods, as text for the scale subresource."""
    return f"{constants.LABEL_JOB_NAME}={name}"

"""Names and labels of child objects, computed from the resource and the attempt alone."""

import re

from ddp_operator.api import constants

_ATTEMPT = re.compile(r"[1-9][0-9]*")


def service_name(name: str) -> str:
    """Return the headless Service's name: that of the resource, which keeps pod DNS names short."""
    return name


def job_name(name: str, attempt: int) -> str:
    """Return the Job's name for an attempt (1, 2, …; 0 fetches the inputs before attempt 1)."""
    return f"{name}-{attempt or 'inputs'}"


def is_attempt_name(job: str, name: str) -> bool:
    """Return whether ``job`` could be the Job of an attempt of the resource ``name``, or fetch its inputs."""
    prefix, _, attempt = job.rpartition("-")
    return prefix == name and (attempt == "inputs" or _ATTEMPT.fullmatch(attempt) is not None)


def rendezvous_secret_name(name: str, uid: str, nonce: str) -> str:
    """Return the name of the Secret of a resource's rendezvous; that of a deleted job of this name has another UID.

    Nobody can create it first, because the nonce is random: the operator may not read which secret it has. Rendered
    manifests have no nonce.
    """
    return "-".join(filter(None, (name, "rendezvous", uid, nonce)))


def launcher_config_map_name(digest: str) -> str:
    """Return the ConfigMap's name for a launcher of this SHA-256 (hex), which all jobs of a namespace share."""
    return f"ddp-launcher-{digest[:12]}"


def pod_host(name: str, attempt: int, index: int | str) -> str:
    """Return the DNS name of one pod, relative to the namespace so that any cluster domain works."""
    return f"{job_name(name, attempt)}-{index}.{service_name(name)}"


POD_SUFFIX = r"(?:[a-z0-9]{5}|r[0-9]+)"
"""Pattern of the suffix after a pod's index: the Job controller's random letters, or that of a replacement."""


def replacement_suffix(serial: int) -> str:
    """Return the suffix after the index in the name of a replacement pod; ``serial``: replacements before it."""
    return f"r{serial}"


def is_reserved_variable(name: str) -> bool:
    """Return whether torchrun or the operator owns an environment variable of the training container."""
    return name in constants.RESERVED_ENV or name.startswith(constants.RESERVED_ENV_PREFIXES)


def child_labels(name: str, attempt: int | None = None) -> dict[str, str]:
    """Return the labels of every child object of a resource; with an attempt, of the child objects of that attempt."""
    labels = {constants.LABEL_MANAGED_BY: constants.MANAGED_BY, constants.LABEL_JOB_NAME: name}
    return labels if attempt is None else labels | {constants.LABEL_ATTEMPT: str(attempt)}


def pod_selector(name: str) -> str:
    """Return the label selector of a resource's pods, as text for the scale subresource."""
    return f"{constants.LABEL_JOB_NAME}={name}"

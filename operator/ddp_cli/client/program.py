"""Build the resource of a job that runs a script or a function."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from ddp_operator.api import constants

IMAGE: Final = "docker.io/pytorch/pytorch:2.9.0-cuda12.8-cudnn9-runtime"
_LONGEST_NAME: Final = 40


def job_name(stem: str) -> str:
    """Return a valid Kubernetes name: lower-case letters, digits and dashes, starting with a letter."""
    name = re.sub(r"[^a-z0-9]+", "-", stem.lower()).strip("-")[:_LONGEST_NAME].strip("-")
    return name if name[:1].isalpha() else f"job-{name}".rstrip("-")


def build_job(
    name: str,
    command: Sequence[str],
    *,
    nodes: int,
    procs: int | str,
    gpus: int,
    cpus: int | None,
    image: str,
    env: Mapping[str, str],
    checkpoint_claim: str | None,
    spec: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the resource. ``spec``: further fields, which take precedence."""
    container: dict[str, Any] = {
        "name": "trainer",
        "image": image,
        "command": list(command),
        "env": [{"name": key, "value": str(value)} for key, value in env.items()],
    }
    limits = {"nvidia.com/gpu": gpus, "cpu": cpus}
    if any(limits.values()):
        container["resources"] = {"limits": {key: str(count) for key, count in limits.items() if count}}
    fields: dict[str, Any] = {"nodes": nodes, "procPerNode": procs}
    if checkpoint_claim is not None:
        fields["checkpoint"] = {"path": "/checkpoints", "claimName": checkpoint_claim}
    fields["template"] = {"spec": {"containers": [container]}}
    return {
        "apiVersion": constants.API_VERSION,
        "kind": constants.KIND,
        "metadata": {"name": name},
        "spec": {**fields, **spec},
    }

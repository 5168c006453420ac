"""What copies of checkpoints in memory and experiment trackers add to the training container."""

import posixpath
from collections.abc import Iterator, Mapping
from typing import Any, Final

from ddp_operator.api import constants
from ddp_operator.api.errors import FieldError
from ddp_operator.api.job import DDPTrainingJob
from ddp_operator.api.kubeobjects import parse_quantity
from ddp_operator.api.spec import CheckpointMemory, Spec

ENV_TENSORBOARD: Final = "TENSORBOARD_LOGGING_DIR"  # the name of Hugging Face's Trainer


def build_memory_environment(job: DDPTrainingJob, attempt: int) -> dict[str, str]:
    """Return the variables that ``ddp_sdk.memory`` reads; none if the job disables copies in memory."""
    memory = _find_memory(job.spec)
    if memory.enabled is False:
        return {}
    env = {constants.ENV_MEMORY_DIR: f"/dev/shm/ddp-memory-{job.uid}-{attempt}"}
    if memory.interval is not None:
        env[constants.ENV_MEMORY_INTERVAL] = str(memory.interval)
    return env


def find_shm_limit(spec: Spec, limits: Mapping[str, Any]) -> str | None:
    """Return the size of /dev/shm as a quantity; None: Kubernetes' default. ``limits``: of the training container.

    With copies in memory it is at most half of the container's memory. If the copies do not fit, the script gets an
    error that it handles, and not the kernel's SIGKILL for the container.
    """
    limit = parse_quantity(limits.get("memory"))
    if spec.shm.size_limit or not _find_memory(spec).enabled or limit is None:
        return spec.shm.size_limit
    return str(int(limit // 2))


def check_memory(spec: Spec, limits: Mapping[str, Any]) -> Iterator[FieldError]:
    """Refuse shared memory that takes all of the container's memory."""
    size = parse_quantity(spec.shm.size_limit) if spec.shm.size_limit else None
    limit = parse_quantity(limits.get("memory"))
    if not _find_memory(spec).enabled or size is None or limit is None or size < limit:
        return
    message = (
        f"must be less than the container's memory limit, which is {limits['memory']}, because shared memory counts "
        "towards that limit and spec.checkpoint.memory.enabled fills it; lower it or raise the limit"
    )
    yield FieldError("spec.shm.sizeLimit", message, spec.shm.size_limit)


def _find_memory(spec: Spec) -> CheckpointMemory:
    memory = spec.checkpoint.memory if spec.checkpoint else None
    return memory or CheckpointMemory()


def build_tracking_environment(job: DDPTrainingJob) -> dict[str, str]:
    """Return the variables. Variables of the template with the same names take precedence."""
    tracking = job.spec.tracking
    if tracking is None:
        return {}
    run = job.tracking_run
    name = tracking.run_name or job.name
    env: dict[str, str | None] = {}
    if tracking.tensorboard is not None:
        env[ENV_TENSORBOARD] = posixpath.join(tracking.tensorboard.path, run)
    if tracking.mlflow is not None:
        env["MLFLOW_TRACKING_URI"] = tracking.mlflow.tracking_uri
        env["MLFLOW_EXPERIMENT_NAME"] = tracking.mlflow.experiment
        env["MLFLOW_RUN_NAME"] = name
    if tracking.wandb is not None:
        env |= {"WANDB_RUN_ID": run, "WANDB_RESUME": "allow", "WANDB_NAME": name, "WANDB_RUN_GROUP": name}
        env["WANDB_PROJECT"] = tracking.wandb.project
        env["WANDB_ENTITY"] = tracking.wandb.entity
        env["WANDB_BASE_URL"] = tracking.wandb.base_url
    return {variable: value for variable, value in env.items() if value}


def list_tracking_secrets(job: DDPTrainingJob) -> list[dict[str, Any]]:
    """Return the Secrets with the trackers' credentials as entries of a container's ``envFrom``, each once."""
    tracking = job.spec.tracking
    if tracking is None:
        return []
    names: list[str] = []
    for tracker in (tracking.mlflow, tracking.wandb):
        if tracker is not None and tracker.secret_ref is not None and tracker.secret_ref.name not in names:
            names.append(tracker.secret_ref.name)
    return [{"secretRef": {"name": name}} for name in names]

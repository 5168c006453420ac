"""Environment variables of the training container for ``spec.tracking``, with the names that the trackers read."""

import posixpath
from typing import Any

from ddp_operator.api.job import DDPTrainingJob

ENV_TENSORBOARD = "TENSORBOARD_LOGGING_DIR"  # the name of Hugging Face's Trainer


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

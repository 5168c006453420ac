"""``spec.tracking`` as variables of the training container, under the names that the trackers read themselves."""

import posixpath
from typing import Any

from ddp_operator.api.job import DDPTrainingJob

ENV_TENSORBOARD = "TENSORBOARD_LOGGING_DIR"  # that of Hugging Face's Trainer


def tracking_environment(job: DDPTrainingJob) -> dict[str, str]:
    """Return the variables, which the user's own of the same names override."""
    tracking, run = job.spec.tracking, job.tracking_run
    if tracking is None:
        return {}
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


def tracking_secrets(job: DDPTrainingJob) -> list[dict[str, Any]]:
    """Return the sources of credentials, as in a container's ``envFrom``."""
    tracking = job.spec.tracking
    trackers = (tracking.mlflow, tracking.wandb) if tracking is not None else ()
    named = dict.fromkeys(one.secret_ref.name for one in trackers if one is not None and one.secret_ref is not None)
    return [{"secretRef": {"name": name}} for name in named]

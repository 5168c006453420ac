"""``spec.tracking``: the experiment trackers that the ranks report to, as one run over all attempts of a job."""

from typing import Annotated

from msgspec import Meta

from ddp_operator.api.fields import SpecFields


class SecretReference(SpecFields, frozen=True, kw_only=True):
    """A Secret of the job's namespace. Its keys become environment variables of the training container."""

    name: Annotated[str, Meta(description="Name of the Secret.")]


class TensorBoard(SpecFields, frozen=True, kw_only=True):
    """Event files for TensorBoard."""

    path: Annotated[
        str,
        Meta(
            description="Absolute path in the container, on a volume that outlives the pods. Each run gets its own "
            "folder in it; the script reads its path from TENSORBOARD_LOGGING_DIR."
        ),
    ]


class MLflow(SpecFields, frozen=True, kw_only=True):
    """A run in MLflow. The launcher finds or creates it before the ranks start."""

    tracking_uri: Annotated[str, Meta(description="MLFLOW_TRACKING_URI, such as http://mlflow.team:5000.")]
    experiment: Annotated[
        str | None,
        Meta(description="MLFLOW_EXPERIMENT_NAME; created if it does not exist. Unset: MLflow's default."),
    ] = None
    secret_ref: Annotated[
        SecretReference | None,
        Meta(description="Credentials, such as MLFLOW_TRACKING_TOKEN."),
    ] = None


class WandB(SpecFields, frozen=True, kw_only=True):
    """A run in Weights & Biases."""

    project: Annotated[str | None, Meta(description="WANDB_PROJECT.")] = None
    entity: Annotated[str | None, Meta(description="WANDB_ENTITY: the team or user that owns the project.")] = None
    base_url: Annotated[str | None, Meta(description="WANDB_BASE_URL of a self-hosted server.")] = None
    secret_ref: Annotated[SecretReference | None, Meta(description="Credentials, such as WANDB_API_KEY.")] = None


class Tracking(SpecFields, frozen=True, kw_only=True):
    """Experiment trackers. All attempts, pods and restarts of the job are one run in each of them. Environment
    variables in the template take precedence."""

    run_name: Annotated[str | None, Meta(description="Name of the run. Unset: the job's name.")] = None
    run_id: Annotated[
        str | None,
        Meta(
            description="Identity of the run: at most 64 letters, digits, - and _. Set it to status.tracking.runId of "
            "an earlier job to continue that job's run. Unset: the job's name and UID, so that a recreated job starts "
            "a new run."
        ),
    ] = None
    tensorboard: TensorBoard | None = None
    mlflow: MLflow | None = None
    wandb: WandB | None = None

"""``spec.tracking``: which trackers of experiments the ranks report to, as one run over all attempts of a job."""

from typing import Annotated

from msgspec import Meta, Struct


class _Fields(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel", omit_defaults=True):
    """Common behaviour: as in ``spec``."""


class SecretReference(_Fields, frozen=True, kw_only=True):
    """A Secret of the job's namespace. Its keys become environment variables of the training container."""

    name: Annotated[str, Meta(description="Name of the Secret.")]


class TensorBoard(_Fields, frozen=True, kw_only=True):
    """Event files for TensorBoard."""

    path: Annotated[
        str,
        Meta(
            description="Absolute path in the container, on a volume that outlives the pods. Each run has a folder of "
            "its own in it, which the script finds in TENSORBOARD_LOGGING_DIR."
        ),
    ]


class MLflow(_Fields, frozen=True, kw_only=True):
    """A run of MLflow, which the launcher finds or creates before the ranks start."""

    tracking_uri: Annotated[str, Meta(description="MLFLOW_TRACKING_URI, such as http://mlflow.team:5000.")]
    experiment: Annotated[
        str | None, Meta(description="MLFLOW_EXPERIMENT_NAME; created if it is not there. Unset: MLflow's default.")
    ] = None
    secret_ref: Annotated[
        SecretReference | None,
        Meta(description="Credentials, such as MLFLOW_TRACKING_TOKEN."),
    ] = None


class WandB(_Fields, frozen=True, kw_only=True):
    """A run of Weights & Biases."""

    project: Annotated[str | None, Meta(description="WANDB_PROJECT.")] = None
    entity: Annotated[str | None, Meta(description="WANDB_ENTITY: the team or user whose project it is.")] = None
    base_url: Annotated[str | None, Meta(description="WANDB_BASE_URL of a server of your own.")] = None
    secret_ref: Annotated[SecretReference | None, Meta(description="Credentials, such as WANDB_API_KEY.")] = None


class Tracking(_Fields, frozen=True, kw_only=True):
    """Trackers of experiments. All attempts, pods and restarts of the job are one run there; variables that the
    template sets itself win."""

    run_name: Annotated[str | None, Meta(description="What the run is called. Unset: the job's name.")] = None
    run_id: Annotated[
        str | None,
        Meta(
            description="Identity of the run: letters, digits, - and _, at most 64. Set it to go on with the run of "
            "an earlier job (status.tracking.runId). Unset: name and UID, so that a job that is created again is "
            "another run."
        ),
    ] = None
    tensorboard: TensorBoard | None = None
    mlflow: MLflow | None = None
    wandb: WandB | None = None

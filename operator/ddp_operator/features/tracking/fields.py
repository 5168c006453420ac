"""``spec.tracking``: its rules and checks, and the variables of the trackers in the training container."""

import posixpath
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Final

from msgspec import Meta

from ddp_operator.api.cel_rule import CelRule
from ddp_operator.api.constants import ENV_TRACKING_RUN
from ddp_operator.api.errors import FieldError
from ddp_operator.api.former import TEXT, FormerField, describe_members
from ddp_operator.api.job import DDPTrainingJob
from ddp_operator.api.parts import CheckedTemplate, PodAddition
from ddp_operator.api.rule_builders import require
from ddp_operator.api.schema import OwnFields
from ddp_operator.api.spec import SecretReference, SpecFields
from ddp_operator.manifests.template import check_url

ENV_TENSORBOARD: Final = "TENSORBOARD_LOGGING_DIR"  # the name of Hugging Face's Trainer


class MLflow(SpecFields, frozen=True, kw_only=True):
    """A run in MLflow, which the launcher finds or creates."""

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
    """Experiment trackers: all attempts of the job are one run in each (docs/monitoring.md). Variables in the
    template take precedence."""

    run_name: Annotated[str | None, Meta(description="Unset: the job's name.")] = None
    run_id: Annotated[
        str | None,
        Meta(
            description="Identity of the run: at most 64 letters, digits, - and _. Set it to "
            "status.tracking.runId of an earlier job to continue its run. Unset: the job's name and "
            "UID."
        ),
    ] = None
    tensorboard_path: Annotated[
        str | None,
        Meta(
            description="Event files for TensorBoard: an absolute path on a volume that outlives the pods. Each run "
            "gets its own folder in it (TENSORBOARD_LOGGING_DIR)."
        ),
    ] = None
    mlflow: MLflow | None = None
    wandb: WandB | None = None


class TrackingFields(SpecFields, frozen=True, kw_only=True):
    """The part of this feature in the spec."""

    tracking: Tracking | None = None


def _check(job: DDPTrainingJob, pod: Mapping[str, Any], trainer: Mapping[str, Any]) -> Iterator[FieldError]:
    """Refuse passwords in URLs."""
    tracking = FIELDS.read(job.spec).tracking
    if tracking is None:
        return
    if tracking.mlflow is not None:
        path = "spec.tracking.mlflow"
        yield from check_url(f"{path}.trackingUri", tracking.mlflow.tracking_uri, f"{path}.secretRef")
    if tracking.wandb is not None:
        path = "spec.tracking.wandb"
        yield from check_url(f"{path}.baseUrl", tracking.wandb.base_url, f"{path}.secretRef")


def find_run(job: DDPTrainingJob) -> str:
    """Return the identity of the job's run in trackers; empty without tracking.

    The UID distinguishes the run from that of a later job with the same name.
    """
    tracking = FIELDS.read(job.spec).tracking
    if tracking is None:
        return ""
    return tracking.run_id or f"{job.name}-{job.uid[:8]}"


def _add_variables(job: DDPTrainingJob, template: CheckedTemplate, attempt: int) -> PodAddition:
    """Return the variables of the trackers, and the Secrets with their credentials."""
    tracking = FIELDS.read(job.spec).tracking
    if tracking is None:
        return PodAddition()
    run = find_run(job)
    name = tracking.run_name or job.name
    env: dict[str, str | None] = {}
    if tracking.tensorboard_path is not None:
        env[ENV_TENSORBOARD] = posixpath.join(tracking.tensorboard_path, run)
    if tracking.mlflow is not None:
        env["MLFLOW_TRACKING_URI"] = tracking.mlflow.tracking_uri
        env["MLFLOW_EXPERIMENT_NAME"] = tracking.mlflow.experiment
        env["MLFLOW_RUN_NAME"] = name
    if tracking.wandb is not None:
        env |= {"WANDB_RUN_ID": run, "WANDB_RESUME": "allow", "WANDB_NAME": name, "WANDB_RUN_GROUP": name}
        env["WANDB_PROJECT"] = tracking.wandb.project
        env["WANDB_ENTITY"] = tracking.wandb.entity
        env["WANDB_BASE_URL"] = tracking.wandb.base_url
    references = [tracker.secret_ref for tracker in (tracking.mlflow, tracking.wandb) if tracker is not None]
    return PodAddition(
        variables={ENV_TRACKING_RUN: run},
        defaults={variable: value for variable, value in env.items() if value},
        secrets=tuple(dict.fromkeys(reference.name for reference in references if reference is not None)),
    )


def _take_over_tensorboard(tensorboard: Any, _: Mapping[str, Any]) -> Mapping[str, Any]:
    if not isinstance(tensorboard, Mapping) or "path" not in tensorboard:
        return {}
    return {"tracking": {"tensorboardPath": tensorboard["path"]}}


FIELDS: Final = OwnFields(
    "tracking",
    TrackingFields,
    rules=(
        require(
            "tracking",
            "has(self.tracking.tensorboardPath) || has(self.tracking.mlflow) || has(self.tracking.wandb)"
            " || has(self.tracking.tensorboard)",  # deprecated
            "needs a tracker; add tensorboardPath, mlflow or wandb, or remove tracking",
        ),
        CelRule(
            "spec.tracking.runId",
            "self.matches('^[A-Za-z0-9_-]{1,64}$')",
            "must be 1 to 64 letters, digits, '-' and '_'; leave it out to use the job's name and UID",
        ),
        CelRule(
            "spec.tracking.tensorboardPath",
            "self.startsWith('/')",
            "must be an absolute path on a volume, such as /ckpt/tensorboard; add the leading slash",
        ),
    ),
    fixed_once="run",
    check=_check,
    pod=_add_variables,
    former=(
        FormerField(
            "tracking.tensorboard",
            "write tracking.tensorboardPath with the value of its path",
            describe_members(path={**TEXT, "pattern": "^/"}),
            _take_over_tensorboard,
        ),
    ),
)

"""The trackers' own variables, from spec.tracking."""

from __future__ import annotations

from typing import Any

from ddp_operator.manifests.children import build_children
from tests.support.builders import UID, job, template, trainer

TRACKING = {
    "tensorboardPath": "/ckpt/tb",
    "mlflow": {"trackingUri": "http://mlflow", "experiment": "digits", "secretRef": {"name": "keys"}},
    "wandb": {"project": "p", "entity": "e", "baseUrl": "https://wandb.team", "secretRef": {"name": "keys"}},
}
PREFIXES = ("DDP_TRACKING", "TENSORBOARD_", "MLFLOW_", "WANDB_")


def container(attempt: int = 1, **spec: Any) -> dict[str, Any]:
    children = build_children(job("digits", **spec), attempt=attempt, nodes=2)
    made: dict[str, Any] = next(c for c in children if c["kind"] == "Job")["spec"]["template"]["spec"]["containers"][0]
    return made


def variables(made: dict[str, Any]) -> dict[str, str]:
    return {item["name"]: item["value"] for item in made["env"] if item["name"].startswith(PREFIXES)}


def test_every_attempt_has_same_tracker_run() -> None:
    run = f"digits-{UID[:8]}"
    assert variables(container(tracking=TRACKING)) == {
        "DDP_TRACKING_RUN": run,
        "TENSORBOARD_LOGGING_DIR": f"/ckpt/tb/{run}",
        "MLFLOW_TRACKING_URI": "http://mlflow", "MLFLOW_EXPERIMENT_NAME": "digits", "MLFLOW_RUN_NAME": "digits",
        "WANDB_RUN_ID": run, "WANDB_RESUME": "allow", "WANDB_NAME": "digits", "WANDB_RUN_GROUP": "digits",
        "WANDB_PROJECT": "p", "WANDB_ENTITY": "e", "WANDB_BASE_URL": "https://wandb.team",
    }  # fmt: skip
    assert variables(container(3, tracking=TRACKING)) == variables(container(tracking=TRACKING))


def test_only_configured_trackers_are_set() -> None:
    assert variables(container()) == {}
    assert "envFrom" not in container(tracking={"wandb": {}})
    assert set(variables(container(tracking={"wandb": {}}))) == {
        "DDP_TRACKING_RUN", "WANDB_RUN_ID", "WANDB_RESUME", "WANDB_NAME", "WANDB_RUN_GROUP",
    }  # fmt: skip


def test_users_own_variables_win_and_secret_is_named_once_before_his_own() -> None:
    own = trainer(env=[{"name": "WANDB_NAME", "value": "mine"}], envFrom=[{"configMapRef": {"name": "settings"}}])
    made = container(tracking=TRACKING, template=template(own))
    assert [item for item in made["env"] if item["name"] == "WANDB_NAME"] == [{"name": "WANDB_NAME", "value": "mine"}]
    assert made["envFrom"] == [{"secretRef": {"name": "keys"}}, {"configMapRef": {"name": "settings"}}]


def test_name_and_identity_can_be_chosen() -> None:
    result = variables(container(tracking={**TRACKING, "runName": "third try", "runId": "third"}))
    assert result["WANDB_NAME"] == result["MLFLOW_RUN_NAME"] == "third try"
    assert result["WANDB_RUN_ID"] == result["DDP_TRACKING_RUN"] == "third"
    assert result["TENSORBOARD_LOGGING_DIR"] == "/ckpt/tb/third"

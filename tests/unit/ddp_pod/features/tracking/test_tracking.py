"""All attempts of a job share one run in experiment trackers."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ddp_operator.features.tracking import list_links
from ddp_pod.base.files import write_json
from ddp_pod.contract.report import TrackedRun
from ddp_pod.features.tracking import runs as tracking
from ddp_pod.features.tracking.runs import (
    MlflowRun,
    find_run,
    is_tracked,
    list_tracked_runs,
    mlflow_url,
    set_rank_variables,
    start_tracking,
    wandb_url,
)
from tests.support.builders import decode, page

RUN = "digits-1a2b3c4d"
SERVER = "http://user:secret@mlflow.team:5000/base/"


@pytest.fixture(autouse=True)
def env(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    variables = {"DDP_TRACKING_RUN": RUN, "DDP_RUNTIME_DIR": str(tmp_path), "WANDB_RUN_ID": RUN, "RANK": "0"}
    monkeypatch.setattr(tracking.os, "environ", variables)
    return variables


class FakeMlflowClient:
    """The methods of MLflow's client that the launcher calls."""

    def __init__(self) -> None:
        self.experiments: dict[str, str] = {}
        self.runs: list[tuple[str, dict[str, str], str]] = []

    def get_experiment_by_name(self, name: str) -> Any:
        return SimpleNamespace(experiment_id=self.experiments[name]) if name in self.experiments else None

    def create_experiment(self, name: str) -> str:
        self.experiments[name] = str(len(self.experiments) + 1)
        return self.experiments[name]

    def search_runs(self, experiments: list[str], filter: str, max_results: int) -> list[Any]:
        tag = filter.removeprefix("tags.`ddp.run` = '").removesuffix("'")
        matches = []
        for number, (experiment, tags, _) in enumerate(self.runs):
            if experiment in experiments and tags["ddp.run"] == tag:
                matches.append(SimpleNamespace(info=SimpleNamespace(run_id=f"run-{number}")))
        return matches[:max_results]

    def create_run(self, experiment: str, run_name: str, tags: dict[str, str]) -> Any:
        self.runs.append((experiment, tags, run_name))
        return self.search_runs([experiment], f"tags.`ddp.run` = '{tags['ddp.run']}'", 1)[0]


def test_later_attempt_finds_run_of_first_attempt() -> None:
    client = FakeMlflowClient()
    env = {"DDP_TRACKING_RUN": RUN, "MLFLOW_EXPERIMENT_NAME": "digits", "MLFLOW_RUN_NAME": "mine"}
    first = find_run(client, env)
    assert find_run(client, env) == first == MlflowRun("run-0", "1")
    assert find_run(client, env | {"DDP_TRACKING_RUN": "other"}).run == "run-1"
    assert client.runs[0] == ("1", {"ddp.run": RUN}, "mine")
    assert find_run(client, {"DDP_TRACKING_RUN": RUN}) == MlflowRun("run-2", "0")  # MLflow's default


def test_real_mlflow_store_returns_same_run(env: dict[str, str], tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow", reason="mlflow is not installed")
    env["MLFLOW_ALLOW_FILE_STORE"] = "true"
    client = mlflow.MlflowClient((tmp_path / "runs").as_uri())
    variables = {"DDP_TRACKING_RUN": RUN, "MLFLOW_EXPERIMENT_NAME": "digits", "MLFLOW_RUN_NAME": "mine"}
    first = find_run(client, variables)
    assert find_run(client, variables) == first
    assert client.get_run(first.run).info.run_name == "mine"


def test_rank_0_continues_job_runs_and_other_ranks_get_own_wandb_run(env: dict[str, str], tmp_path: Path) -> None:
    env["MLFLOW_TRACKING_URI"] = "http://mlflow"
    write_json(str(tmp_path / "mlflow-run.json"), {"run": "f00", "experiment": "1"})
    set_rank_variables()
    assert (env["MLFLOW_RUN_ID"], env["WANDB_RUN_ID"]) == ("f00", RUN)
    del env["MLFLOW_RUN_ID"]
    env["RANK"] = "3"
    set_rank_variables()
    assert env["WANDB_RUN_ID"] == f"{RUN}-3"
    assert "MLFLOW_RUN_ID" not in env


def test_variables_of_user_are_kept(env: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    env |= {"MLFLOW_TRACKING_URI": "http://mlflow", "MLFLOW_RUN_ID": "mine", "WANDB_RUN_ID": "mine", "RANK": "1"}
    before = dict(env)
    set_rank_variables()
    start_tracking(str(tmp_path))  # starts no process
    assert env == before
    assert not list(tmp_path.iterdir())


def test_image_without_mlflow_logs_the_problem_and_rank_continues(
    env: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    env["MLFLOW_TRACKING_URI"] = "http://mlflow"
    monkeypatch.setattr(tracking, "set_parent_death_signal", lambda pid: None)
    monkeypatch.setitem(tracking.sys.modules, "mlflow", None)
    assert tracking.main(["1", str(tmp_path / "mlflow-run.json")]) == 0
    set_rank_variables()
    assert "MLFLOW_RUN_ID" not in env
    assert "cannot continue the job's run (ModuleNotFoundError: " in capsys.readouterr().err


def test_page_of_pod_0_links_runs_without_password(env: dict[str, str], tmp_path: Path) -> None:
    env |= {"MLFLOW_TRACKING_URI": SERVER, "WANDB_ENTITY": "team", "WANDB_PROJECT": "a b"}
    write_json(str(tmp_path / "mlflow-run.json"), {"run": "f00", "experiment": "7"})
    mlflow = "http://mlflow.team:5000/base/#/experiments/7/runs/f00"
    wandb = f"https://wandb.ai/team/a%20b/runs/{RUN}"
    assert list_tracked_runs(str(tmp_path)) == (TrackedRun("mlflow", mlflow), TrackedRun("wandb", wandb))
    assert is_tracked()
    env["JOB_COMPLETION_INDEX"] = "1"
    assert not is_tracked()
    assert list_links(decode(page(runs=[{"tracker": "x", "url": "javascript:alert(1)"}]))) == ()


def test_run_without_known_web_page_is_not_linked() -> None:
    assert mlflow_url({"MLFLOW_TRACKING_URI": "sqlite:///runs.db"}, MlflowRun("f00", "7")) is None
    assert mlflow_url({"MLFLOW_TRACKING_URI": SERVER}, MlflowRun()) is None
    known = {"WANDB_PROJECT": "p", "WANDB_RUN_ID": RUN, "WANDB_ENTITY": "e"}
    assert wandb_url({**known, "WANDB_BASE_URL": "https://wandb.team/"}) == f"https://wandb.team/e/p/runs/{RUN}"
    assert wandb_url({**known, "WANDB_MODE": "offline"}) is None
    assert wandb_url({**known, "WANDB_ENTITY": ""}) is None

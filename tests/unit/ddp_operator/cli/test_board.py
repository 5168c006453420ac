"""`ddp board`: which of a job's trackers it can open, and how."""

from __future__ import annotations

import importlib.util
import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from ddp_operator.cli import board, main
from ddp_operator.cli.board import build_commands, find_events
from ddp_operator.cli.io import CommandError
from tests.support.builders import resource, template, trainer

TENSORBOARD = {"tensorboard": {"path": "/ckpt/tb"}}
CLAIM = {"path": "/ckpt", "claimName": "weights"}


def write_run(folder: Path, **spec: Any) -> Path:
    job = resource("digits", **spec)
    job["status"] = {
        "phase": "Succeeded",
        "tracking": {"runId": "r", "links": ["https://mlflow/#/experiments/1/runs/f"]},
    }
    run = folder / "ddp-runs" / "digits-20260101-120000"
    run.mkdir(parents=True)
    (run / "status.yaml").write_text(json.dumps(job))
    return run


def test_links_store_in_files_and_how_to_get_tensorboard_are_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    write_run(tmp_path, checkpoint=CLAIM, tracking={**TENSORBOARD, "mlflow": {"trackingUri": "sqlite:////tmp/m.db"}})
    events = tmp_path / "ddp-runs" / "claims" / "weights" / "tb" / "r" / "events.out.tfevents.1.host"
    events.parent.mkdir(parents=True)
    events.touch()
    assert main(["board", "digits"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "https://mlflow/#/experiments/1/runs/f",
        "mlflow ui --backend-store-uri sqlite:////tmp/m.db",
        "pip install tensorboard; tensorboard --logdir ddp-runs/claims/weights/tb/r --port 6006",
    ]


def test_run_without_tracker_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    run = write_run(tmp_path)
    (run / "status.yaml").write_text(json.dumps(resource("digits")))
    assert main(["board"]) == 3
    assert "digits-20260101-120000 has neither a link" in capsys.readouterr().err


def test_failure_of_tensorboard_shows_its_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(board.sys, "executable", "/bin/false")
    with pytest.raises(CommandError, match="TensorBoard failed: exit code 1"):
        board._start(tmp_path, 6006, [])


def test_several_event_folders_are_shown_from_common_parent(tmp_path: Path) -> None:
    run = write_run(tmp_path, checkpoint=CLAIM)
    assert find_events(run, resource(checkpoint=CLAIM)) is None
    for name in ("a", "b"):
        folder = run.parent / "claims" / "weights" / "tb" / name
        folder.mkdir(parents=True)
        (folder / "events.out.tfevents.1").touch()
    assert find_events(run, resource(checkpoint=CLAIM)) == run.parent / "claims" / "weights" / "tb"


def test_pod_of_jobs_image_shows_folder_on_its_claim() -> None:
    job = resource("digits", namespace="ml", checkpoint=CLAIM, tracking=TENSORBOARD)
    _, run, _, forward = build_commands(job, 7000)
    words = shlex.split(run)
    assert words[:6] == ["kubectl", "run", "digits-board", "-n", "ml", "--rm"]
    spec = json.loads(words[-1].removeprefix("--overrides="))["spec"]
    assert spec["volumes"] == [{"name": "checkpoint", "persistentVolumeClaim": {"claimName": "weights"}}]
    (container,) = spec["containers"]
    assert (container["name"], container["image"]) == ("digits-board", "example.com/train:1")
    assert container["volumeMounts"] == [{"name": "checkpoint", "mountPath": "/ckpt", "readOnly": True}]
    assert container["command"][3:5] == ["--logdir", "/ckpt/tb"]
    assert forward.strip() == "kubectl port-forward -n ml pod/digits-board 7000:6006"


@pytest.mark.parametrize("volumes", [[], [{"name": "v", "emptyDir": {}}]])
def test_folder_deleted_with_pods_is_refused(volumes: Any) -> None:
    own = template(trainer(volumeMounts=[{"name": volume["name"], "mountPath": "/ckpt"} for volume in volumes]))
    own["spec"]["volumes"] = volumes
    with pytest.raises(CommandError, match="/ckpt/tb is on no volume that outlives the pods"):
        list(build_commands(resource(tracking=TENSORBOARD, template=own), 6006))

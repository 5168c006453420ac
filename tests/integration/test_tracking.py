"""A restarted run in the trackers themselves: each has one run, with the metrics of both starts."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.support.ddp_run import DdpRun, manifest

pytestmark = [pytest.mark.process, pytest.mark.nightly]

SCRIPT = """
import os
from pathlib import Path
import mlflow, wandb
from torch.utils.tensorboard import SummaryWriter
saved = Path(os.environ["DDP_CHECKPOINT_DIR"], "step")
start = int(saved.read_text()) if saved.exists() else 0
events = SummaryWriter(os.environ["TENSORBOARD_LOGGING_DIR"], purge_step=start + 1)
mlflow.start_run()
run = wandb.init()
for step in range(start + 1, 9):
    events.add_scalar("loss", 1 / step, step)
    events.flush()
    mlflow.log_metric("loss", 1 / step, step=step)
    run.log({"loss": 1 / step}, step=step)
    if step == 3:
        saved.write_text("3")
    if step == 5 and not start:
        raise RuntimeError("once")
run.finish()
"""


def test_restarted_job_is_one_run_in_each_tracker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = "tensorboard.backend.event_processing.event_accumulator"
    accumulator = pytest.importorskip(reader, reason="tensorboard is not installed")
    mlflow = pytest.importorskip("mlflow", reason="mlflow is not installed")
    pytest.importorskip("wandb", reason="wandb is not installed")
    store = (tmp_path / "mlflow").as_uri()
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    text = manifest(
        [sys.executable, "-c", SCRIPT],
        nodes=1,
        env={"WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path)},
        checkpoint={"path": "/ckpt", "claimName": "weights"},
        tracking={"tensorboardPath": "/ckpt/tb", "mlflow": {"trackingUri": store}, "wandb": {"project": "p"}},
    )
    with DdpRun(tmp_path, text) as run:
        assert run.wait() == 0, run.output
        status = run.read_status()
    assert status["attempt"] == 2
    identity = status["tracking"]["runId"]
    folder = tmp_path / "ddp-runs" / "claims" / "weights" / "tb" / identity
    events = accumulator.EventAccumulator(str(folder)).Reload()
    assert [Scalar.step for Scalar in events.Scalars("loss")] == list(range(1, 9))
    client = mlflow.MlflowClient(store)
    (kept,) = client.search_runs(["0"])
    history = client.get_metric_history(kept.info.run_id, "loss")
    assert kept.data.tags["ddp.run"] == identity
    assert [item.step for item in history] == [1, 2, 3, 4, 5, 4, 5, 6, 7, 8]
    offline = sorted((tmp_path / "wandb").glob("offline-run-*"))
    assert len(offline) == 2
    assert all(item.name.endswith(f"-{identity}") for item in offline)

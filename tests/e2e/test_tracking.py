"""One run in TensorBoard and MLflow through a lost pod and a suspension."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from ddp_operator.api.constants import API_VERSION, KIND

from .conftest import UserNamespace
from .test_code import METRICS, ddp

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        "DDP_E2E_TRACKING_IMAGE" not in os.environ,
        reason="DDP_E2E_TRACKING_IMAGE names no image with PyTorch, tensorboard and mlflow",
    ),
]

SCRIPT = """
import json, os, time
from pathlib import Path
import mlflow
import torch.distributed as dist
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter
dist.init_process_group("gloo")
rank, saved = dist.get_rank(), Path(os.environ["DDP_CHECKPOINT_DIR"], "step")
first = int(saved.read_text()) + 1 if saved.exists() else 1
dist.barrier()
if rank == 0:
    events = SummaryWriter(os.environ["TENSORBOARD_LOGGING_DIR"], purge_step=first)
    mlflow.start_run()
for step in range(first, 101):
    if rank == 0:
        events.add_scalar("loss", 1 / step, step)
        events.flush()
        mlflow.log_metric("loss", 1 / step, step=step)
        saved.with_suffix(".new").write_text(str(step))
        saved.with_suffix(".new").replace(saved)
        print(f"Epoch [1/1], Step [{step}/100], Loss: {1 / step:.4f}", flush=True)
    time.sleep(0.5)
    dist.barrier()
if rank == 0:
    events.close()
    mlflow.end_run()
    folder = Path(os.environ["TENSORBOARD_LOGGING_DIR"])
    (run,) = mlflow.search_runs(output_format="list")
    history = mlflow.MlflowClient().get_metric_history(run.info.run_id, "loss")
    print("tracked " + json.dumps({
        "run": os.environ["DDP_TRACKING_RUN"],
        "folders": [each.name for each in folder.parent.iterdir()],
        "starts": len(list(folder.iterdir())),
        "events": [one.step for one in EventAccumulator(str(folder)).Reload().Scalars("loss")],
        "mlflow run": run.data.tags["ddp.run"],
        "mlflow": sorted({one.step for one in history}),
    }), flush=True)
dist.destroy_process_group()
"""


def job_of(claim: str) -> dict[str, Any]:
    container = {
        "name": "trainer",
        "image": os.environ["DDP_E2E_TRACKING_IMAGE"],
        "command": ["python3", "-c", SCRIPT],
        "env": [{"name": "MLFLOW_ALLOW_FILE_STORE", "value": "true"}],
    }
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "metadata": {"name": "tracked"},
        "spec": {
            "nodes": 2,
            "checkpoint": {"path": "/ckpt", "claimName": claim},
            "metrics": METRICS,
            "tracking": {
                "tensorboard": {"path": "/ckpt/tensorboard"},
                "mlflow": {"trackingUri": Path("/ckpt/mlflow").as_uri()},
            },
            "template": {"spec": {"containers": [container]}},
        },
    }


def test_lost_pod_and_suspension_stay_one_tracker_run(cluster: UserNamespace, claim: str, tmp_path: Path) -> None:
    applied = cluster.apply(job_of(claim))
    assert applied.returncode == 0, applied.stderr

    status = cluster.until(lambda: result if (result := cluster.status("tracked")).get("progress") else None, "steps")
    identity = status["tracking"]["runId"]
    victim = next(pod for pod in cluster.pods("tracked") if pod.metadata.name.startswith("tracked-1-1-"))
    cluster.core.delete_namespaced_pod(victim.metadata.name, cluster.namespace, grace_period_seconds=0)

    def trains_again() -> bool:
        status = cluster.status("tracked")
        return status["restarts"]["inPlace"] > 0 and "recoverySeconds" in status["lastRestart"]

    cluster.until(trains_again, "steps after a lost pod")
    ddp(cluster, tmp_path, "suspend", "tracked")
    assert cluster.phase("tracked", "Suspended")["tracking"]["runId"] == identity
    ddp(cluster, tmp_path, "resume", "tracked")
    status = cluster.phase("tracked", "Succeeded", "Failed")
    assert (status["phase"], status["tracking"]["runId"]) == ("Succeeded", identity), status

    (line,) = (item for item in ddp(cluster, tmp_path, "logs", "tracked").splitlines() if "tracked {" in item)
    result = json.loads(line[line.index("{") :])
    assert result.pop("starts") >= 3
    every = list(range(1, 101))
    assert result == {
        "run": identity, "folders": [identity], "events": every, "mlflow run": identity, "mlflow": every
    }  # fmt: skip

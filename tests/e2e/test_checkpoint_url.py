"""Checkpoints in an object store: the nodes share nothing, and checkpoints outlive every pod."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.object_store import ObjectStore

from .conftest import UserNamespace, here
from .test_cluster import script_job

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        "DDP_E2E_S3_IMAGE" not in os.environ, reason="DDP_E2E_S3_IMAGE names no image with PyTorch and s3fs"
    ),
]

# Rank 0 saves; all ranks read the checkpoint that the peer's pod has saved.
TRAIN = """
import os, time
from pathlib import Path
import torch.distributed as dist
dist.init_process_group("gloo")
saved = Path(os.environ["DDP_CHECKPOINT_DIR"], "step")
first = int(saved.read_text()) + 1 if saved.exists() else 1
print(f"rank {dist.get_rank()} begins at {first}", flush=True)
for step in range(first, 81):
    time.sleep(0.5)
    dist.barrier()
    if dist.get_rank() == 0:
        print(f"Epoch [1/1], Step [{step}/80], Loss: {1 / step:.4f}", flush=True)
        if step % 5 == 0:
            saved.with_suffix(".new").write_text(str(step))
            saved.with_suffix(".new").replace(saved)
dist.destroy_process_group()
"""


@pytest.fixture
def store(cluster: UserNamespace, tmp_path: Path) -> Iterator[ObjectStore]:
    made = ObjectStore(tmp_path, here(cluster))
    secret = {"metadata": {"name": "bucket-access"}, "stringData": made.credentials}
    cluster.core.create_namespaced_secret(cluster.namespace, secret)
    yield made
    made.stop()


def begun(cluster: UserNamespace, pod: str) -> int | None:
    """Return the step at which a pod's rank has last started."""
    result = re.findall(r"rank \d begins at (\d+)", cluster.kubectl("logs", pod).stdout)
    return int(result[-1]) if result else None


def test_pods_without_shared_disk_resume_from_store(cluster: UserNamespace, store: ObjectStore) -> None:
    job = script_job(
        "stored",
        TRAIN,
        nodes=2,
        checkpoint={"path": "/checkpoints", "url": store.url, "secretRef": {"name": "bucket-access"}, "keep": 2},
        scheduling={"placement": "Spread"},
        recovery={"maxRestarts": 3},
    )
    container = job["spec"]["template"]["spec"]["containers"][0]
    container |= {"image": os.environ["DDP_E2E_S3_IMAGE"], "resources": {"requests": {"cpu": "100m"}}}
    applied = cluster.apply(job)
    assert applied.returncode == 0, applied.stderr
    cluster.until(lambda: len(store.keys("snapshots")) == 2, "two snapshots in the store")

    victim = next(pod for pod in cluster.pods("stored") if pod.metadata.name.startswith("stored-1-0-"))
    cluster.core.delete_namespaced_pod(victim.metadata.name, cluster.namespace)

    def beginnings() -> set[int | None]:
        """Return where the ranks of both pods have started, once another pod 0 exists."""
        pods = [pod.metadata.name for pod in cluster.pods("stored") if pod.status.phase == "Running"]
        return {begun(cluster, pod) for pod in pods} if len({victim.metadata.name, *pods}) == 3 else set()

    steps = cluster.until(lambda: result if (result := beginnings()) and not result & {None, 1} else None, "both go on")
    assert len(steps) == 1, steps
    status = cluster.phase("stored", "Succeeded", "Failed")
    assert status["phase"] == "Succeeded", status
    (uploaded,) = (condition for condition in status["conditions"] if condition["type"] == "CheckpointsUploaded")
    assert uploaded["status"] == "True", uploaded
    assert len(store.keys("snapshots")) == 2

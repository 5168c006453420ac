"""A folder with modules and data, by `ddp submit --workdir`, on an image that has only PyTorch."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from ddp_operator.api.constants import GROUP, LABEL_JOB_NAME, PLURAL, VERSION
from tests.support.ddp_run import manifest
from tests.support.wheels import make_wheel

from .conftest import UserNamespace, adapt

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

METRICS = {"logPatterns": [r"Step \[(?P<step>\d+)/(?P<totalSteps>\d+)\], Loss: (?P<loss>[0-9.]+)"]}
"""For scripts that call no optimizer, so that the launcher counts no steps."""
MODULES = {
    "train.py": """
import time
from pathlib import Path
import torch.distributed as dist
from pieces.data import read
from pieces.model import loss_of

dist.init_process_group("gloo")
for step in range(1, 61):
    loss = loss_of(read(Path("numbers.txt")))
    print(f"Epoch [1/1], Step [{step}/60], Loss: {loss:.1f}", flush=True)
    time.sleep(0.5)
dist.destroy_process_group()
""",
    "pieces/__init__.py": "",
    "pieces/data.py": "def read(path):\n    return [float(word) for word in path.read_text().split()]\n",
    "pieces/model.py": """
import torch
import torch.distributed as dist

def loss_of(values):
    total = torch.tensor(values).sum()
    dist.all_reduce(total)
    return total.item()
""",
    "numbers.txt": "1 2 3.5\n",
}


def write_project(folder: Path, name: str) -> None:
    """Write the modules, and a job that runs them."""
    for path, text in MODULES.items():
        (folder / path).parent.mkdir(exist_ok=True)
        (folder / path).write_text(text)
    job = yaml.safe_load(manifest(["python", "train.py"], nodes=2, recovery={"maxRestarts": 3}, metrics=METRICS))
    # Without a request, a busy node gives the pods hardly any CPU.
    job["spec"]["template"]["spec"]["containers"][0]["resources"] = {"requests": {"cpu": "100m"}}
    (folder / "job.yaml").write_text(yaml.safe_dump(adapt(job, name)))


def ddp(cluster: UserNamespace, folder: Path, *words: str) -> str:
    """Run a command as a user does, in the folder. Return its output."""
    line = [sys.executable, "-m", "ddp_cli", *words, "--namespace", cluster.namespace]
    env = os.environ | {"KUBECONFIG": cluster.kubeconfig}
    done = subprocess.run(line, cwd=folder, env=env, text=True, capture_output=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_large_folder_is_delivered_by_claim_and_packages_by_pip(cluster: UserNamespace, tmp_path: Path) -> None:
    """The claim on a volume that all nodes share."""
    volume = os.environ.get("DDP_E2E_CHECKPOINTS")
    if not volume:
        pytest.skip("DDP_E2E_CHECKPOINTS names no volume that all nodes share")
    shared = {"accessModes": ["ReadWriteMany"], "storageClassName": cluster.namespace}
    bound = {"name": "sources", "namespace": cluster.namespace}
    spec = shared | yaml.safe_load(volume) | {"capacity": {"storage": "1Gi"}, "claimRef": bound}
    cluster.core.create_persistent_volume({"metadata": {"name": cluster.namespace}, "spec": spec})
    claim = {"metadata": bound, "spec": shared | {"resources": {"requests": {"storage": "1Gi"}}}}
    cluster.core.create_namespaced_persistent_volume_claim(cluster.namespace, claim)
    write_project(tmp_path, "large")
    (tmp_path / "weights.bin").write_bytes(random.Random(1).randbytes(3 << 20))
    make_wheel(tmp_path / "ddp_tiny-1.5-py3-none-any.whl", "ddp_tiny", "1.5")
    (tmp_path / "requirements.txt").write_text("./ddp_tiny-1.5-py3-none-any.whl\n")
    (tmp_path / "train.py").write_text("import ddp_tiny\n" + MODULES["train.py"].replace("61", "4"))
    try:
        options = ("--workdir", ".", "--pip", "--code-claim", "sources")
        assert "stored on the claim sources" in ddp(cluster, tmp_path, "submit", "job.yaml", *options)
        status = cluster.phase("large", "Succeeded", "Failed")
        assert status["phase"] == "Succeeded", status
        ddp(cluster, tmp_path, "delete", "large", "--wait")
        assert "has it already" in ddp(cluster, tmp_path, "submit", "job.yaml", *options)
        assert cluster.phase("large", "Succeeded", "Failed")["phase"] == "Succeeded"
        pods = cluster.core.list_namespaced_pod(cluster.namespace).items
        assert all(LABEL_JOB_NAME in pod.metadata.labels for pod in pods), "the pod that sends the code is left"
    finally:
        cluster.core.delete_persistent_volume(cluster.namespace)


def test_folder_trains_on_two_pods_through_lost_pod_and_suspension(cluster: UserNamespace, tmp_path: Path) -> None:
    write_project(tmp_path, "folder")
    shown = ddp(cluster, tmp_path, "submit", "job.yaml", "--workdir", ".")
    digest = cluster.get("folder")["spec"]["code"]["digest"]  # type: ignore[index]
    assert digest[:12] in shown

    def trains(restarts: int) -> bool:
        status = cluster.status("folder")
        known = status.get("restarts", {}).get("all", 0) >= restarts and status.get("phase") == "Running"
        return known and (status.get("progress") or {}).get("loss") in ("13", "13.0")  # of both ranks: 6.5 each

    cluster.until(lambda: trains(0), "steps with the sum over both ranks")
    victim = next(pod for pod in cluster.pods("folder") if pod.metadata.name.startswith("folder-1-1-"))
    cluster.core.delete_namespaced_pod(victim.metadata.name, cluster.namespace, grace_period_seconds=0)
    cluster.until(lambda: trains(1), "steps after a lost pod")
    ddp(cluster, tmp_path, "suspend", "folder")
    cluster.phase("folder", "Suspended")
    (tmp_path / "train.py").write_text("raise SystemExit('not what was submitted')")
    ddp(cluster, tmp_path, "resume", "folder")
    status = cluster.phase("folder", "Succeeded", "Failed")
    assert status["phase"] == "Succeeded"
    assert cluster.get("folder")["spec"]["code"]["revision"] == digest[:12]  # type: ignore[index]

    name = f"ddp-code-{digest[:16]}"
    assert cluster.core.read_namespaced_config_map(name, cluster.namespace).immutable
    cluster.custom.delete_namespaced_custom_object(GROUP, VERSION, cluster.namespace, PLURAL, "folder")
    cluster.until(
        lambda: (
            name
            not in [item.metadata.name for item in cluster.core.list_namespaced_config_map(cluster.namespace).items]
        ),
        "the code going with its job",
    )

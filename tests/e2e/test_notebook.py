"""docs/notebook.ipynb, the same cells as on one machine: here on two pods, one of which is also deleted."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

from tests.support.notebook import check_notebook, start_notebook

from .conftest import DIGITS, PATIENCE, UserNamespace

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        find_spec("nbclient") is None, reason="nbclient is not installed (pip install nbclient ipykernel)"
    ),
    pytest.mark.skipif(
        "DDP_E2E_POD" in os.environ and "DDP_E2E_IMAGE" not in os.environ,
        reason="the notebook's pods are as it makes them: DDP_E2E_IMAGE names no image with PyTorch",
    ),
]


def test_notebook_trains_in_cluster(cluster: UserNamespace, claim: str, tmp_path: Path) -> None:
    config = yaml.safe_load(Path(cluster.kubeconfig).read_text())
    (context,) = (item["context"] for item in config["contexts"] if item["name"] == config["current-context"])
    context["namespace"] = cluster.namespace
    (tmp_path / "kubeconfig").write_text(yaml.safe_dump(config))
    process = start_notebook(
        tmp_path,
        PATIENCE,
        {"KUBECONFIG": str(tmp_path / "kubeconfig")},
        name="points",
        backend="cluster",
        image=os.environ.get("DDP_E2E_IMAGE", DIGITS["spec"]["template"]["spec"]["containers"][0]["image"]),
        claim=claim,
    )
    try:
        cluster.until(lambda: process.poll() is not None or step(cluster) > 20, "a step after its suspension")
        assert process.poll() is None, process.communicate()[1]
        (victim,) = (pod for pod in cluster.pods("points") if pod.metadata.name.startswith("points-1-1-"))
        cluster.core.delete_namespaced_pod(victim.metadata.name, cluster.namespace, grace_period_seconds=0)
        check_notebook(process, tmp_path)
    finally:
        process.kill()
        process.wait()
    assert cluster.status("points")["restarts"]["all"] >= 1


def step(cluster: UserNamespace) -> int:
    return (cluster.status("points").get("progress") or {}).get("step") or 0

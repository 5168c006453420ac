"""An operator is upgraded while jobs train: running jobs continue, and later failures are classified.

The older operator is the one of the commit named here, with its own launcher in the pods and its own status.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.counts import read_counts

from .conftest import CheckoutOperator, UserNamespace, apply_crds
from .test_cluster import script_job

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

OLDER = "91a3a6b681833d0e44297995e13a97da1b71d002"
"""The last commit whose launcher was one file, and whose pods received the job in a dozen variables."""
TRAIN_UNTIL_TOLD = """
import os, time
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
step = 0
while True:
    time.sleep(0.2)
    told = torch.tensor([float(os.path.exists("/tmp/end")), float(os.path.exists("/tmp/fail"))])
    dist.all_reduce(told)
    step += 1
    if dist.get_rank() == 0:
        print(f"step {step}", flush=True)
    if told[1] and dist.get_rank() == 1:
        raise RuntimeError("rank 1 was told to fail")
    if told[0]:
        break
dist.destroy_process_group()
"""


@pytest.fixture
def older_operator(operator: CheckoutOperator | None, tmp_path: Path) -> Iterator[Callable[[], None]]:
    """Start the older operator. Return a function that replaces it by the present one."""
    if operator is None:
        pytest.skip("the operator is installed in the cluster: only one that is a process of these tests is upgraded")
    older = tmp_path / "older"
    added = subprocess.run(["git", "worktree", "add", "--detach", str(older), OLDER], capture_output=True, text=True)
    if added.returncode:
        pytest.skip(f"the older operator's commit is not in this clone: {added.stderr.strip()}")
    try:
        operator.kill()
        apply_crds(operator.kubeconfig, older)
        operator.start(source=older / "operator")

        def upgrade() -> None:
            operator.kill()
            apply_crds(operator.kubeconfig)
            operator.start()

        yield upgrade
        if operator.source is not None:  # the test has failed
            upgrade()
    finally:
        subprocess.run(["git", "worktree", "remove", "--force", str(older)], check=True, capture_output=True)


def tell(cluster: UserNamespace, pod: str, what: str) -> None:
    """Make the training that pod 0 leads end or fail."""
    done = cluster.kubectl("exec", pod, "--", "touch", f"/tmp/{what}")
    assert done.returncode == 0, done.stderr


def names(cluster: UserNamespace, job: str, attempt: int = 1) -> list[str]:
    """Return the names of an attempt's pods by index."""
    return sorted(pod.metadata.name for pod in cluster.pods(job) if pod.metadata.name.startswith(f"{job}-{attempt}-"))


def step(status: dict[str, Any]) -> int:
    """Return the step in a status."""
    return int(status.get("progress", {}).get("step") or 0)


def test_jobs_continue_during_operator_upgrade(cluster: UserNamespace, older_operator: Callable[[], None]) -> None:
    patterns = {"metrics": {"logPatterns": [r"^step (?P<step>\d+)"]}}
    for name in ("steady", "fails-later"):
        applied = cluster.apply(script_job(name, TRAIN_UNTIL_TOLD, recovery={"inPlaceRestarts": 0}, **patterns))
        assert applied.returncode == 0, applied.stderr
    for name in ("steady", "fails-later"):
        cluster.until(lambda name=name: step(cluster.status(name)), f"progress of {name} under the older operator")
    before = {name: names(cluster, name) for name in ("steady", "fails-later")}

    older_operator()

    reached = step(cluster.status("steady"))
    cluster.until(lambda: step(cluster.status("steady")) > reached, "progress of the same pods under the new operator")
    assert names(cluster, "steady") == before["steady"]
    tell(cluster, before["steady"][0], "end")
    status = cluster.phase("steady", "Succeeded", "Failed")
    assert (status["phase"], status["attempt"], status["restarts"]["all"]) == ("Succeeded", 1, 0), status
    assert names(cluster, "steady") == before["steady"]

    # The new operator reads the older launcher's termination message, and reacts like the older operator.
    tell(cluster, before["fails-later"][0], "fail")
    cluster.until(lambda: cluster.status("fails-later").get("attempt") == 2, "a second attempt")
    failure = cluster.status("fails-later")["lastFailure"]
    assert (failure["rank"], failure["podIndex"], failure["category"]) == (1, 1, "UserError"), failure
    assert failure["message"] == "RuntimeError: rank 1 was told to fail"
    cluster.until(lambda: cluster.status("fails-later")["nodes"].get("ready") == 2, "pods of the second attempt")
    tell(cluster, names(cluster, "fails-later", 2)[0], "end")
    status = cluster.phase("fails-later", "Succeeded", "Failed")
    assert (status["phase"], status["attempt"], read_counts(status)["counted"]) == ("Succeeded", 2, 1), status

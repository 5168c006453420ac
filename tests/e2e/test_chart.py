"""The delivered operator: its image, run by kubelets as the chart requests, through the life of a release."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from .conftest import DIGITS, UserNamespace, adapt
from .release import Release
from .test_cluster import script_job
from .test_upgrade import TRAIN_UNTIL_TOLD, names, step, tell

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1200)]

LEVEL = "DDP_OPERATOR_LOG_LEVEL"


@pytest.fixture
def restored(release: Release) -> Iterator[Release]:
    """The release. A test that leaves another revision is followed by a return to the present one."""
    level = release.read_env()[LEVEL]
    revision = release.read_revision()
    yield release
    if release.read_env()[LEVEL] != level:
        release.roll_back(revision)


def test_delivered_operator_runs_sample_to_success(release: Release, cluster: UserNamespace) -> None:
    applied = cluster.apply(adapt(DIGITS))
    assert applied.returncode == 0, applied.stderr
    status = cluster.phase("digits", "Succeeded", "Failed")
    assert status["phase"] == "Succeeded", f"{status}\n{release.describe()}"
    assert status["progress"]["percent"] == "100.0%"

    (pod,) = release.list_pods()
    (container,) = pod["status"]["containerStatuses"]
    assert (container["ready"], container["restartCount"]) == (True, 0), release.describe()
    (limits,) = (spec["securityContext"] for spec in pod["spec"]["containers"])
    assert pod["spec"]["securityContext"]["runAsUser"] == 65532
    assert limits["readOnlyRootFilesystem"] is True


def test_job_trains_on_through_upgrade_and_rollback(restored: Release, cluster: UserNamespace) -> None:
    patterns = {"metrics": {"logPatterns": [r"^step (?P<step>\d+)"]}}
    applied = cluster.apply(script_job("steady", TRAIN_UNTIL_TOLD, **patterns))
    assert applied.returncode == 0, applied.stderr
    cluster.until(lambda: step(cluster.status("steady")), "progress before the upgrade")
    pods = names(cluster, "steady")
    before = restored.read_revision()
    level = restored.read_env()[LEVEL]
    assert level != "debug"

    restored.upgrade({"settings": {"logLevel": "debug"}})
    assert restored.read_env()[LEVEL] == "debug"
    assert_progress(cluster, "steady", "upgrade")

    restored.roll_back(before)
    assert restored.read_env()[LEVEL] == level
    assert restored.read_revision() == before + 2
    assert_progress(cluster, "steady", "rollback")

    tell(cluster, pods[0], "end")
    status = cluster.phase("steady", "Succeeded", "Failed")
    assert (status["phase"], status["attempt"], status["restarts"]["all"]) == ("Succeeded", 1, 0), status
    assert names(cluster, "steady") == pods


def assert_progress(cluster: UserNamespace, name: str, change: str) -> None:
    """Wait until the operator reports more steps than now."""
    reached = step(cluster.status(name))
    cluster.until(lambda: step(cluster.status(name)) > reached, f"progress of {name} after the {change}")


def test_helm_test_trains_job_and_deletes_it(release: Release) -> None:
    log = release.test()
    assert log.rstrip().endswith("Succeeded"), log
    kubectl: Any = release.kubectl(
        "get", "ddp,pods", "--selector", "app.kubernetes.io/component=test", "--output", "name"
    )
    assert kubectl.stdout == "", kubectl.stdout

"""The delivered operator: both images built from this checkout, and the chart installed by Helm's own engine."""

from __future__ import annotations

import json
import subprocess
from typing import Any, Final

import helm_python
import pytest

from tests.support import ROOT
from tests.support.stoppable import Stoppable

CHART: Final = ROOT / "charts"
BUILD_LIMIT: Final = 3600
ROLLOUT_LIMIT: Final = 240
TEST_LIMIT: Final = 600


def build_images() -> None:
    """Build both images and bring them to the nodes, as the environment configures ``images/build``."""
    done = subprocess.run([ROOT / "images" / "build", "operator", "trainer"], timeout=BUILD_LIMIT, check=False)
    if done.returncode:
        pytest.exit(f"images/build ended with exit code {done.returncode}; its output is above", returncode=1)


class Release(Stoppable):
    """The release ``ddp-operator`` of the chart, in the namespace of that name."""

    name: Final = "ddp-operator"
    namespace: Final = "ddp-operator"

    def __init__(self, kubeconfig: str) -> None:
        self._kubeconfig = kubeconfig
        self._helm = helm_python.Config(kubeconfig_path=kubeconfig, namespace=self.namespace)

    def __enter__(self) -> Release:
        return self

    def stop(self) -> None:
        """Close the connection of Helm; the release stays."""
        self._helm.close()

    def exists(self) -> bool:
        """Return whether Helm has installed the release."""
        return self.name in [release["name"] for release in self._helm.list()]

    def install(self, values: dict[str, Any]) -> None:
        """Install the chart and wait until the operator is ready."""
        self._helm.install(CHART, self.name, values, create_namespace=True, timeout=ROLLOUT_LIMIT)
        try:
            self.wait_until_ready()
        except BaseException:
            self.uninstall()
            raise

    def upgrade(self, values: dict[str, Any]) -> None:
        """Change some values of the release and wait until the new operator is ready."""
        self._helm.upgrade(CHART, self.name, values, reuse_values=True, timeout=ROLLOUT_LIMIT)
        self.wait_until_ready()

    def roll_back(self, revision: int) -> None:
        """Return to a revision and wait until its operator is ready."""
        self._helm.rollback(self.name, version=revision, timeout=ROLLOUT_LIMIT)
        self.wait_until_ready()

    def uninstall(self) -> None:
        """Remove the release. The definitions stay, and with them all jobs."""
        self._helm.uninstall(self.name, timeout=ROLLOUT_LIMIT)

    def test(self) -> str:
        """Run ``helm test``; return the log of its pod."""
        result = self._helm.test(self.name, timeout=TEST_LIMIT, logs=True)
        return str(result["logs"])

    def read_revision(self) -> int:
        """Return the number of the current revision."""
        return int(self._helm.history(self.name)[-1]["revision"])

    def read_env(self) -> dict[str, str | None]:
        """Return the variables of the operator's container."""
        deployment = json.loads(self.kubectl("get", "deployment", self.name, "--output", "json").stdout)
        (container,) = deployment["spec"]["template"]["spec"]["containers"]
        return {entry["name"]: entry.get("value") for entry in container["env"]}

    def list_pods(self) -> list[dict[str, Any]]:
        """Return the pods of the operator that are not being deleted."""
        selector = f"app.kubernetes.io/instance={self.name},app.kubernetes.io/component=operator"
        result = json.loads(self.kubectl("get", "pods", "--selector", selector, "--output", "json").stdout)
        return [pod for pod in result["items"] if "deletionTimestamp" not in pod["metadata"]]

    def wait_until_ready(self) -> None:
        """Wait for the rollout of the Deployment; a failure shows the pods and their logs."""
        limit = f"--timeout={ROLLOUT_LIMIT}s"
        done = self.kubectl("rollout", "status", f"deployment/{self.name}", limit)
        assert done.returncode == 0, f"the operator is not ready: {done.stderr}\n{self.describe()}"

    def describe(self) -> str:
        """Return the cluster's description of the operator."""
        target = f"deployment/{self.name}"
        commands = (
            ("get", "pods", "--output", "wide"),
            ("describe", "pods"),
            ("logs", target, "--tail=50"),
            ("logs", target, "--tail=50", "--previous"),
        )
        return "\n".join(f"$ kubectl {' '.join(words)}\n{self.kubectl(*words).stdout}" for words in commands)

    def kubectl(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run kubectl in the namespace of the release."""
        line = ["kubectl", "--kubeconfig", self._kubeconfig, "--namespace", self.namespace, *words]
        return subprocess.run(line, text=True, capture_output=True, timeout=ROLLOUT_LIMIT + 60, check=False)

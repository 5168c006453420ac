"""The commands for a cluster, at a real API server."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from ddp_cli.__main__ import main
from ddp_cli.commands.io import ExitCode
from ddp_operator.api.constants import KIND
from tests.support.control_plane import ControlPlane
from tests.support.running_operator import in_thread
from tests.support.standin import ClusterActors

from .test_apiserver_operator import SAMPLES, StartProcess, actors, namespace, start

__all__ = ["actors", "namespace", "start"]  # fixtures
pytestmark = [pytest.mark.apiserver, pytest.mark.timeout(300)]


async def test_sample_is_submitted_watched_and_deleted(
    plane: ControlPlane,
    namespace: str,
    actors: ClusterActors,
    start: StartProcess,
    capsys: pytest.CaptureFixture[str],
) -> None:
    async def ddp(*words: str) -> int:
        return await in_thread(main, [*words, "--kubeconfig", str(plane.admin), "-n", namespace])

    start()
    sample = str(SAMPLES / "own-script.yaml")
    assert await ddp("submit", sample, "--dry-run") == ExitCode.OK
    assert await ddp("submit", sample) == ExitCode.OK
    assert "would be submitted" in capsys.readouterr().out
    (job,) = await actors.list(KIND)
    name = job["metadata"]["name"]
    assert await actors.list("ConfigMap")
    watching = asyncio.create_task(ddp("watch", name))
    for act in (actors.run_pod, actors.finish_pod):
        for index in (0, 1):
            await act(f"{name}-1", index)
    assert await watching == ExitCode.OK
    assert await ddp("list", "-o", "json") == ExitCode.OK
    listed = capsys.readouterr().out
    assert json.loads(listed[listed.index('{\n  "apiVersion"') :])["items"][0]["status"]["phase"] == "Succeeded"
    assert await ddp("delete", name) == ExitCode.OK
    assert await actors.get(KIND, name) is None
    assert await ddp("why", name) == ExitCode.NOT_FOUND


def test_forbidden_action_is_reported_in_one_sentence(
    plane: ControlPlane,
    namespace: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    plane.kubectl("create", "serviceaccount", "guest", "-n", namespace)
    kubeconfig: Path = plane.account(namespace, "guest")
    assert main(["list", "--kubeconfig", str(kubeconfig), "-n", namespace]) == ExitCode.CLUSTER
    complaint = capsys.readouterr().err
    assert "cannot list resource" in complaint
    assert "ask the cluster's administrator for this permission" in complaint
    assert complaint.count("\n") == 1

"""The commands for a cluster, at a real API server."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from ddp_operator.cli import main
from ddp_operator.cli.errors import ExitCode
from ddp_operator.constants import KIND
from tests.standin import World

from .apiserver import ControlPlane
from .conftest import in_thread
from .test_apiserver_operator import SAMPLES, StartProcess, namespace, start, world

__all__ = ["namespace", "start", "world"]  # fixtures
pytestmark = [pytest.mark.apiserver, pytest.mark.timeout(300)]


async def test_a_sample_is_submitted_watched_and_deleted(
    plane: ControlPlane,
    namespace: str,
    world: World,
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
    (job,) = await world.list(KIND)
    name = job["metadata"]["name"]
    assert await world.list("ConfigMap")
    watching = asyncio.create_task(ddp("watch", name))
    for act in (world.run_pod, world.finish_pod):
        for index in (0, 1):
            await act(f"{name}-1", index)
    assert await watching == ExitCode.OK
    assert await ddp("list", "-o", "json") == ExitCode.OK
    listed = capsys.readouterr().out
    assert json.loads(listed[listed.index('{\n  "apiVersion"') :])["items"][0]["status"]["phase"] == "Succeeded"
    assert await ddp("delete", name) == ExitCode.OK
    assert await world.get(KIND, name) is None
    assert await ddp("why", name) == ExitCode.NOT_FOUND


def test_what_may_not_be_done_is_said_in_one_sentence(
    plane: ControlPlane,
    namespace: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    plane.kubectl("create", "serviceaccount", "guest", "-n", namespace)
    kubeconfig: Path = plane.account(namespace, "guest")
    assert main(["list", "--kubeconfig", str(kubeconfig), "-n", namespace]) == ExitCode.CLUSTER
    complaint = capsys.readouterr().err
    assert "cannot list resource" in complaint
    assert "ask the cluster's owner for that permission" in complaint
    assert complaint.count("\n") == 1

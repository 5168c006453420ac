"""The commands for a cluster, at a real API server."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
import yaml

from ddp_cli.commands import main
from ddp_cli.commands.io import ExitCode
from ddp_operator.api.child_names import CODE_PREFIX
from ddp_operator.api.constants import CODE_VOLUME, KIND
from tests.support.builders import resource
from tests.support.control_plane import ControlPlane
from tests.support.registry import Registry, serve_registry
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


async def test_folder_pushed_to_registry_is_mounted_in_pods(
    plane: ControlPlane,
    namespace: str,
    actors: ClusterActors,
    start: StartProcess,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "train.py").write_text("print()")
    pod = {"containers": [{"name": "trainer", "image": "torch", "command": ["python3", "train.py"]}]}
    pod["imagePullSecrets"] = [{"name": "registry"}]
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(resource("image", template={"spec": pod})))
    monkeypatch.chdir(tmp_path)
    start()
    with serve_registry(Registry()) as registry:
        options = ("--workdir", ".", "--code-image", f"{registry.host}/team/code")
        words = ["submit", "job.yaml", *options, "--kubeconfig", str(plane.admin), "-n", namespace]
        assert await in_thread(main, words) == ExitCode.OK
    assert registry.pushed() == 6
    job = await actors.resource("image", lambda result: result.get("status", {}).get("code"))
    code = job["spec"]["code"]
    assert job["status"]["code"]["digest"] == code["digest"]
    made = await actors.run_pod("image-1", 0)
    [volume] = [item for item in made["spec"]["volumes"] if item["name"] == CODE_VOLUME]
    assert volume["image"] == {"reference": code["image"], "pullPolicy": "IfNotPresent"}
    assert made["spec"]["imagePullSecrets"] == [{"name": "registry"}]
    [container] = made["spec"]["containers"]
    assert CODE_VOLUME in [mount["name"] for mount in container["volumeMounts"]]
    assert [
        config_map
        for config_map in await actors.list("ConfigMap")
        if config_map["metadata"]["name"].startswith(CODE_PREFIX)
    ] == []


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

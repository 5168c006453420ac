"""The Python API at a real API server, with the operator: what docs/notebook.ipynb does on this machine."""

from __future__ import annotations

import asyncio
import importlib
import json
from pathlib import Path

import pytest

from ddp_cli import Client, Conflict, NotFound, TrainingFailed
from tests.support.control_plane import ControlPlane
from tests.support.standin import ClusterActors

from .test_apiserver_operator import StartProcess, actors, namespace, start

__all__ = ["actors", "namespace", "start"]  # fixtures
pytestmark = [pytest.mark.apiserver, pytest.mark.timeout(300)]


async def test_function_is_trained_suspended_resumed_and_deleted(
    plane: ControlPlane,
    namespace: str,
    actors: ClusterActors,
    start: StartProcess,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "a_training.py").write_text("def train(learning_rate): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    train = importlib.import_module("a_training").train
    start()
    client = Client(kubeconfig=str(plane.admin), namespace=namespace)
    options = {"nodes": 2, "gpus": 0, "name": "digits", "spec": {"recovery": {"maxRestarts": 0}}}
    async with actors.kubelet():
        job = await asyncio.to_thread(client.train, train, args={"learning_rate": 0.5}, **options)
        with pytest.raises(Conflict, match="already exists"):
            await asyncio.to_thread(client.train, train, args={"learning_rate": 0.5}, **options)
        stored = await asyncio.to_thread(client.get, "digits")
        assert stored.resource["spec"]["code"]["digest"] == job.resource["spec"]["code"]["digest"]

        async def run(attempt: int) -> None:
            for index in (0, 1):
                await actors.run_pod(f"digits-{attempt}", index)

        def reach(phase: str) -> None:
            for status in job.changes(timeout=200):
                if status.phase == phase:
                    return

        await run(1)
        await asyncio.to_thread(reach, "Running")
        await asyncio.to_thread(job.suspend)
        await asyncio.to_thread(reach, "Suspended")
        await asyncio.to_thread(job.resume)
        await asyncio.to_thread(reach, "Pending")
        await run(1)
        message = {"category": "UserError", "message": "KeyError: 'lr'", "rank": 0, "traceback": "KeyError: 'lr'\n"}
        await actors.finish_pod("digits-1", 0, exit_code=2, message=json.dumps(message))
        with pytest.raises(TrainingFailed) as raised:
            await asyncio.to_thread(job.wait, timeout=200)
        assert "KeyError: 'lr'" in str(raised.value)
        await asyncio.to_thread(job.delete, wait=True)
        with pytest.raises(NotFound):
            await asyncio.to_thread(lambda: job.status)

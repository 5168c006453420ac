"""Runs on this machine as jobs of a `Client`: how they are found, changed and deleted."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml

from ddp_cli import Client, ClientError, Conflict, NotFound
from ddp_cli.client.runs import read_job
from ddp_cli.local.folder import DELETED, RunFolder
from ddp_operator.api.job_file import parse_manifest
from ddp_operator.features import SCHEMA
from tests.support.builders import resource


def make_run(runs: Path, phase: str = "Running", second: int = 0, **spec: Any) -> RunFolder:
    folder = RunFolder.create(runs, "digits", datetime(2026, 11, 20, 12, 0, second, tzinfo=UTC))
    folder.write_manifest("kind: K", [], {}, "ddp run job.yaml")
    job = parse_manifest(yaml.safe_dump(resource(**{"nodes": 2, **spec})), SCHEMA).resource
    folder.write_status({**job, "status": {"phase": phase, "attempt": 1}})
    return folder


@contextmanager
def running(folder: RunFolder) -> Iterator[None]:
    """Apply changes as `ddp run` does, during the block."""
    over = threading.Event()

    def follow() -> None:
        while not over.wait(0.01):
            job = read_job(folder)
            expected = folder.read_changes()
            folder.write_status({**job, "spec": {**job["spec"], **expected}})

    thread = threading.Thread(target=follow)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def test_changed_run_is_updated_while_running(tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    job = Client(backend="local", runs_dir=tmp_path).get("digits")
    with running(folder):
        job.suspend()
        assert job.resource["spec"]["suspend"] is True
        job.scale(3)
        job.resume()
    assert folder.read_changes() == {"suspend": False, "nodes": 3}
    assert (job.name, job.resource["spec"]["nodes"]) == (folder.path.name, 3)


def test_more_gpus_than_machine_has_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    gpus = {
        "name": "trainer",
        "image": "x",
        "command": ["python", "x"],
        "resources": {"limits": {"nvidia.com/gpu": "1"}},
    }
    folder = make_run(tmp_path, template={"spec": {"containers": [gpus]}})
    with pytest.raises(ClientError, match="needs 3 GPUs"):
        Client(backend="local", runs_dir=tmp_path).get().scale(3)
    assert folder.read_changes() == {}


def test_run_that_has_died_is_not_changed(tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    client = Client(backend="local", runs_dir=tmp_path)
    job = client.get()
    folder.manifest.unlink()  # and with it the lock
    with pytest.raises(Conflict, match="has ended"):
        client.backend.change(job.name, {"suspend": True})
    with pytest.raises(Conflict, match=r"has ended \(Failed\)"):
        job.suspend()


def test_deletion_stops_run_and_removes_leftovers(tmp_path: Path) -> None:
    living = make_run(tmp_path)
    ended = make_run(tmp_path, "Failed", 1)
    ended.manifest.unlink()
    client = Client(backend="local", runs_dir=tmp_path)
    client.get(ended.path.name).delete(wait=True)
    client.get(living.path.name).delete()
    assert [job.name for job in client.list()] == [living.path.name]
    assert living.read_changes() == {DELETED: True}
    with pytest.raises(NotFound):
        client.get(ended.path.name)


def test_run_is_followed_from_state_to_state(tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    job = Client(backend="local", runs_dir=tmp_path).get()
    states = job.changes(timeout=300)
    assert next(states).phase == "Running"
    folder.write_status({**read_job(folder), "status": {"phase": "Succeeded"}})
    assert [status.phase for status in states] == ["Succeeded"]
    folder.write_status({**read_job(folder), "status": {"phase": "Running"}})
    with pytest.raises(TimeoutError, match="is Running"):
        job.wait(timeout=0)

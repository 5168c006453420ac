"""`ddp list`, `why`, `logs` and `report` on the runs of this machine."""

from __future__ import annotations

import importlib.util
import os
from datetime import UTC, datetime
from pathlib import Path

import pytest

from ddp_cli import commands as cli
from ddp_cli.client.client import Client
from ddp_cli.client.errors import NotFound
from ddp_cli.client.job import Job
from ddp_cli.commands.io import ExitCode
from ddp_cli.local.folder import RunFolder
from tests.support.builders import resource

Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def _without_a_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("KUBECONFIG", "KUBERNETES_SERVICE_HOST"):
        monkeypatch.delenv(name, raising=False)


def make_run(second: int, phase: str = "Succeeded", *, summary: str = "how it went") -> RunFolder:
    folder = RunFolder.create(Path("ddp-runs"), "digits", datetime(2026, 11, 20, 12, 0, second, tzinfo=UTC))
    folder.write_manifest("kind: K", [], {}, "ddp run job.yaml")
    folder.write_status(resource(procPerNode=2) | {"status": {"phase": phase, "attempt": 1}})
    for pod in range(2):
        text = f"[rank{2 * pod}]: begins\n[rank{2 * pod + 1}]: begins\ntorchrun ends\n"
        (folder.logs / f"attempt-1-pod-{pod}.log").write_text(text)
    if summary:
        folder.write(folder.summary, f"{summary}\n")
    os.utime(folder.status, (second, second))
    return folder


def test_without_cluster_local_runs_are_listed_with_note(capsys: Capture) -> None:
    last, first = make_run(1), make_run(2, "Failed")
    os.utime(last.status, (3, 3))
    assert cli.main(["list"]) == ExitCode.OK
    shown = capsys.readouterr()
    rows = [line.split()[:2] for line in shown.out.splitlines()[1:]]
    assert rows == [[first.path.name, "Failed"], [last.path.name, "Succeeded"]]
    assert shown.err == "no cluster is configured; using the runs on this machine in ddp-runs\n"


def test_name_is_looked_up_in_the_cluster_then_among_the_runs(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    run = make_run(1)
    queried = []

    def get(client: Client, name: str | None) -> Job:
        if client._kind == "cluster":
            queried.append(name)
            raise NotFound(f"{name} does not exist in namespace default")
        return Job(client.backend, *client.backend.find(name))

    monkeypatch.setattr(Client, "get", get)
    monkeypatch.setenv("KUBECONFIG", "elsewhere")
    for words in (["why"], ["why", run.path.name]):
        assert cli.main(words) == ExitCode.OK
    assert queried == []
    for words in (["why", "digits"], ["logs", "digits"], ["report", "digits"]):
        assert cli.main(words) == ExitCode.OK
        assert "not in the cluster (digits does not exist in namespace default)" in capsys.readouterr().err
    for words in (["why", "digits", "-n", "team"], ["why", "gone"]):
        assert cli.main(words) == ExitCode.NOT_FOUND
    assert queried == ["digits", "digits", "digits", "digits", "gone"]


def test_logs_are_those_of_all_ranks_of_jobs_newest_run(capsys: Capture) -> None:
    make_run(1)
    newest = make_run(2)
    assert cli.main(["logs", "digits"]) == ExitCode.OK
    shown = capsys.readouterr()
    assert shown.out.splitlines() == [
        "[rank 0] begins", "[rank 1] begins", "[ranks 0-1] torchrun ends",
        "[rank 2] begins", "[rank 3] begins", "[ranks 2-3] torchrun ends",
    ]  # fmt: skip
    assert f"run folder {newest.path}" in shown.err
    assert cli.main(["logs", "--node", "1", "--tail", "1"]) == ExitCode.OK
    assert capsys.readouterr().out == "[ranks 2-3] torchrun ends\n"
    assert cli.main(["logs", "--attempt", "2"]) == ExitCode.NOT_FOUND


def test_logs_are_followed_until_run_has_ended(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    living = make_run(1, "Running", summary="")
    log = living.logs / "attempt-1-pod-0.log"
    ends = iter([False, False])

    def in_use(folder: RunFolder) -> bool:
        with log.open("a") as stream:
            stream.write("[rank0]: one more\n")
        return next(ends, None) is not None

    monkeypatch.setattr(RunFolder, "in_use", property(in_use))
    assert cli.main(["logs", "-f", "--node", "0"]) == ExitCode.OK
    assert "[rank 0] one more" in capsys.readouterr().out


def test_script_with_more_pods_than_gpus_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    Path("train.py").write_text("")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert cli.main(["run", "train.py", "--nodes", "2"]) == ExitCode.BAD_INPUT
    assert "needs 2 GPUs (2 pods x 1), but this machine has 1; use --cpu" in capsys.readouterr().err


def test_python_without_torch_is_named_before_anything_starts(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    Path("train.py").write_text("")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert cli.main(["run", "train.py"]) == ExitCode.BAD_INPUT
    assert "PyTorch is not installed for " in capsys.readouterr().err
    assert not Path("ddp-runs").exists()


def test_watch_without_cluster_shows_newest_run_to_end(capsys: Capture) -> None:
    make_run(1)
    newest = make_run(2, "Failed", summary="why it failed")
    assert cli.main(["watch", "--plain"]) == ExitCode.FAILED
    shown = capsys.readouterr()
    assert newest.path.name in shown.out
    assert shown.err == ("no cluster is configured; using the runs on this machine in ddp-runs\nwhy it failed\n")


def test_delete_deletes_each_of_several_runs_and_reports_missing_one(capsys: Capture) -> None:
    first, second, kept = [make_run(number).path for number in (1, 2, 3)]  # whose writers have ended
    assert cli.main(["delete", first.name, "missing", str(second), first.name]) == ExitCode.NOT_FOUND
    shown = capsys.readouterr()
    assert shown.out == f"{first.name}: deleted\n{second}: deleted\n"
    assert shown.err.count("no cluster is configured") == 1
    assert "ddp delete: run missing does not exist" in shown.err
    assert list(Path("ddp-runs").glob("*-*")) == [kept]

"""`ddp list`, `why` and `logs` on the runs of this machine."""

from __future__ import annotations

import importlib.util
import os
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from ddp_cli import __main__ as cli
from ddp_cli.client.client import Client
from ddp_cli.client.errors import FieldsLeftOut, NotFound
from ddp_cli.client.job import Job
from ddp_cli.commands.io import ExitCode
from ddp_cli.local.folder import RunFolder
from ddp_operator.api.yaml_writer import format_documents
from tests.support.builders import resource
from tests.support.full_status import build_full_status, spoil

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
    for words in (["why", "digits"], ["logs", "digits"]):
        assert cli.main(words) == ExitCode.OK
        assert "not in the cluster (digits does not exist in namespace default)" in capsys.readouterr().err
    for words in (["why", "digits", "-n", "team"], ["why", "gone"]):
        assert cli.main(words) == ExitCode.NOT_FOUND
    assert queried == ["digits", "digits", "digits", "gone"]


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


def make_stored_run(status: Any) -> RunFolder:
    """Return the folder of a run whose status.yaml has this status."""
    folder = make_run(1, summary="")
    folder.write(folder.status, format_documents([resource() | {"status": status}]))
    return folder


COMMANDS = (["why", "--local"], ["logs", "--local"], ["list", "--local"])


# What only the operator reads is restored without a word.
FIELDS = [field for field in build_full_status() if field != "operatorState"]


@pytest.mark.parametrize("field", [*FIELDS, "progress.learningRate", "conditions[0].status"])
def test_commands_show_a_run_without_the_field_that_they_name(field: str, capsys: Capture) -> None:
    path = f"status.{field}"
    folder = make_stored_run(spoil(build_full_status(), path))
    for words in COMMANDS:
        assert cli.main(words) == ExitCode.OK
        shown = capsys.readouterr()
        assert shown.err.count(f"{folder.status}: {path} cannot be read and is left out\n") == 1
        assert "succeeded" in shown.out.lower() or words[0] == "logs"


@pytest.mark.parametrize("status", [[1], "x", {"phase": "Frozen"}])
def test_commands_show_a_run_whose_phase_is_unreadable(status: Any, capsys: Capture) -> None:
    make_stored_run(status)
    for words in COMMANDS:
        assert cli.main(words) == ExitCode.OK
        assert "cannot be read and is left out" in capsys.readouterr().err


@pytest.mark.parametrize("rate", ["5e-05", "1e-05", "1e-06"])
def test_run_with_a_small_learning_rate_is_read_as_stored(rate: str, capsys: Capture) -> None:
    folder = make_stored_run(build_full_status() | {"progress": {"step": 7, "learningRate": rate}})
    assert f"learningRate: '{rate}'\n" in folder.status.read_text()
    bare = folder.status.read_text().replace(f"'{rate}'", rate)
    for text in (folder.status.read_text(), bare):  # a former version wrote the second one
        folder.status.write_text(text)
        for words in COMMANDS:
            assert cli.main(words) == ExitCode.OK
            assert "left out" not in capsys.readouterr().err
        assert Client(backend="local").get().progress.learning_rate == rate


def test_python_warns_of_a_field_that_cannot_be_read() -> None:
    folder = make_stored_run({"phase": "Succeeded", "progress": {"loss": [1]}})
    with pytest.warns(FieldsLeftOut, match=f"{folder.status}: status.progress.loss cannot be read"):
        job = Client(backend="local").get()
    with pytest.warns(FieldsLeftOut):
        assert job.phase == "Succeeded"


def test_damaged_status_is_reported_with_its_reason(capsys: Capture) -> None:
    folder = make_run(1, summary="")
    folder.status.write_text("{")
    assert cli.main(["why", "--local"]) == ExitCode.BAD_INPUT
    assert re.search(r"status\.yaml is missing or invalid \(line 2, column 1: not valid YAML", capsys.readouterr().err)

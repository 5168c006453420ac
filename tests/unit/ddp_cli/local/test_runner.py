"""Refusals of `ddp run` before any process starts; no file remains then."""

from __future__ import annotations

import errno
import os
import re
import socket
from pathlib import Path
from typing import Any

import pytest
import yaml

from ddp_cli import __main__ as cli
from ddp_cli.commands.io import ExitCode
from ddp_cli.local.container import ClaimInUse, ClaimLock
from ddp_cli.local.runner import Run, RunOutcome
from tests.support.builders import resource, template, trainer


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    async def run(self: Run) -> RunOutcome:
        """These tests start no process: they test the steps before."""
        return RunOutcome("Succeeded")

    monkeypatch.setattr(Run, "run", run)


def ddp_run(*options: str, **spec: Any) -> int:
    Path("job.yaml").write_text(yaml.safe_dump(resource(template=template(trainer(command=["python", "x"])), **spec)))
    return cli.main(["run", "job.yaml", "--plain", *options])


def runs() -> list[str]:
    return sorted(path.name for path in Path().glob("ddp-runs/train-*"))


class TestClaim:
    CHECKPOINT = {"path": "/ckpt", "claimName": "weights"}

    def test_trackers_have_one_run_for_saved_job(self, tmp_path: Path) -> None:
        claim = ClaimLock(tmp_path, "weights")
        empty = claim.tracking_run("digits")
        first = claim.tracking_run("digits")  # the previous run has saved nothing
        (tmp_path / "weights").mkdir()
        (tmp_path / "weights" / "last.pt").touch()
        assert claim.tracking_run("digits") == first != empty
        assert claim.tracking_run("other") not in (first, empty)
        assert re.fullmatch(r"digits-[0-9a-f]{8}", first)

    def test_second_run_is_refused_with_user_and_remedy(self, capsys: pytest.CaptureFixture[str]) -> None:
        lock = ClaimLock(Path("ddp-runs/claims"), "weights")
        lock.sign("process 7 (run folder ddp-runs/train-1)")
        assert ddp_run(checkpoint=self.CHECKPOINT) == ExitCode.BAD_INPUT
        words = capsys.readouterr().err
        assert "process 7 (run folder ddp-runs/train-1) writes its checkpoints to claim weights" in words
        assert "spec.checkpoint.shared: true" in words
        assert runs() == []
        lock.release()
        assert ddp_run(checkpoint=self.CHECKPOINT) == ExitCode.OK

    def test_continued_run_keeps_claim_and_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        async def run(self: Run) -> RunOutcome:
            with pytest.raises(ClaimInUse, match=rf"process {os.getpid()} \(run folder ddp-runs/train-"):
                ClaimLock(Path("ddp-runs/claims"), "weights")
            return RunOutcome("Running", signal=15)

        monkeypatch.setattr(Run, "run", run)
        assert ddp_run(checkpoint=self.CHECKPOINT) == 128 + 15


def test_output_of_missing_rank_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert ddp_run("--nodes", "2", "--logs", "1") == ExitCode.OK
    assert ddp_run("--nodes", "2", "--logs", "2") == ExitCode.BAD_INPUT
    assert "--logs: rank 2 does not exist; the last is 1" in capsys.readouterr().err


class TestFullDisk:
    @pytest.mark.parametrize("call", ["mkdir", "write_text"])
    def test_is_named_with_folder_and_remedy(
        self, call: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        original = getattr(Path, call)

        def fail_in_run_folder(path: Path, *arguments: Any, **options: Any) -> Any:
            if path.parent.name.startswith("train-"):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return original(path, *arguments, **options)

        monkeypatch.setattr(Path, call, fail_in_run_folder)
        assert ddp_run() == ExitCode.BAD_INPUT
        assert capsys.readouterr().err == (
            "ddp run: ddp-runs: cannot create a run folder (No space left on device); free space or choose "
            "another --runs-dir\n"
        )
        assert runs() == []


class TestMetricsPort:
    def test_used_port_is_refused_with_its_pod(self, capsys: pytest.CaptureFixture[str]) -> None:
        with socket.create_server(("", 0)) as server:
            taken = server.getsockname()[1]
            assert ddp_run("--metrics-port", str(taken)) == ExitCode.BAD_INPUT
        words = capsys.readouterr().err
        assert f"--metrics-port: pod 0 cannot listen on port {taken} (Address already in use)" in words
        assert runs() == []

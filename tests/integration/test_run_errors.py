"""Internal errors of `ddp run`: it retries after one error, ends gracefully after many, and survives failed writes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from ddp_cli import __main__ as cli
from ddp_cli.commands.io import ExitCode
from ddp_cli.local import runner
from ddp_cli.local.recorder import RunRecorder
from ddp_cli.view.why import explain_why
from ddp_operator.api.cluster import Key
from ddp_operator.reconcile import Reconciler
from tests.support.ddp_run import manifest

pytestmark = pytest.mark.process

SAVES_ON_SIGTERM = """
import pathlib, signal, sys, time
signal.signal(signal.SIGTERM, lambda *about: (pathlib.Path("saved").touch(), sys.exit(0)))
pathlib.Path("ready").touch()
time.sleep(600)
"""


class FailingRun:
    """`ddp run` in this process; ``error_of`` maps the number of a pass, from 1, to its error."""

    def __init__(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, error_of: Callable[[int], Exception | None]
    ) -> None:
        self.folder = folder
        self.passes = 0
        inner = Reconciler.reconcile

        async def reconcile(reconciler: Reconciler, key: Key) -> float | None:
            self.passes += 1
            error = error_of(self.passes)
            if error is not None:
                raise error
            return await inner(reconciler, key)

        monkeypatch.setattr(Reconciler, "reconcile", reconcile)
        monkeypatch.setattr(runner, "backoff", lambda failures: 0.01)
        monkeypatch.chdir(folder)

    def run(self, script: str) -> int:
        text = manifest([sys.executable, "-c", script], nodes=1, checkpoint={"path": "/ckpt", "graceSeconds": 20})
        Path("job.yaml").write_text(text)
        return cli.main(["run", "job.yaml", "--plain", "--name", "toy"])

    def read(self, name: str) -> str:
        (path,) = self.folder.glob(f"ddp-runs/toy-*/{name}")
        return path.read_text()

    def resource(self) -> dict[str, Any]:
        safe_load: dict[str, Any] = yaml.safe_load(self.read("status.yaml"))
        return safe_load


def test_transient_or_auxiliary_error_is_reported_and_run_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def sample(recorder: RunRecorder, *, everyone: bool) -> None:
        raise KeyError("page")

    def draw(*words: Any) -> str:
        raise KeyError("chart")

    monkeypatch.setattr(RunRecorder, "sample", sample)
    monkeypatch.setattr("ddp_cli.features.ui.pages.build_job_report", draw)
    run = FailingRun(tmp_path, monkeypatch, lambda number: KeyError("lost") if number in (1, 3, 4, 5) else None)
    assert run.run("print('done')") == ExitCode.OK
    assert run.read("errors.log").count("KeyError: 'lost'") == 4
    assert "Traceback" in run.read("errors.log")
    output = capsys.readouterr().out
    assert "warning     internal error: KeyError" in output
    assert "/errors.log" in output
    assert "the run continues without metrics" in output
    assert "KeyError: 'page'" in run.read("errors.log")
    assert "the run continues without the report" in output
    assert "KeyError: 'chart'" in run.read("errors.log")
    assert "toy: Succeeded" in run.read("summary.txt")


def test_error_in_every_pass_ends_run_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = FailingRun(tmp_path, monkeypatch, lambda number: KeyError("lost") if Path("ready").exists() else None)
    assert run.run(SAVES_ON_SIGTERM) == ExitCode.BROKEN
    assert Path("saved").exists()
    status = run.resource()["status"]
    assert status["phase"] == "Failed"
    assert status["completionTime"]
    (failed,) = (item for item in status["conditions"] if item["type"] == "Failed")
    assert (failed["status"], failed["reason"]) == ("True", "OperatorError")
    output = capsys.readouterr().out
    assert "toy: Failed after" in output
    assert "OperatorError: an internal error of ddp stopped the run: KeyError: 'lost'" in output
    assert run.read("errors.log").count("KeyError: 'lost'") == 8
    assert "report" in explain_why(run.resource(), [], runner.utc_now()).todo
    assert "OperatorError" in run.read("report.html")


def test_end_of_pod_that_cannot_be_recorded_ends_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def read_nothing(*about: Any) -> str:
        raise KeyError("end")

    monkeypatch.setattr("ddp_cli.local.pods.read_termination_message", read_nothing)
    run = FailingRun(tmp_path, monkeypatch, lambda number: None)
    assert run.run("print('done')") == ExitCode.BROKEN
    assert run.resource()["status"]["phase"] == "Failed"
    assert "KeyError: 'end'" in capsys.readouterr().out

"""`ddp report` and `Job.report` on runs of this machine and on records of ended jobs."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddp_cli import __main__ as cli
from ddp_cli.client import hooks
from ddp_cli.features import FEATURES
from tests.support.full_status import build_full_status
from tests.unit.ddp_cli.client.test_records import build_record, open_at, store
from tests.unit.ddp_cli.commands.test_local_runs import make_stored_run


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hooks, "_used", FEATURES)
    return tmp_path


def test_record_of_ended_job_has_a_report(folder: Path) -> None:
    store(folder, "20261120T120004Z", build_record())
    page = open_at(folder).report()
    assert "KeyError" in page
    assert "the job failed" in page


@pytest.mark.parametrize(("status", "is_left_out"), [([1], True), ({"phase": "Frozen"}, True), (None, False)])
def test_run_with_an_unreadable_status_has_a_report(
    status: object, is_left_out: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_stored_run(build_full_status() if status is None else status)
    assert cli.main(["report", "--local"]) == 0
    shown = capsys.readouterr()
    assert ("cannot be read and is left out" in shown.err) == is_left_out
    assert shown.out.strip() == str(run.report)
    assert "</html>" in run.report.read_text()


def test_run_with_damaged_files_has_a_report() -> None:
    run = make_stored_run(build_full_status())
    run.metrics.write_text(f"time,step\n1,2\n3,{'9' * 200_000}\n")
    run.environment.write_text("[" * 100_000)
    assert cli.main(["report", "--local"]) == 0
    assert "</html>" in run.report.read_text()

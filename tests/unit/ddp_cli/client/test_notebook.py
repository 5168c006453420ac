"""A job's display in a notebook, and metrics as a table."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from ddp_cli import Job, TrainingFailed
from ddp_cli.client.notebook import Report, Table, has_notebook
from tests.support.fake_backend import FakeBackend

RUNNING = {
    "phase": "Running",
    "attempt": 2,
    "progress": {"step": 40, "totalSteps": 100, "percent": "40.0%", "loss": "0.5"},
}
FAILED = {"phase": "Failed", "lastFailure": {"attempt": 1, "category": "UserError", "message": "<b> is no number"}}


def make(*statuses: dict[str, Any]) -> Job:
    resource = {"metadata": {"name": "x", "namespace": "ml"}, "spec": {"nodes": 2}, "status": statuses[0]}
    return Job(FakeBackend(resource, *statuses), "x", resource)


class Notebook:
    """A stand-in for IPython in a kernel; ``outputs`` are the outputs of the cell in their order."""

    def __init__(self) -> None:
        self.outputs: list[str] = []

    def display(self, shown: str, *, display_id: bool) -> Notebook:
        assert display_id
        self.outputs.append(shown)
        return self

    def update(self, shown: str) -> None:
        self.outputs.append(shown)


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> Notebook:
    notebook = Notebook()
    package = ModuleType("IPython")
    module = ModuleType("IPython.display")
    package.get_ipython = lambda: SimpleNamespace(kernel=object())  # type: ignore[attr-defined]
    module.HTML = str
    module.display = notebook.display  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", package)
    monkeypatch.setitem(sys.modules, "IPython.display", module)
    return notebook


def test_waiting_updates_one_output(notebook: Notebook) -> None:
    make(RUNNING, {"phase": "Succeeded"}).wait()
    first, running, done = notebook.outputs
    assert (first, "step 40/100" in running, "loss 0.5" in running, "attempt 2" in running) == ("", True, True, True)
    assert "width:40.0%" in running
    assert "width:100.0%" in done
    assert "Succeeded" in done
    make({"phase": "Succeeded"}).wait(show=False)
    assert len(notebook.outputs) == 3


def test_waiting_outside_notebook_is_silent_by_default(capsys: pytest.CaptureFixture[str]) -> None:
    assert not has_notebook()
    job = make(RUNNING, {"phase": "Succeeded"})
    job.wait()
    assert capsys.readouterr().out == ""
    job.wait(show=True)
    assert "step 40/100" in capsys.readouterr().out


def test_job_is_shown_with_explanation_and_escaped_text() -> None:
    shown = make(FAILED)._repr_html_()
    assert "&lt;b&gt; is no number" in shown
    assert "<b> is" not in shown
    gone = make(RUNNING)
    gone.delete()
    assert "Running" in gone._repr_html_()
    with pytest.raises(TrainingFailed):
        make(FAILED).wait()


def test_report_is_shown_in_frame_and_saved(tmp_path: Path) -> None:
    report = Report("<h1>x</h1>")
    assert 'srcdoc="&lt;h1&gt;' in report._repr_html_()
    assert report.save(tmp_path / "report.html").read_text() == str(report) == "<h1>x</h1>"
    assert "10 characters" in repr(report)


def test_table_has_rows_and_columns() -> None:
    rows = Table([{"step": 1.0}, {"step": 2.0, "loss": 0.5}])
    assert (rows.columns, rows["loss"], rows[0], len(rows)) == (["step", "loss"], [None, 0.5], {"step": 1.0}, 2)
    with pytest.raises(KeyError):
        rows["epoch"]
    assert "<td>0.5</td>" in rows._repr_html_()
    assert "<td></td>" in rows._repr_html_()
    assert "the last 10 of 20" in Table(list(rows) * 10)._repr_html_()

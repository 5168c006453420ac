"""The runs of a folder: what is read on each refresh."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

from ddp_cli.client.errors import NotFound
from ddp_cli.features.ui import sources
from ddp_cli.features.ui.sources import LocalRuns
from ddp_cli.local.folder import RunFolder
from tests.support.builders import NOW, resource


def make_run(runs: Path, name: str, phase: str) -> RunFolder:
    run = RunFolder.create(runs, name, NOW)
    if phase == "Running":
        run.write_manifest("", (), resource(), "ddp run")  # this process holds its lock
    set_status(run, phase)
    return run


def set_status(run: RunFolder, phase: str, **status: Any) -> None:
    run.write_status(resource() | {"status": {"phase": phase, "attempt": 1, **status}})


@pytest.fixture
def ended(tmp_path: Path) -> list[RunFolder]:
    return [make_run(tmp_path, f"ended-{number}", "Succeeded") for number in range(40)]


def test_refresh_without_changes_reads_no_run(
    tmp_path: Path, ended: list[RunFolder], monkeypatch: pytest.MonkeyPatch
) -> None:
    make_run(tmp_path, "live", "Running")
    runs = LocalRuns(tmp_path)
    rows = runs.refresh()
    assert len(rows) == 41
    monkeypatch.setattr(sources, "_read_row", lambda name, path, in_use: pytest.fail(name))
    assert runs.refresh() == rows


def test_run_is_read_again_when_its_status_has_changed(tmp_path: Path, ended: list[RunFolder]) -> None:
    running = make_run(tmp_path, "live", "Running")
    runs = LocalRuns(tmp_path)
    runs.refresh()
    set_status(running, "Running", progress={"step": 7})
    assert runs.refresh()[f"run/{running.path.name}"].progress.step == 7
    set_status(ended[30], "Failed")
    assert runs.refresh()[f"run/{ended[30].path.name}"].phase == "Failed"


def test_run_that_is_added_or_deleted_is_seen_at_the_next_refresh(tmp_path: Path, ended: list[RunFolder]) -> None:
    runs = LocalRuns(tmp_path)
    runs.refresh()
    added = make_run(tmp_path, "new", "Running")
    (ended[0].path).rename(tmp_path.parent / "elsewhere")
    rows = runs.refresh()
    assert f"run/{added.path.name}" in rows
    assert f"run/{ended[0].path.name}" not in rows


@pytest.mark.parametrize("kind", ["file", "link", "missing"])
def test_folder_of_runs_that_cannot_be_read_is_a_problem(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "runs"
    if kind == "file":
        folder.touch()
    elif kind == "link":
        folder.symlink_to(tmp_path)
    runs = LocalRuns(folder)
    assert runs.refresh() == {}
    assert ("--runs-dir" in runs.problem) == (kind != "missing")
    with pytest.raises(NotFound):
        runs.find("run/x")


def test_row_of_a_run_that_was_killed_states_it_as_its_page_does(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path, "half", NOW)
    run.write_status(resource() | {"spec": {"template": {"spec": {"containers": [None]}}}})
    runs = LocalRuns(tmp_path)
    (row,) = runs.refresh().values()
    assert row.state.word == runs.read_page(row.key).state.word == "Interrupted"
    assert row.reason.startswith("`ddp run` was killed while the job was Pending")


@pytest.mark.parametrize("name", [b'<b>&"', b"a\x1b[31m", "\u202eb".encode(), b"q?a=1#f%2e", b"raw\xff", b"new\nline"])
def test_key_of_a_run_with_any_name_is_a_path_and_finds_it(tmp_path: Path, name: bytes) -> None:
    make_run(tmp_path, "run", "Succeeded").path.rename(tmp_path / os.fsdecode(name))
    runs = LocalRuns(tmp_path)
    (row,) = runs.refresh().values()
    assert re.fullmatch(r"run/[\w.~%-]+", row.key)
    assert runs.read_page(row.key).key == row.key

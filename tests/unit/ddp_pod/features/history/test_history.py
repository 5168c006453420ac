"""The launcher stores a record in a folder or at a URL, keeps the newest, and reports why it cannot."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from pathlib import Path

import fsspec
import pytest

from ddp_pod.contract.names import EXIT_OK, EXIT_RETRYABLE, EXIT_USER_ERROR
from ddp_pod.features.history import store as history
from tests.support.launcher_folder import lay_out

PATH = "ddp-history/team/20261120T120000Z-train-1a2b3c4d.json.gz"
CONTENT = base64.b64encode(b"record").decode()


@pytest.fixture
def message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the file of the termination message."""
    path = tmp_path / "termination"
    monkeypatch.setenv("DDP_TERMINATION_LOG", str(path))
    return path


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_record_is_stored_in_folder(tmp_path: Path, scheme: str) -> None:
    assert history.main([CONTENT, f"{scheme}{tmp_path}", PATH]) == EXIT_OK
    assert (tmp_path / PATH).read_bytes() == b"record"
    assert [path.name for path in (tmp_path / PATH).parent.iterdir()] == [Path(PATH).name]


def test_newest_records_are_kept_and_other_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "KEEP", 2)
    folder = (tmp_path / PATH).parent
    folder.mkdir(parents=True)
    names = ["20261119T000000Z-z-1.json.gz", "20261121T000000Z-a-2.json.gz", "notes.txt"]
    for name in names:
        (folder / name).write_text("")
    assert history.main([CONTENT, str(tmp_path), PATH]) == EXIT_OK
    assert {path.name for path in folder.iterdir()} == {*names[1:], Path(PATH).name}


def test_record_is_stored_at_url_and_newest_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "KEEP", 1)
    system = fsspec.filesystem("memory")
    system.store.clear()
    old = "/place/ddp-history/team/20251120T120000Z-train-00000000.json.gz"
    system.pipe_file(old, b"old")
    assert history.main([CONTENT, "memory://place", PATH]) == EXIT_OK
    assert system.cat_file(f"/place/{PATH}") == b"record"
    assert not system.exists(old)


def test_missing_plug_in_is_final_and_named(message: Path) -> None:
    assert history.main([CONTENT, "nothing://bucket", PATH]) == EXIT_USER_ERROR
    assert "nothing" in json.loads(message.read_text())["message"]


def test_folder_that_cannot_be_written_is_retried_and_named(tmp_path: Path, message: Path) -> None:
    (tmp_path / "file").write_text("")
    assert history.main([CONTENT, str(tmp_path / "file"), PATH]) == EXIT_RETRYABLE
    assert str(tmp_path / "file") in json.loads(message.read_text())["message"]


def test_delivered_launcher_stores_record(tmp_path: Path) -> None:
    launcher = lay_out(tmp_path / "launcher")
    subprocess.run([sys.executable, str(launcher), "history", CONTENT, str(tmp_path), PATH], check=True, timeout=60)
    assert (tmp_path / PATH).read_bytes() == b"record"

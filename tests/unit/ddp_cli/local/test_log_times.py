"""When the lines of a local run's logs were written."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddp_cli.local.folder import RunFolder
from ddp_cli.local.log_times import LogClock, LogNote, find_time, read_notes
from tests.support.builders import NOW


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder.create(tmp_path, "train", NOW)


def test_growth_of_a_log_is_noted_once(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    log = folder.logs / "attempt-1-pod-0.log"
    clock = LogClock(folder)
    clock.note()
    for seconds, text in ((1, "one\n"), (2, ""), (3, "two\n")):
        monkeypatch.setattr("time.time_ns", lambda now=seconds: now * 10**9)
        with log.open("a") as stream:
            stream.write(text)
        clock.note()
    assert read_notes(folder, log) == [LogNote(4, 1000), LogNote(8, 3000)]


def test_line_has_the_time_of_the_note_that_covers_it() -> None:
    notes = [LogNote(4, 1000), LogNote(8, 3000)]
    times = [find_time(notes, end) for end in (3, 4, 5, 8, 9)]
    assert [time[17:19] for time in times] == ["01", "01", "03", "03", ""]
    assert find_time([], 3) == ""


def test_damaged_notes_and_missing_ones_are_left_out(folder: RunFolder) -> None:
    log = folder.logs / "attempt-1-pod-0.log"
    assert read_notes(folder, log) == []
    log.with_suffix(".times").write_text("x\n5\n7 99999999999999999999999\n9 -4\n3 5 6\n4 1000\n")
    assert read_notes(folder, log) == [LogNote(4, 1000)]

"""The files that ranks map, as the launcher keeps them."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from ddp_pod.base.files import write_json
from ddp_pod.base.pod import WorkerRecord
from ddp_pod.features.watchdog.mappings import MappedFilesKeeper
from tests.support.launcher_config import launcher_pod


def test_mappings_of_a_rank_are_read_at_growing_pauses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    read: list[float] = []
    monkeypatch.setattr("time.time", lambda: now)
    monkeypatch.setattr(
        "ddp_pod.features.watchdog.mappings.list_workers", lambda pod: [WorkerRecord(7, 0, 0, 0, started=1000.0)]
    )
    monkeypatch.setattr(
        "ddp_pod.features.watchdog.mappings.list_mapped_files", lambda pid: read.append(now - 1000.0) or []
    )
    keeper = MappedFilesKeeper(launcher_pod(tmp_path))
    for moment in range(1, 6000):
        now = 1000.0 + moment / 2
        keeper.keep()
    pauses = [after - before for before, after in itertools.pairwise(read)]
    assert max(pauses[:9]) == 0.5, "a rank that has just started maps its files"
    assert pauses[-1] == max(pauses) == 60
    assert len(pauses) < 120

    read.clear()
    (tmp_path / "errors").mkdir()
    write_json(str(tmp_path / "errors/0.json"), {})
    now += 100
    keeper.keep()
    assert not read, "what a rank maps when it ends explains nothing"

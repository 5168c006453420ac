"""The benchmark command, with real ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.bench.trainer.cli import main

pytestmark = [pytest.mark.nightly, pytest.mark.process]


def test_quick_run_on_two_ranks_measures_all_contenders_and_link(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    sizes = ["--ranks", "2", "--rounds", "1", "--seconds", "0.01"]
    flags = ["--quick", "--device", "cpu", "--systems", "fashion-mnist-wideresnet", *sizes]
    assert main([*flags, "--output-dir", str(tmp_path)]) == 0
    message = capsys.readouterr().out
    assert "data: fashion-mnist is noise in the true format" in message
    (case,) = json.loads((tmp_path / "benchmark.json").read_text())["cases"]
    assert case["notAvailable"] is None, message
    assert [row["who"] for row in case["rows"]] == ["documents", "ours:preset", "bare:preset", "mute:preset"]
    for row in case["rows"]:
        assert row["images_per_second"] > 0
    ours = case["rows"][1]
    assert ours["to_documents"] > 0
    assert ours["of_bare"] > 0
    assert ours["data"] > 0
    assert ours["compute"] > 0
    assert ours["communication"] >= 0
    assert case["link"]["bandwidth"] > 0
    assert "ring all-reduce" in message

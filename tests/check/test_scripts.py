"""`ddp check` on the table of faulty scripts, and on scripts without a fault."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import pytest

from tests.check.faults import FAULTS, SCRIPTS

RIGHT: Final = (
    "mlp", "cnn", "amp", "accumulation", "gan", "ema", "lbfgs", "uneven", "stream", "fsdp", "manual",
)  # fmt: skip
_SECONDS: Final = 600


def check(folder: Path, script: str) -> tuple[int, list[dict[str, Any]]]:
    """Return the exit code of `ddp check`, and its verdicts."""
    command = [sys.executable, "-m", "ddp_cli", "check", script, "--json"]
    ran = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=_SECONDS, check=False)
    assert ran.stdout.startswith("{"), f"exit code {ran.returncode}\n{ran.stdout}\n{ran.stderr}"
    return ran.returncode, json.loads(ran.stdout)["checks"]


def list_failed(verdicts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the failed checks of a report."""
    return [verdict for verdict in verdicts if verdict["state"] == "failed"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with all scripts, as a user has them."""
    return Path(shutil.copytree(SCRIPTS, tmp_path / "work", ignore=shutil.ignore_patterns("__*__*")))


@pytest.mark.process
@pytest.mark.timeout(_SECONDS)
@pytest.mark.parametrize("name", FAULTS)
def test_planted_fault_is_reported_with_its_line_and_nothing_else(name: str, folder: Path) -> None:
    fault = FAULTS[name]
    (folder / fault.script).write_text(fault.write())
    code, verdicts = check(folder, fault.script)

    failed = {verdict["check"]: verdict for verdict in list_failed(verdicts)}
    assert set(failed) == {fault.check, *fault.also}, failed
    assert code == 1
    file, _, line = failed[fault.check]["place"].rpartition(":")
    assert Path(file).name == fault.script
    assert abs(int(line) - fault.find_line()) <= 1, (failed[fault.check], fault.find_line())


@pytest.mark.process
@pytest.mark.timeout(_SECONDS)
@pytest.mark.parametrize("script", RIGHT)
def test_right_script_passes(script: str, folder: Path) -> None:
    code, verdicts = check(folder, f"{script}.py")
    assert not list_failed(verdicts)
    assert code == 0

"""`ddp check` on the tutorial's script: unchanged, with a fault, and interrupted."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support import PATIENCE, ROOT
from tests.unit.test_docs import fenced

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]


def start_check(folder: Path, *edits: tuple[str, str], options: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    """Start the check of the tutorial's script, with some texts replaced."""
    (script,) = fenced((ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8"), "python")
    for old, new in edits:
        assert script.count(old) == 1
        script = script.replace(old, new)
    (folder / "project").mkdir()
    (folder / "temporary").mkdir()
    (folder / "project" / "train.py").write_text(script)
    return subprocess.Popen(
        [sys.executable, "-m", "ddp_cli", "check", "train.py", "--cpu", "--json", *options],
        cwd=folder / "project",
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "TMPDIR": str(folder / "temporary")},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> dict[str, Any]:
    output, errors = process.communicate(timeout=500)
    assert output, errors
    document: dict[str, Any] = json.loads(output)
    return document | {"states": {verdict["check"]: verdict["state"] for verdict in document["checks"]}}


def list_left(folder: Path) -> list[str]:
    """Return the user's files and those of the temporary folder."""
    return [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]


def list_processes(folder: Path) -> list[psutil.Process]:
    """Return the processes whose environment names the folder, after those have ended that were killed."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if any(str(folder) in value for value in process.environ().values()):
                found.append(process)
    return psutil.wait_procs(found, timeout=10)[1]


def test_right_script_passes_every_check_that_applies(tmp_path: Path) -> None:
    with start_check(tmp_path) as process:
        result = finish(process)
    assert process.returncode == 0, result
    assert "failed" not in result["states"].values()
    assert [run["name"] for run in result["runs"]] == ["reference", "repeat", "resumed"]
    assert result["states"]["resumes exactly"] == "passed"
    assert list_left(tmp_path) == ["project/train.py"]


def test_fault_is_reported_with_its_line(tmp_path: Path) -> None:
    with start_check(tmp_path, ("    sampler.set_epoch(epoch)\n", "")) as process:
        result = finish(process)
    assert process.returncode == 1
    (failed,) = [verdict for verdict in result["checks"] if verdict["state"] == "failed"]
    assert failed["check"] == "another order each epoch"
    assert failed["place"].startswith("train.py:")
    assert "set_epoch" in failed["remedy"]
    assert result["states"]["stops in time"] == "passed"


def test_runs_share_two_imports_and_a_rank_gets_another_order_of_sets(tmp_path: Path) -> None:
    edit = ("import torch\n", 'import torch\nprint("seed", hash("ddp"), os.environ["DDP_LOCAL_POD"], flush=True)\n')
    with start_check(tmp_path, edit, options=("--keep",)) as process:
        result = finish(process)
    assert process.returncode == 0, result

    logs = {(log.parts[-5], log.stem[-1]): log for log in (tmp_path / "temporary").glob("*/*/runs/*/logs/*.log")}
    seeds = {key: set(re.findall(r"^seed (-?\d+)", log.read_text(), re.MULTILINE)) for key, log in logs.items()}
    assert seeds["reference", "0"].isdisjoint(seeds["reference", "1"])
    for run in ("repeat", "resumed"):
        assert seeds[run, "0"] == seeds["reference", "1"]
        assert seeds[run, "1"] == seeds["reference", "0"]
    assert all(len(group) == 1 for group in seeds.values())  # also after restarts
    assert list_processes(tmp_path) == []


def test_launchers_explain_ranks_that_wait_for_each_other(tmp_path: Path) -> None:
    wrong = 'os.environ["MASTER_PORT"] = "29599"\ndist.init_process_group('
    with start_check(tmp_path, ("dist.init_process_group(", wrong)) as process:
        output, errors = process.communicate(timeout=500)
    assert (process.returncode, output) == (1, "")
    assert "is not the job's store" in errors
    assert "train.py:" in errors
    assert list_left(tmp_path) == ["project/train.py"]
    assert not list_processes(tmp_path)


def test_ctrl_c_ends_all_processes_and_removes_the_copies(tmp_path: Path) -> None:
    with start_check(tmp_path) as process:
        deadline = time.monotonic() + PATIENCE
        while not list((tmp_path / "temporary").glob("*/reference/runs/*/pods/*")):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=PATIENCE)
    assert process.returncode == 130
    assert list_left(tmp_path) == ["project/train.py"]
    assert not list_processes(tmp_path)

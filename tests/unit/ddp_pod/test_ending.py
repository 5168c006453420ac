"""What keeps the process of a rank alive after its program, and its end after a limit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ddp_pod import bootstrap
from ddp_pod.rank import ending

SCRIPT = """
import atexit, multiprocessing, os, sys, threading, time
from ddp_pod.contract.plan import WatchdogConfig
from ddp_pod.rank import ending

ending._SECONDS_TO_END = 0.2
ending._SECONDS_BETWEEN_CHECKS = 0.2

class Uploader(threading.Thread):
    def run(self):
        if sys.argv[1] == "working":
            total = 0
            while total < 30_000_000:
                total += 1
            return
        threading.Event().wait()

def flush():
    threading.Event().wait()

def work():
    parent = os.getppid()
    while os.getppid() == parent:
        time.sleep(0.1)

kind, action, path = sys.argv[1:]
if kind in ("waiting", "working"):
    Uploader(name="uploader").start()
elif kind == "handler":
    atexit.register(flush)
elif kind == "child":
    multiprocessing.get_context("fork").Process(target=work, name="reader").start()
print("done")
ending.guard_end(WatchdogConfig(9, 1.5, 600, action), path)
raise SystemExit(0)
"""
SOURCES = str(Path(bootstrap.__file__).parents[1])


@pytest.mark.process
@pytest.mark.parametrize(
    ("kind", "keeper"),
    [
        ("waiting", "thread uploader ({run}, train.py:16) keeps its process alive"),
        ("handler", "its main thread (flush, train.py:19) has not ended"),
        ("child", "process reader (pid "),
    ],
)
def test_process_that_only_waits_ends_with_0_and_names_its_keeper(tmp_path: Path, kind: str, keeper: str) -> None:
    done = run(tmp_path, kind, "Restart")
    run_name = "Uploader.run" if sys.version_info >= (3, 11) else "run"
    assert done.returncode == 0
    assert done.stdout == "done\n"
    assert keeper.format(run=run_name) in done.stderr
    record = json.loads((tmp_path / "0.ending").read_text())
    assert keeper.format(run=run_name) in record["keeper"]
    assert record["ended"] is True


@pytest.mark.process
@pytest.mark.parametrize("kind", ["working", "nothing"])
def test_process_that_works_or_ends_is_left_alone(tmp_path: Path, kind: str) -> None:
    done = run(tmp_path, kind, "Restart")
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


def run(folder: Path, kind: str, action: str) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(SCRIPT)
    return subprocess.run(
        [sys.executable, folder / "train.py", kind, action, folder / "0.ending"],
        env={**os.environ, "PYTHONPATH": SOURCES},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


def test_end_is_not_watched_where_hangs_are_only_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[object] = []
    monkeypatch.setattr("_thread.start_new_thread", lambda *arguments: started.append(arguments))
    ending.guard_end(None, "x")
    ending.guard_end(ending.WatchdogConfig(1, 1, 1, "Report"), "x")
    assert not started
    ending.guard_end(ending.WatchdogConfig(1, 1, 1, "Fail"), "x")
    assert len(started) == 1

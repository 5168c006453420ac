"""For what ranks wait outside of collectives."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ddp_pod.base.pod import WorkerRecord
from ddp_pod.features.watchdog.helpers import find_helper
from ddp_pod.features.watchdog.stacks import Stack, StackFrame
from tests.support.launcher_config import launcher_pod


def in_file(path: str) -> Stack:
    return Stack([StackFrame(path, 1, "wait")], "")


def test_callers_of_a_pool_wait_for_its_processes_by_its_thread() -> None:
    library = "/usr/lib/python3.11/"
    waits = [StackFrame("/app/train.py", 9, "main"), StackFrame(f"{library}threading.py", 629, "wait")]
    pool = StackFrame(f"{library}multiprocessing/pool.py", 367, "map")
    assert not Stack(waits, "").waits_for_process
    called = Stack([waits[0], pool, waits[1]], "")
    assert called.waits_for_thread
    assert called.waits_for_process


@pytest.mark.parametrize(
    ("message", "is_advised"), [("OwnError.__init__() missing 1 required argument: 'n'", True), ("bad value", False)]
)
def test_exception_that_a_pool_cannot_read_has_a_remedy(tmp_path: Path, message: str, *, is_advised: bool) -> None:
    (tmp_path / "output").mkdir()
    trace = 'Traceback (most recent call last):\n  File "/app/data.py", line 3, in fill\n    f()\n'
    (tmp_path / "output/0.end").write_text(f"Exception in thread Thread-3:\n{trace}TypeError: {message}\n")
    names = ("multiprocessing/pool.py", "threading.py")
    waits = Stack([StackFrame(f"/usr/lib/python3.11/{name}", 367, "map") for name in names], "")
    helper = find_helper(launcher_pod(tmp_path), WorkerRecord(1, 0, 0, 0), waits)
    assert ("__reduce__" in helper.remedy) is is_advised


@pytest.mark.parametrize(
    ("end", "note"),
    [
        ("os.abort()", "was killed by SIGABRT"),
        ("os._exit(3)", "has exited with code 3"),
        ("os._exit(137)", "was killed by SIGKILL"),
        ("os._exit(0)", ""),
    ],
)
def test_child_that_was_not_awaited_explains_a_wait_for_a_message(tmp_path: Path, end: str, note: str) -> None:
    (tmp_path / "output").mkdir()
    pod = launcher_pod(tmp_path)
    # A rank of its own, which does not await its child: this process may have children of other tests.
    program = f"""
import os, subprocess, sys
ended = subprocess.Popen(["false"])  # no helper
child = os.fork()
if not child:
    {end}
os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
print(flush=True)
sys.stdin.readline()
"""
    rank = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    worker = WorkerRecord(rank.pid, 0, 0, 0)
    with rank:
        assert rank.stdout is not None
        rank.stdout.readline()
        waits = find_helper(pod, worker, in_file("/usr/lib/python3.11/multiprocessing/connection.py"))
        assert note in waits.note
        assert bool(waits.note) is waits.has_ended is bool(note)
        assert find_helper(pod, worker, in_file("/app/train.py")).note == ""

"""What the kernel shows of a rank that waits for a pipe, a child, a file or a service."""

from __future__ import annotations

import fcntl
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ddp_pod.contract.processes import find_family
from ddp_pod.features.watchdog.remedies import (
    CHILD_REMEDY,
    FIFO_REMEDY,
    FILE_LOCK_REMEDY,
    OPEN_INPUT_REMEDY,
    OPEN_PIPE_REMEDY,
    SERVICE_REMEDY,
)
from ddp_pod.features.watchdog.wait_channels import (
    KernelWait,
    find_kernel_wait,
    identify_wait,
    waits_for_missing_thread,
)

START = "import fcntl, os, socket, sys, time\nfrom subprocess import PIPE, Popen\n"
PIPES = START + "child = Popen({command}, stdin=PIPE, stdout=PIPE)\n"
CAT = PIPES.format(command="['cat']")
SLEEP = PIPES.format(command="['sleep', '600']")

Find = Callable[[str], KernelWait]


@pytest.fixture
def find(tmp_path: Path) -> Iterator[Find]:
    """Run a script until the kernel shows the same wait twice, and return that."""
    processes = []

    def run(script: str) -> KernelWait:
        process = subprocess.Popen(
            [sys.executable, "-c", script], cwd=tmp_path, stdin=subprocess.DEVNULL, start_new_session=True
        )
        processes.append(process)
        waits: list[KernelWait | None] = [None]
        while waits[-1] is None or waits.count(waits[-1]) < 10:  # a new child has not begun to wait
            assert process.poll() is None
            time.sleep(0.05)
            waits.append(find_kernel_wait(process.pid))
        return waits[-1]

    yield run
    for process in processes:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.mark.parametrize("call", ["child.stdout.read()", "child.wait()", "os.waitid(os.P_PID, child.pid, os.WEXITED)"])
def test_child_without_end_of_its_input_is_final(find: Find, call: str) -> None:
    wait = find(CAT + call)
    assert re.search(r"its process \d+ \(cat\), which waits for input from the rank$", wait.note)
    assert wait[1:] == (OPEN_INPUT_REMEDY, True)


@pytest.mark.parametrize("call", ["child.stdout.read()", "child.wait()"])
def test_child_that_waits_for_something_else_is_named(find: Find, call: str) -> None:
    wait = find(SLEEP + call)
    assert re.search(r"its process \d+ \(sleep\)$", wait.note)
    assert wait[1:] == (CHILD_REMEDY, False)


def test_child_whose_input_another_one_may_write_is_not_final(find: Find) -> None:
    script = START + "r, w = os.pipe()\nPopen(['sleep', '600'], pass_fds=[w])\nchild = Popen(['cat'], stdin=r)\n"
    assert find(script + "child.wait()").remedy == CHILD_REMEDY


def test_full_input_of_a_child_is_named(find: Find) -> None:
    wait = find(SLEEP + "child.stdin.write(bytes(1 << 20)); child.stdin.flush()")
    assert re.search(r"until its process \d+ \(sleep\) reads its input", wait.note)


def test_own_pipe_is_named(find: Find) -> None:
    assert find(START + "r, w = os.pipe()\nos.read(r, 1)").remedy == OPEN_PIPE_REMEDY
    assert find(START + "os.mkfifo('queue')\nopen('queue')").remedy == FIFO_REMEDY


def test_lock_of_a_file_is_named_with_its_holder(find: Find, tmp_path: Path) -> None:
    with (tmp_path / "cache.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        wait = find(START + "fcntl.flock(open('cache.lock', 'w'), fcntl.LOCK_EX)")
    assert f"/cache.lock, which process {os.getpid()} (" in wait.note
    assert wait.remedy == FILE_LOCK_REMEDY


def test_holder_of_a_lock_that_the_kernel_does_not_show_is_not_named(
    find: Find, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ddp_pod.features.watchdog.wait_channels._LOCKS_LIMIT", 0)
    script = START + "files = [open('cache.lock', 'w') for _ in range(2)]\nfor file in files: fcntl.flock(file, 2)"
    assert find(script).note.endswith("/cache.lock")


def test_service_is_named(find: Find) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        wait = find(START + f"socket.create_connection(('127.0.0.1', {port})).recv(1)")
    assert wait == KernelWait(f"it waits for data from 127.0.0.1:{port}", SERVICE_REMEDY)


def test_nothing_is_known_of_other_processes_pipes() -> None:
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as process:
        assert find_kernel_wait(process.pid) is None, "this process may write"
        assert process.stdin is not None
        process.stdin.close()
    assert find_kernel_wait(process.pid) is None


def test_same_wait_of_another_process_has_the_same_identity(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "queue")
    script = "import os; os.read(os.open('queue', os.O_RDWR), 1)"
    identities = set()
    for _ in range(2):
        process = subprocess.Popen([sys.executable, "-c", script], cwd=tmp_path)
        try:
            while find_kernel_wait(process.pid) is None:
                assert process.poll() is None
                time.sleep(0.05)
            identities.add(identify_wait(process.pid))
        finally:
            process.kill()
            process.wait()
    (identity,) = identities
    assert re.fullmatch(r"\w*pipe_read\w* .*/queue", identity)


def test_unknown_wait_has_no_identity() -> None:
    assert identify_wait(2**22 + 1) == ""


LOCK = """import os, threading, time
lock = threading.Lock()
holder = threading.Thread(target=lambda: (lock.acquire(), time.sleep(600)), daemon=True)
holder.start()
while not lock.locked():
    time.sleep(0.01)
"""


@pytest.mark.parametrize(
    ("wait", "is_missing"),
    [
        ("os.fork() or lock.acquire()\ntime.sleep(600)", True),
        ("os.fork() or lock.acquire(timeout=500)\ntime.sleep(600)", False),
        ("os.fork() or time.sleep(600)\ntime.sleep(600)", False),
        ("lock.acquire()", False),
    ],
)
def test_lock_of_a_thread_that_was_not_forked_is_never_released(wait: str, *, is_missing: bool) -> None:
    with subprocess.Popen([sys.executable, "-c", LOCK + wait], start_new_session=True) as process:
        try:
            deadline = time.monotonic() + 60
            pids: list[int] = []
            while len(pids) < 1 + wait.count("fork") and time.monotonic() < deadline:
                pids = find_family(process.pid)
            seen = [waits_for_missing_thread(pids[-1])]
            while seen.count(is_missing) < 10 and time.monotonic() < deadline:  # it has not begun to wait
                time.sleep(0.05)
                seen.append(waits_for_missing_thread(pids[-1]))
        finally:
            os.killpg(process.pid, signal.SIGKILL)
    assert seen[-10:] == [is_missing] * 10

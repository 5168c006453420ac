"""Real, tiny processes: how they end, and that all their children end with them."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ddp_cli.local import processes
from ddp_cli.local.processes import Lifeline, PodProcess, find_marked, start

Begin = Callable[..., PodProcess]
SLEEP = "import time; time.sleep(600)"


@pytest.fixture
def mark() -> Iterator[str]:
    value = uuid.uuid4().hex
    yield value
    for pid in find_marked(value):
        processes.kill(pid, signal.SIGKILL)


@pytest.fixture
def lifeline() -> Iterator[Lifeline]:
    pipe = Lifeline()
    yield pipe
    pipe.close()


@pytest.fixture
def begin(tmp_path: Path, mark: str, lifeline: Lifeline) -> Begin:
    def begin(code: str, folder: str | None = None, program: str = sys.executable) -> PodProcess:
        log = tmp_path / "log"
        command = [program, "-S", "-c", code]
        return start(command, os.environ, folder, log=log, mark=mark, lifeline=lifeline)

    return begin


async def appears(path: Path) -> None:
    async with asyncio.timeout(300):
        while True:
            if path.exists():
                return
            await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    ("code", "exit_code"),
    [
        ("pass", 0),
        ("raise SystemExit(82)", 82),
        ("import os; os.kill(os.getpid(), 9)", 137),
        ("import os; os.kill(os.getpid(), 15)", 143),
    ],
)
async def test_exit_code_is_containers(begin: Begin, code: str, exit_code: int) -> None:
    assert await begin(code).wait() == exit_code


async def test_terminate_reaches_process(begin: Begin, tmp_path: Path) -> None:
    code = f"""
import pathlib, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(85))
pathlib.Path({str(tmp_path)!r}, "ready").touch()
time.sleep(600)
"""
    process = begin(code)
    await appears(tmp_path / "ready")
    process.terminate()
    assert await process.wait() == 85
    process.terminate()  # again, after its end: without effect
    process.kill()


async def test_kill_ends_everything_at_once(begin: Begin, mark: str, tmp_path: Path) -> None:
    code = f"""
import pathlib, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
subprocess.Popen([sys.executable, "-S", "-c", {SLEEP!r}], start_new_session=True)
pathlib.Path({str(tmp_path)!r}, "ready").touch()
time.sleep(600)
"""
    process = begin(code)
    await appears(tmp_path / "ready")
    process.kill()
    assert await process.wait() == 137
    assert find_marked(mark) == []


async def test_end_is_reported_after_all_processes_ended(
    begin: Begin, mark: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A killed process exists until it gets the CPU to end, which takes seconds on a busy machine."""
    code = f"""
import pathlib, subprocess, sys
subprocess.Popen([sys.executable, "-S", "-c", {SLEEP!r}], start_new_session=True)
pathlib.Path({str(tmp_path)!r}, "ready").touch()
"""
    killed: list[int] = []
    kill = processes.kill

    def kill_late(pid: int, number: signal.Signals) -> None:
        killed.append(pid)
        if len(killed) > 5:
            kill(pid, number)

    monkeypatch.setattr(processes, "kill", kill_late)
    assert await begin(code).wait() == 0
    assert len(killed) > 5
    assert find_marked(mark) == []

"""The process of `ddp run` for all runs of a check, with commands that start no pod."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from ddp_cli.commands.io import ExitCode
from ddp_cli.features.check.run_process import RunHost, RunOrder, RunProcess


@pytest.fixture
def host() -> Iterator[RunHost]:
    host = RunHost(2)
    yield host
    host.close()
    host.close()  # again: nothing to do


def start(host: RunHost, folder: Path, *words: str) -> RunProcess:
    (folder / "input").write_text("")
    order = RunOrder(words, str(folder), {**os.environ, "COLUMNS": "120"}, is_first=True)
    return host.start(order, folder / "input", folder / "output")


def test_runs_follow_one_another_in_one_process(host: RunHost, tmp_path: Path) -> None:
    run = start(host, tmp_path, "--help")
    assert run.wait(60) == run.poll() == run.returncode == 0
    assert "usage: ddp run" in (tmp_path / "output").read_text()
    process = host.pid

    assert start(host, tmp_path, "missing.py").wait(60) == ExitCode.BAD_INPUT
    assert "missing.py: No such file" in (tmp_path / "output").read_text()
    assert host.pid == process


def test_killed_process_is_replaced_for_the_next_run(host: RunHost, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "job.yaml")  # nothing writes into it: the run waits
    run = start(host, tmp_path, "job.yaml")
    with pytest.raises(subprocess.TimeoutExpired):
        run.wait(0.1)
    assert run.poll() is None
    run.kill()
    assert run.wait(60) == -signal.SIGKILL
    run.terminate()  # has no effect
    assert start(host, tmp_path, "--help").wait(60) == 0


def test_process_that_was_killed_before_it_has_read_its_order_has_ended(host: RunHost, tmp_path: Path) -> None:
    assert start(host, tmp_path, "--help").wait(60) == 0
    os.kill(host.pid, signal.SIGSTOP)
    run = start(host, tmp_path, "--help")
    run.kill()
    assert run.wait(60) == -signal.SIGKILL

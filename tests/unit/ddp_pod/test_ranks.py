"""The processes of a pod's ranks: exit codes and their end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic.multiprocessing import SignalException

from ddp_pod.contract.processes import STOP_SIGNALS
from ddp_pod.torchrun.ranks import ForkingLogs, RankProcesses, RanksForked, hold_stop_signals

STUBBORN = "import signal, time; signal.signal(15, signal.SIG_IGN); print('ready', flush=True); time.sleep(600)"
SAVES = """
import signal, sys, time
signal.signal(15, lambda *_: sys.exit(85))
print("ready", flush=True)
time.sleep(600)
"""


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[bytes]]]:
    processes: list[subprocess.Popen[bytes]] = []
    yield processes
    for process in processes:
        process.kill()
        process.communicate()


def start(started: list[subprocess.Popen[bytes]], *codes: str) -> RankProcesses:
    for code in codes:
        command = [sys.executable, "-c", code]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True))
    for process in started:
        assert process.stdout is not None
        process.stdout.readline()
    return RankProcesses({rank: process.pid for rank, process in enumerate(started)})


def until_ended(ranks: RankProcesses, number: int) -> dict[int, int]:
    deadline = time.monotonic() + 60
    while len(ranks.poll()) < number:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return ranks.poll()


def test_exit_codes_are_read_without_reaping(started: list[subprocess.Popen[bytes]]) -> None:
    kill = "import os; os.kill(os.getpid(), 9)"
    ranks = start(started, "", "import sys; sys.exit(3)", kill, STUBBORN)
    assert until_ended(ranks, 3) == {0: 0, 1: 3, 2: -9}
    assert set(ranks.failed_at) == {1, 2}
    assert [process.wait() for process in started[:3]] == [0, 3, -9]
    assert ranks.poll() == {0: 0, 1: 3, 2: -9}


def test_rank_gets_its_grace_time_and_a_stubborn_one_is_killed(started: list[subprocess.Popen[bytes]]) -> None:
    ranks = start(started, SAVES, STUBBORN)
    ranks.stop(signal.SIGTERM, 1.0, saves=True)
    assert ranks.exit_codes == {0: 85, 1: -9}


@pytest.mark.parametrize(("saves", "code"), [(True, 85), (False, -9)])
def test_stopped_rank_continues_to_save_or_is_killed(
    started: list[subprocess.Popen[bytes]], saves: bool, code: int
) -> None:
    ranks = start(started, SAVES)
    started[0].send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, started[0].pid, os.WSTOPPED | os.WNOWAIT)
    ranks.stop(signal.SIGTERM, 60.0, saves=saves)
    assert ranks.exit_codes == {0: code}


HELPED = """
import os, signal, subprocess, time
helper = subprocess.Popen(["sleep", "20"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
def save(*_):
    time.sleep(0.5)  # for the signal to the helper
    os._exit(85 if helper.poll() is None else 1)
signal.signal(signal.SIGTERM, save)
print(flush=True)
while True:
    signal.pause()
"""
"""A rank with a helper, as a worker of a DataLoader: it can save as long as the helper lives."""


@pytest.mark.parametrize(("knows_trainers", "code"), [(True, 85), (False, 1)])
def test_helper_of_a_rank_that_handles_the_signal_does_not_get_it(
    started: list[subprocess.Popen[bytes]], knows_trainers: bool, code: int
) -> None:
    ranks = start(started, HELPED)
    trainers = {0: [started[0].pid, os.getpid()]} if knows_trainers else None
    ranks.stop(signal.SIGTERM, 60.0, saves=True, trainers=trainers)
    assert ranks.exit_codes == {0: code}


def test_signal_is_held_until_ranks_are_known() -> None:
    known: list[str] = []

    def start_ranks() -> None:
        with hold_stop_signals():
            os.kill(os.getpid(), signal.SIGTERM)
            known.append("rank")

    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    try:
        with pytest.raises(SignalException, match="SIGTERM"):
            start_ranks()
        with pytest.raises(SignalException, match="SIGHUP"):
            os.kill(os.getpid(), signal.SIGHUP)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert known == ["rank"]


class Logs:
    """torchrun's log specification, and the files that it returns."""

    root_log_dir = "/logs"

    def __init__(self, folder: Path) -> None:
        self.stdouts = {0: str(folder / "stdout-0"), 1: ""}
        self.stderrs = {0: "", 1: ""}
        self.tee_stdouts: dict[int, str] = {}
        self.tee_stderrs: dict[int, str] = {}
        self.error_files = {0: "/logs/0/error.json", 1: "/logs/1/error.json"}

    def reify(self, envs: dict[int, dict[str, str]]) -> Logs:
        """Add a variable as torchrun does, and return the files."""
        for local_rank, environment in envs.items():
            environment["TORCHELASTIC_ERROR_FILE"] = self.error_files[local_rank]
        return self


class Forker:
    """Starts processes as a fork server that ends after ``lives`` of them."""

    def __init__(self, started: list[subprocess.Popen[bytes]], lives: int) -> None:
        self._started = started
        self._lives = lives
        self.requests: list[tuple[list[str], str, list[str]]] = []

    def fork(self, command: list[str], environment: dict[str, str], output: list[Any]) -> int | None:
        """Start a process that sleeps."""
        if len(self.requests) == self._lives:
            return None
        names = [os.path.basename(file.name) if file else "" for file in output]
        self.requests.append((command, environment["TORCHELASTIC_ERROR_FILE"], names))
        self._started.append(subprocess.Popen(["sleep", "600"], start_new_session=True))
        return self._started[-1].pid


class TestForkingLogs:
    COMMAND = ("train.py", "--rank=${local_rank}")

    def reify(self, forker: Any, logs: Logs) -> Any:
        return ForkingLogs(logs, forker, self.COMMAND, "default", "").reify({0: {"RANK": "2"}, 1: {"RANK": "3"}})

    def test_fork_server_starts_ranks_in_place_of_torchrun(
        self, started: list[subprocess.Popen[bytes]], tmp_path: Path
    ) -> None:
        forker = Forker(started, 2)
        with pytest.raises(RanksForked) as caught:
            self.reify(forker, Logs(tmp_path))
        assert forker.requests == [
            (["train.py", "--rank=0"], "/logs/0/error.json", ["stdout-0", ""]),
            (["train.py", "--rank=1"], "/logs/1/error.json", ["", ""]),
        ]
        assert caught.value.ranks.pids == {0: started[0].pid, 1: started[1].pid}

    def test_torchrun_starts_ranks_if_fork_server_has_ended(
        self, started: list[subprocess.Popen[bytes]], tmp_path: Path
    ) -> None:
        logs = Logs(tmp_path)
        assert self.reify(Forker(started, 1), logs) is logs
        assert started[0].wait() == -signal.SIGKILL, "no rank runs twice"

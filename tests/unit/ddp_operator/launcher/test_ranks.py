"""The processes of a pod's ranks: exit codes and their end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
from torch.distributed.elastic.multiprocessing import SignalException

from ddp_operator.launcher.processes import STOP_SIGNALS
from ddp_operator.launcher.torchrun.ranks import InterceptedLogs, RankProcesses, RanksPrepared, hold_stop_signals

FORKER: Any = None
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


class TestInterceptedLogs:
    class Logs:
        root_log_dir = "/logs"

        def reify(self, envs: dict[int, dict[str, str]]) -> Any:
            envs[0]["TORCHELASTIC_ERROR_FILE"] = "/logs/0/error.json"
            return "files"

    def test_environments_reach_the_agent_before_torchrun_starts_ranks(self) -> None:
        logs = InterceptedLogs(self.Logs(), FORKER)
        logs.intercepts = True
        with pytest.raises(RanksPrepared) as caught:
            logs.reify({0: {"RANK": "0"}})
        assert caught.value.environments == {0: {"RANK": "0", "TORCHELASTIC_ERROR_FILE": "/logs/0/error.json"}}
        assert caught.value.logs == "files"

    def test_torchrun_gets_its_log_files_otherwise(self) -> None:
        logs = InterceptedLogs(self.Logs(), FORKER)
        assert (logs.reify({0: {}}), logs.root_log_dir) == ("files", "/logs")

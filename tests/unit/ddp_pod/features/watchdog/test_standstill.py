"""A rank that polls before the first step, and whether anything moves meanwhile."""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path, PurePosixPath
from typing import Any

import pytest

from ddp_pod.base.pod import WorkerRecord
from ddp_pod.contract.plan import WatchdogConfig
from ddp_pod.contract.processes import find_family
from ddp_pod.contract.records import read_record
from ddp_pod.features.watchdog import helpers, monitor, standstill
from ddp_pod.features.watchdog.collectives import Collective, GroupState, RankCollectives, parse_report
from ddp_pod.features.watchdog.polling import explain_polling
from ddp_pod.features.watchdog.remedies import ANY_CHILD_REMEDY, MISSING_FILE_REMEDY, POLL_REMEDY, RETRY_REMEDY
from ddp_pod.features.watchdog.stacks import Stack, StackFrame
from ddp_pod.features.watchdog.stall import (
    HeartbeatWatchdog,
    JobStall,
    RankActivity,
    RankStall,
    RankWait,
    StallReport,
    group_waits,
)
from ddp_pod.features.watchdog.standstill import Standstill, count_moved_bytes
from ddp_pod.features.watchdog.wait_channels import KernelWait, find_kernel_wait
from ddp_pod.network.connections import find_peer, list_outer_sockets
from ddp_pod.progress.rank_progress import RankReader
from ddp_pod.rank.library_calls import list_paths
from tests.support.launcher_config import launcher_pod

SCRIPT = """
def wait(path, names):
    for name in names:
        while not path.exists():
            while busy:
                pass
            time.sleep(0.5)
    while True:
        time.sleep(1)
    while True:
        try:
            return read(path)
        except OSError:
            time.sleep(1)
"""


@pytest.mark.parametrize(
    ("line", "paths", "note", "remedy"),
    [
        (7, {"path": "none.json", "names": "/"}, "it waits for none.json, which does not exist", MISSING_FILE_REMEDY),
        (7, {"path": "train.py"}, "it sleeps in 'while not path.exists()'", POLL_REMEDY),
        (7, {}, "it sleeps in 'while not path.exists()'", POLL_REMEDY),
        (6, {"path": "none.json"}, "it sleeps in 'while busy'", POLL_REMEDY),
        (8, {"path": "none.json"}, None, None),
        (9, {}, None, None),
        (14, {}, "it tries 'return read(path)' again and again", RETRY_REMEDY),
        (99, {}, None, None),
    ],
)
def test_loop_shows_what_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: int, paths: dict[str, str], note: str | None, remedy: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(SCRIPT)
    polling = explain_polling(StackFrame(str(tmp_path / "train.py"), line, "wait"), paths, os.getpid())
    assert (polling and polling.note, polling and polling.remedy) == (note, remedy)


@pytest.mark.parametrize(
    ("test", "missing"),
    [
        ("not os.path.exists('ready')", "ready"),
        ("not (done() or os.path.isfile(path))", "none"),
        ("not (path.parent / 'ready').exists()", None),
        ("count(path) < 2", None),
        ("not client.exists('bucket/ready')", None),
        ("not os.path.exists('\\0')", None),
        ("not self.path.is_dir()", None),
    ],
)
def test_only_a_file_whose_existence_is_checked_is_called_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, test: str, missing: str | None
) -> None:
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "train.py"
    script.write_text(f"while {test}:\n    time.sleep(1)\n")
    polling = explain_polling(StackFrame(str(script), 2, "wait"), {"path": "none"}, os.getpid())
    assert polling is not None
    assert (polling.remedy == MISSING_FILE_REMEDY) is (missing is not None)
    assert missing is None or polling.note == f"it waits for {missing}, which does not exist"


@pytest.mark.parametrize(
    ("test", "in_library", "note"),
    [
        ("os.path.exists(self.lock)", True, "it waits until self.lock is removed"),
        ("lock.exists()", False, "it waits until build.lock is removed"),
        ("not os.path.exists(lock)", True, None),
        ("redis.exists(lock)", True, None),
        ("busy", True, None),
    ],
)
def test_loop_that_waits_for_the_end_of_a_file_names_it(
    tmp_path: Path, test: str, in_library: bool, note: str | None
) -> None:
    script = tmp_path / "baton.py"
    script.write_text(f"while {test}:\n    time.sleep(0.1)\n")
    polling = explain_polling(
        StackFrame(str(script), 2, "wait"), {"lock": "build.lock"}, os.getpid(), in_library=in_library
    )
    assert (polling.note if polling else None) == note
    assert polling is None or "lock that a killed one has left" in polling.remedy


def test_loop_that_works_until_a_file_appears_waits_for_no_end(tmp_path: Path) -> None:
    script = tmp_path / "serve.py"
    script.write_text("while os.path.exists(lock):\n    jobs = fetch()\n    time.sleep(5)\n")
    polling = explain_polling(StackFrame(str(script), 3, "serve"), {"lock": "run.flag"}, os.getpid())
    assert polling is not None
    assert polling.remedy == POLL_REMEDY


def test_wait_for_any_child_names_those_that_live() -> None:
    program = "import os, subprocess; child = subprocess.Popen(['sleep', '60']); os.wait()"
    waiter = subprocess.Popen([sys.executable, "-c", program])
    try:
        deadline = time.monotonic() + 60
        wait = None
        while (wait is None or "sleep" not in wait.note) and time.monotonic() < deadline:
            time.sleep(0.05)
            wait = find_kernel_wait(waiter.pid)
        assert wait is not None
        assert "the end of any child" in wait.note
        assert wait.remedy == ANY_CHILD_REMEDY
    finally:
        for member in find_family(waiter.pid)[::-1]:
            os.kill(member, signal.SIGKILL)
        waiter.wait()


@pytest.mark.parametrize("content", [b"while True", b"\xff\x00", None])
def test_unreadable_script_shows_no_loop(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "train.py").write_bytes(content)
    assert explain_polling(StackFrame(str(tmp_path / "train.py"), 1, "wait"), {}, os.getpid()) is None


def test_file_of_an_ended_process_is_not_called_missing(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    polling = explain_polling(StackFrame(str(tmp_path / "train.py"), 7, "wait"), {"path": "none"}, 2**22 + 1)
    assert polling is not None
    assert polling.remedy == POLL_REMEDY


def test_rank_that_sleeps_in_a_loop_polls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    own = StackFrame(str(tmp_path / "train.py"), 7, "wait")
    library = StackFrame("/usr/lib/python3.11/subprocess.py", 7, "wait")
    worker = WorkerRecord(os.getpid(), 0, 0, 0)
    monkeypatch.setattr(helpers, "find_kernel_wait", lambda _: None)
    monkeypatch.setattr(helpers, "sleeps_by_clock", lambda _: True)
    assert helpers.explain_wait(worker, Stack([own], ""), RankCollectives()).remedy == POLL_REMEDY
    assert helpers.explain_wait(worker, Stack([own, library], ""), RankCollectives()).remedy == ""
    monkeypatch.setattr(helpers, "sleeps_by_clock", lambda _: False)
    assert helpers.explain_wait(worker, Stack([own], ""), RankCollectives()).remedy == ""
    wait = KernelWait("it waits for its child", "close it", is_final=True)
    monkeypatch.setattr(helpers, "find_kernel_wait", lambda _: wait)
    helper = helpers.explain_wait(worker, Stack([own], ""), RankCollectives())
    assert (helper.note, helper.remedy, helper.is_final) == wait


class _Odd(PurePosixPath):
    def __str__(self) -> str:
        raise AssertionError("code of the script ran")


def test_paths_of_the_waiting_line_are_reported() -> None:
    seen: list[dict[str, str]] = []

    def watch() -> None:
        seen.append(list_paths(()))

    def wait(path: Path, odd: _Odd, text: str) -> None:
        thread = threading.Thread(target=watch)
        thread.start()
        thread.join()
        assert (str(path), text, type(odd)) == ("runs/7", "text", _Odd)

    wait(Path("runs/7"), _Odd("x"), "text")
    # Before 3.13 the frame would keep what is read of it.
    assert seen == [{"path": "runs/7"} if sys.version_info >= (3, 13) else {}]


@pytest.mark.parametrize(
    ("raw", "paths"),
    [({"path": "a b"}, {"path": "a b"}), ({"path": 7}, {}), ({"path": "\x1b"}, {}), ({"path": "a" * 999}, {})],
)
def test_only_printable_paths_are_read(raw: Any, paths: dict[str, str]) -> None:
    assert parse_report({"groups": [], "paths": raw}).paths == paths


def test_time_without_data_begins_anew_with_data_and_with_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[int | None] = [0]
    monkeypatch.setattr(standstill, "count_moved_bytes", lambda _: moved[0])
    still = Standstill()

    def observe(now: float, bytes_moved: int | None, *pids: int) -> float:
        moved[0] = bytes_moved
        return still.observe(frozenset(pids), now)

    assert observe(10.0, 0, 7) == 0
    assert observe(70.0, 100_000, 7) == 60, "what the launcher causes"
    assert observe(80.0, 1_000_000, 7) == 0
    assert observe(90.0, 1_000_000, 7, 8) == 0
    assert observe(95.0, 1_000_000, 7, 8) == 5
    assert observe(100.0, None, 7, 8) == 0, "unknown"
    assert observe(200.0, None, 7, 8) == 0


def test_read_and_written_bytes_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = count_moved_bytes([os.getpid()])
    (tmp_path / "file").write_bytes(bytes(1 << 20))
    after = count_moved_bytes([os.getpid()])
    assert before is not None
    assert after is not None
    assert after - before >= 1 << 20
    assert count_moved_bytes([os.getpid(), 2**22 + 1]) is None
    monkeypatch.setattr(standstill, "list_outer_sockets", lambda _: {7})
    monkeypatch.setattr(standstill, "_count_network_bytes", lambda: 1 << 60)
    assert (count_moved_bytes([os.getpid()]) or 0) >= 1 << 60
    monkeypatch.setattr(standstill, "_MOST_PROCESSES", 0)
    assert count_moved_bytes([os.getpid()]) is None


def test_bytes_of_the_network_are_those_of_its_devices() -> None:
    assert standstill._count_network_bytes() >= 0


def test_connection_inside_of_the_pod_does_not_leave_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        inode = os.readlink(f"/proc/self/fd/{client.fileno()}")
        assert find_peer(inode) == f"127.0.0.1:{server.getsockname()[1]}"
        number = int(inode[8:-1])
        assert number not in (list_outer_sockets([os.getpid()]) or ())
    assert find_peer("pipe:[7]") == ""
    assert list_outer_sockets([2**22 + 1]) is None


def test_connection_to_another_host_leaves_the_pod(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def row(local: str, remote: str, inode: int, state: str = "01") -> str:
        return f"0: {local} {remote} {state} 0:0 0:0 0 0 0 {inode} 1"

    rows = [
        row("0100000A:1", "0200000A:1F90", 5),
        row("0100000A:1", "0100000A:2", 6),
        row("0100000A:1", "0200000A:2", 7, "06"),
    ]
    (tmp_path / "tcp").write_text("\n".join(["head", *rows]))
    monkeypatch.setattr("ddp_pod.network.connections.TABLES", (str(tmp_path / "tcp"),))
    monkeypatch.setattr("ddp_pod.network.connections._list_own_sockets", lambda _: {5, 6, 7})
    assert list_outer_sockets([os.getpid()]) == {5}
    assert find_peer("socket:[5]") == "10.0.0.2:8080"


GATHER = Collective("all_gather", 1, "the default group", ())
REDUCE = Collective("all_reduce", 1, "the default group", ())


def waiting(rank: int, collective: Collective = GATHER) -> monitor.StalledWorker:
    collectives = RankCollectives([GroupState(collective, collective)])
    frames = [StackFrame("/app/train.py", 46, "main")]
    activity = RankActivity(rank, rank, "Waiting", "it waits")
    return monitor.StalledWorker(WorkerRecord(10 + rank, rank, rank, 0), activity, Stack(frames, ""), collectives)


def polling(rank: int, **evidence: bool) -> monitor.StalledWorker:
    frames = [StackFrame("/app/train.py", 31, "vocabulary")]
    activity = RankActivity(rank, rank, "Behind", "it polls")
    worker = WorkerRecord(10 + rank, rank, rank, 0)
    return monitor.StalledWorker(worker, activity, Stack(frames, ""), RankCollectives(), **evidence)


POLLS = polling(1, sleeps_by_clock=True)


@pytest.mark.parametrize(
    ("ranks", "idle", "still", "is_known"),
    [
        ([waiting(0), POLLS], 100, 60, True),
        ([waiting(0), polling(1, is_final=True)], 100, 60, True),
        ([waiting(0), polling(1)], 100, 60, False),  # on a service, perhaps
        ([waiting(0), POLLS, polling(2)], 100, 60, False),
        ([waiting(0), waiting(1)], 100, 60, False),  # the network, perhaps
        ([waiting(0), waiting(1, REDUCE)], 10, 60, True),
        ([waiting(0), waiting(1, REDUCE)], 10, 59, False),
        ([waiting(0), waiting(1, REDUCE), polling(2)], 100, 60, False),
        ([waiting(0), waiting(2, REDUCE), POLLS], 100, 60, False),
        ([POLLS, polling(2, sleeps_by_clock=True)], 100, 60, False),  # nobody waits for them
        ([waiting(0), POLLS], 99, 60, False),
        ([waiting(0), POLLS], 100, 59, False),
    ],
)
def test_wait_before_the_first_step_is_a_hang_if_nothing_moves(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    ranks: list[monitor.StalledWorker],
    idle: float,
    still: float,
    is_known: bool,
) -> None:
    plan = WatchdogConfig(start_seconds=100, stall_seconds=10, checkpoint_seconds=50, action="Restart")
    stalls = monitor.StallMonitor(launcher_pod(tmp_path, nodes=1, watchdog=plan), RankReader(str(tmp_path)))
    stalls._stalled = ranks
    stalls._silence = RankStall(0.0, "no step")
    monkeypatch.setattr(stalls._standstill, "observe", lambda *_: still)
    workers = [rank.worker._replace(started=time.time()) for rank in ranks]
    seconds = {worker.local_rank: idle for worker in workers}

    def find() -> bool:
        stall = stalls._find_stall(plan, HeartbeatWatchdog(plan), workers, seconds, 1000.0)
        assert stall is not None
        return stall.known

    assert find() is is_known
    if is_known and len(group_waits([rank.wait for rank in ranks if rank.wait])) == 1:
        monkeypatch.setattr(stalls._pulse, "age", lambda _: 500.0)
        assert not find(), "steps were made: a validation, perhaps"
        monkeypatch.setattr(stalls._pulse, "age", lambda _: math.inf)
        workers[0] = workers[0]._replace(started=time.time() - 7200)
        assert not find(), "they have worked for hours, so that they may make steps that nobody sees"
        workers[0] = workers[1]
        seconds.popitem()
        assert not find(), "another rank of the pod computes"


def test_waits_of_peers_are_shared_before_the_first_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = WatchdogConfig(start_seconds=100, stall_seconds=10, checkpoint_seconds=50, action="Restart")
    stalls = monitor.StallMonitor(launcher_pod(tmp_path, nodes=2, watchdog=plan), RankReader(str(tmp_path)))
    stalls._stalled = [POLLS]
    monkeypatch.setattr(stalls._standstill, "observe", lambda *_: 60.0)
    worker = POLLS.worker._replace(started=time.time())
    assert not stalls._is_proven(plan, [worker], 100, 1000.0)
    stalls.job_stall = JobStall(pods=2, waits=(RankWait(0, GATHER.text),))
    assert stalls._is_proven(plan, [worker], 100, 1000.0)


def test_waits_are_written_for_peers_before_a_step_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stalls = monitor.StallMonitor(launcher_pod(tmp_path, nodes=2), RankReader(str(tmp_path)))
    monkeypatch.setattr(stalls, "_examine", lambda *_, **__: [waiting(0)])
    stalls._open_stall(RankStall(0.0, "no CPU", certain=False, known=False, idle=frozenset({0})), [], 35.0)
    report = read_record(StallReport, json.loads((tmp_path / "stall.json").read_text()))
    assert [wait.collective for wait in report.waits] == [GATHER.text]
    assert (report.known, report.stuck) == (False, True)
    monkeypatch.setattr(stalls, "_examine", lambda *_, **__: [waiting(0), polling(1)])
    stalls._open_stall(RankStall(0.0, "no CPU", certain=False, known=False, idle=frozenset({0})), [], 35.0)
    assert not read_record(StallReport, json.loads((tmp_path / "stall.json").read_text())).stuck


def test_collectives_that_do_not_match_may_be_in_two_pods(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = WatchdogConfig(start_seconds=100, stall_seconds=10, checkpoint_seconds=50, action="Restart")
    stalls = monitor.StallMonitor(launcher_pod(tmp_path, nodes=2, watchdog=plan), RankReader(str(tmp_path)))
    stalls._stalled = [waiting(0)]
    monkeypatch.setattr(stalls._standstill, "observe", lambda *_: 60.0)
    monkeypatch.setattr(stalls._pulse, "age", lambda _: 60.0)  # after few steps
    waits = (RankWait(0, GATHER.text), RankWait(1, REDUCE.text))
    for stuck, is_proven in ((1, False), (2, True)):
        stalls.job_stall = JobStall(pods=2, stuck=stuck, waits=waits)
        assert stalls._is_proven(plan, [waiting(0).worker], 10, 1000.0) is is_proven


@pytest.mark.parametrize(
    ("still", "io", "place"),
    [
        (5.0, "pipe_read /app/queue", "main (train.py:46): pipe_read /app/queue"),
        (4.0, "pipe_read /app/queue", ""),  # data moves: another attempt may come farther
        (5.0, "", ""),
    ],
)
def test_wait_in_io_without_data_is_recognized_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, still: float, io: str, place: str
) -> None:
    stalls = monitor.StallMonitor(launcher_pod(tmp_path), RankReader(str(tmp_path)))
    reader = waiting(0)._replace(activity=RankActivity(0, 0, "IO", "it reads"), io=io)
    monkeypatch.setattr(stalls, "_measure_standstill", lambda _: still)
    error = stalls._build_error(RankStall(0.0, "no step"), reader, is_root_cause=True)
    assert error["place"] == place


@pytest.mark.parametrize(("is_final", "state"), [(True, "Behind"), (False, "IO")])
def test_wait_that_nobody_else_could_end_is_no_io(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_final: bool, state: str
) -> None:
    plan = WatchdogConfig(start_seconds=100, stall_seconds=10, checkpoint_seconds=1000, action="Restart")
    stalls = monitor.StallMonitor(launcher_pod(tmp_path, nodes=1, watchdog=plan), RankReader(str(tmp_path)))
    frames = [StackFrame("/app/train.py", 31, "score")]
    monkeypatch.setattr(monitor, "collect_stacks", lambda *_, **__: {0: Stack(frames, "")})
    monkeypatch.setattr(monitor, "process_state", lambda _: "S")
    monkeypatch.setattr(monitor, "measure_sleep", lambda _: 1.0)
    monkeypatch.setattr(helpers, "find_kernel_wait", lambda _: KernelWait("it reads", "close it", is_final=is_final))
    since = stalls._clock.read(time.monotonic())
    stall = RankStall(since, "no step", certain=False, idle=frozenset({0}))
    (found,) = stalls._examine(stall, [WorkerRecord(2**22 + 1, 0, 0, 0)], quiet=True)
    assert (found.activity.state, found.remedy) == (state, "close it")
    assert found.activity.what == "rank 0 is in score (train.py:31); it reads"


def test_standstill_of_a_rank_in_io_is_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stalls = monitor.StallMonitor(launcher_pod(tmp_path), RankReader(str(tmp_path)))
    moved = {10: 0, 11: 0}
    monkeypatch.setattr(standstill, "count_moved_bytes", lambda pids: sum(moved[pid] for pid in pids))
    times = iter([10.0, 10.0, 17.0, 17.0, 20.0])
    monkeypatch.setattr(stalls._clock, "read", lambda _: next(times))
    workers = [waiting(0).worker, waiting(1).worker]
    assert [stalls._measure_standstill(worker) for worker in workers] == [0.0, 0.0]
    moved[11] += 1 << 20
    assert [stalls._measure_standstill(worker) for worker in workers] == [7.0, 0.0]
    stalls.forget()
    assert stalls._measure_standstill(workers[0]) == 0.0

"""The launcher's watchdog: heartbeats, budgets, the root cause of a stall, and stacks."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from ddp_operator.decide.metrics_page import parse_page
from ddp_pod.base.clock import AwakeClock
from ddp_pod.base.files import write_json
from ddp_pod.base.pod import Pod, WorkerRecord
from ddp_pod.contract.failure_table import Outcome
from ddp_pod.contract.names import METRIC_STALLED
from ddp_pod.contract.plan import WatchdogConfig
from ddp_pod.contract.processes import catches, count_cpu_seconds, count_oom_kills, find_family, process_state
from ddp_pod.failures.rules import WorkerEnd
from ddp_pod.failures.worker_failure import examine_worker
from ddp_pod.progress.metrics import PAGE_TIMEOUT, MetricsEndpoint
from ddp_pod.rank import worker
from ddp_pod.watchdog import monitor
from ddp_pod.watchdog.collectives import Collective, GroupState, RankCollectives
from ddp_pod.watchdog.stacks import SECONDS_FOR_STACKS, Stack, StackFrame, collect_stacks, read_stack
from ddp_pod.watchdog.stall import (
    HeartbeatWatchdog,
    Idleness,
    JobStall,
    RankActivity,
    RankStall,
    RankWait,
    StepMark,
    StepPulse,
    build_stall_rows,
    decode_activity,
    decode_job_stall,
    report_stall,
    should_kill_workers,
    stall_grace_seconds,
)
from tests.support.launcher_config import launcher_pod

PLAN = WatchdogConfig(start_seconds=100, stall_seconds=10, checkpoint_seconds=50, action="Restart")
BOTH = {0: 11, 1: 12}


def page(steps: int = 0, heartbeats: int = 0, saving: int = 0) -> str:
    return (
        f'# TYPE ddp_steps_total counter\nddp_steps_total{{rank="0"}} {steps}.0\n'
        f'ddp_heartbeats_total{{rank="0"}} {heartbeats}\nddp_saving{{rank="0"}} {saving}\n'
    )


def message(watchdog: HeartbeatWatchdog, now: float) -> str | None:
    stall = watchdog.find_stall(now)
    return None if stall is None else stall.message


def test_script_without_steps_is_never_stalled() -> None:
    watchdog = HeartbeatWatchdog(PLAN)
    watchdog.observe(BOTH, {0: "ddp_loss 1\n"}, 0)
    assert watchdog.find_stall(1e6) is None
    assert watchdog.age(5) is None


def test_first_step_has_its_own_budget() -> None:
    watchdog = HeartbeatWatchdog(PLAN)
    watchdog.observe(BOTH, {0: page(), 1: page()}, 0)
    assert watchdog.find_stall(99) is None
    assert message(watchdog, 100) == "no step since the start for 100 s (spec.watchdog.startSeconds is 100)"


def test_missing_step_is_stall() -> None:
    watchdog = HeartbeatWatchdog(PLAN)
    watchdog.observe(BOTH, {0: page(1), 1: page(1)}, 0)
    watchdog.observe(BOTH, {0: page(2), 1: page(2)}, 7)
    watchdog.observe(BOTH, {0: page(2)}, 12)  # rank 1 does not respond
    assert watchdog.find_stall(16) is None
    assert message(watchdog, 17) == "no step for 10 s (spec.watchdog.stallSeconds is 10)"
    assert watchdog.age(17) == 10


def test_heartbeats_of_one_rank_prevent_stall() -> None:
    watchdog = HeartbeatWatchdog(PLAN)
    for second in range(0, 60, 5):  # rank 0 validates alone, rank 1 waits for it
        watchdog.observe(BOTH, {0: page(5, heartbeats=second), 1: page(5)}, second)
    assert watchdog.find_stall(60) is None


def test_saving_has_its_own_budget_and_its_end_is_progress() -> None:
    watchdog = HeartbeatWatchdog(PLAN)
    watchdog.observe(BOTH, {0: page(1), 1: page(1)}, 0)
    watchdog.observe(BOTH, {0: page(1, saving=1), 1: page(1)}, 5)
    assert watchdog.find_stall(54) is None
    assert message(watchdog, 56) == "the checkpoint is not done for 51 s (spec.watchdog.checkpointSeconds is 50)"
    watchdog.observe(BOTH, {0: page(1), 1: page(1)}, 57)
    assert watchdog.find_stall(66) is None
    assert watchdog.find_stall(67) is not None


def test_restarted_workers_get_start_budget_and_ended_workers_none() -> None:
    watchdog = HeartbeatWatchdog(PLAN)
    watchdog.observe(BOTH, {0: page(9), 1: page(9)}, 0)
    watchdog.observe({0: 21, 1: 22}, {}, 15)
    assert watchdog.find_stall(114) is None
    assert watchdog.find_stall(115) is not None
    watchdog.observe({}, {0: page(9)}, 200)
    assert watchdog.find_stall(1000) is None


def test_two_stalls_have_different_starts() -> None:
    watchdog = HeartbeatWatchdog(PLAN)
    watchdog.observe(BOTH, {0: page(1)}, 0)
    first = watchdog.find_stall(20)
    watchdog.observe(BOTH, {0: page(2)}, 30)
    second = watchdog.find_stall(50)
    assert first is not None
    assert second is not None
    assert (first.since, second.since) == (0, 30)


def test_frozen_launcher_detects_no_stall() -> None:
    clock = AwakeClock(7.0, 1000.0)
    watchdog = HeartbeatWatchdog(PLAN)
    for real in (1005.0, 1010.0):
        watchdog.observe(BOTH, {0: page(int(real))}, clock.tick(real))
    now = clock.tick(2000.0)  # launcher and ranks were frozen: the page is unchanged
    watchdog.observe(BOTH, {0: page(1010)}, now)
    assert watchdog.find_stall(now) is None
    assert watchdog.age(clock.read(5000.0)) == 14
    # Afterwards it detects a stall as usual.
    assert watchdog.find_stall(clock.tick(2002.0)) is None
    assert message(watchdog, clock.tick(2003.0)) == "no step for 10 s (spec.watchdog.stallSeconds is 10)"


def test_idle_workers_are_distinguished_from_busy_ones() -> None:
    idleness = Idleness()
    assert idleness.observe({0: 5.0, 1: 5.0}, now=10) == {0: 0, 1: 0}
    assert idleness.observe({0: 5.01, 1: 6.0}, now=20) == {0: 10, 1: 0}
    assert idleness.observe({0: 5.02, 1: 6.0}, now=40) == {0: 30, 1: 20}
    assert idleness.observe({0: 15.0}, now=50) == {0: 0}
    assert idleness.observe({0: 15.0, 1: 6.0}, now=90) == {0: 40, 1: 0}


def mark(steps: float, pid: int = 1, longest: float = 0.0) -> dict[int, StepMark]:
    return {0: StepMark(pid, steps, longest)}


class TestStepPulse:
    def with_steps(self, *times: float) -> StepPulse:
        pulse = StepPulse()
        for number, now in enumerate(times, start=1):
            pulse.observe(mark(float(number)), now)
        return pulse

    def test_silence_longer_than_budget_and_any_pause_is_reported(self) -> None:
        pulse = self.with_steps(0, 2, 4, 6)
        pulse.observe(mark(4.0), 15)
        assert pulse.measure_silence(15, 10) is None
        assert pulse.measure_silence(16, 10) == 10

    def test_many_steps_between_two_checks_shorten_expected_pause(self) -> None:
        pulse = StepPulse()
        pulse.observe({}, 0)
        pulse.observe(mark(50.0), 2)
        assert pulse.measure_silence(9, 5) is None, "four times the time between the two looks"
        assert pulse.measure_silence(10, 5) == 8

    def test_rare_steps_extend_expected_pause(self) -> None:
        pulse = self.with_steps(0, 2, 102, 104)
        assert pulse.measure_silence(503, 10) is None
        assert pulse.measure_silence(504, 10) == 400

    def test_pause_that_the_rank_measured_extends_expected_pause(self) -> None:
        pulse = self.with_steps(0, 2, 4, 6)
        pulse.observe(mark(4.0, longest=20.0), 7)
        assert pulse.measure_silence(85, 10) is None
        assert pulse.measure_silence(86, 10) == 80

    def test_few_steps_give_no_expected_pause(self) -> None:
        assert self.with_steps(0, 2, 4).measure_silence(1000, 10) is None

    def test_step_ends_silence(self) -> None:
        pulse = self.with_steps(0, 2, 4, 6)
        assert pulse.measure_silence(20, 10) == 14
        pulse.observe(mark(5.0), 21)
        assert pulse.measure_silence(22, 10) is None

    def test_steps_of_new_process_before_first_check_count(self) -> None:
        pulse = self.with_steps(0, 2, 4, 6)
        pulse.observe(mark(100.0, pid=2), 8)
        assert pulse.measure_silence(20, 10) == 12
        pulse.observe(mark(1.0, pid=3), 21)
        assert pulse.measure_silence(99, 10) is None

    def test_no_silence_without_workers(self) -> None:
        pulse = self.with_steps(0, 2, 4, 6)
        pulse.observe({}, 7)
        assert pulse.measure_silence(100, 10) is None
        pulse.observe(mark(1.0), 101)
        assert pulse.measure_silence(110, 10) is None

    def test_hang_that_ended_a_process_is_no_pause_of_the_next_one(self) -> None:
        pulse = self.with_steps(0, 2, 4, 6)
        for number in range(5):  # the workers restart between two checks, after a hang of 200 s
            pulse.observe(mark(1.0 + number, pid=2), 206 + 2 * number)
        assert pulse.measure_silence(224, 10) == 10


class TestPodsAgree:
    """The pod with the root cause kills its workers. If the root cause is unknown, no pod does."""

    SLEEPS = RankActivity(1, 0, "Behind", "rank 1 is in train_step (train.py:50)")
    WAITS = RankActivity(0, 0, "Waiting", "rank 0 waits for other ranks in train_step (train.py:52)")
    COMPUTES = RankActivity(0, 0, "Busy", "rank 0 is in validate (train.py:80)")
    SILENT = RankStall(0.0, "no step for 30 s, longer than any pause before", False, True, frozenset({0}))
    IDLE = RankStall(0.0, "the workers have used no CPU for 30 s", False, False, frozenset({0}))
    HUNG = RankStall(0.0, "no step for 30 s")

    def agree(self, mine: RankStall, rank: RankActivity, *peers: tuple[RankStall, RankActivity], pods: int = 2) -> bool:
        own = report_stall(mine, [rank])
        reports = [own, *(report_stall(stall, [activity]) for stall, activity in peers)]
        job_stall = JobStall(
            known=sum(report.known for report in reports),
            stuck=sum(report.stuck for report in reports),
            idle=sum(report.idle for report in reports),
            cause=next((report.cause for report in reports if report.cause), None),
            pods=pods,
        )
        return should_kill_workers(own, job_stall, certain=mine.certain)

    def test_sleeping_rank_ends_its_pod_if_another_pod_has_seen_steps(self) -> None:
        assert self.agree(self.IDLE, self.SLEEPS, (self.SILENT, self.WAITS))
        assert self.agree(self.IDLE, self.SLEEPS, (self.HUNG, self.WAITS))

    def test_waiting_pod_does_not_kill_its_workers(self) -> None:
        assert not self.agree(self.SILENT, self.WAITS, (self.IDLE, self.SLEEPS))
        assert not self.agree(self.HUNG, self.WAITS, (self.IDLE, self.SLEEPS))

    def test_unseen_steps_kill_no_worker(self) -> None:
        assert not self.agree(self.IDLE, self.SLEEPS, (self.IDLE, self.WAITS))
        assert not self.agree(self.IDLE, self.SLEEPS, pods=1)

    def test_computing_rank_prevents_kill(self) -> None:
        busy = self.SILENT._replace(idle=frozenset())
        assert not self.agree(self.IDLE, self.SLEEPS, (busy, self.COMPUTES))
        assert not self.agree(busy, self.COMPUTES, (self.IDLE, self.SLEEPS))
        assert not self.agree(busy, self.COMPUTES, pods=1)

    def test_no_kill_before_all_pods_are_stuck(self) -> None:
        assert not self.agree(self.SILENT, self.SLEEPS)
        assert not self.agree(self.SILENT, self.WAITS)

    def test_deadlock_kills_workers_of_all_pods(self) -> None:
        waits = self.WAITS._replace(rank=1)
        assert self.agree(self.SILENT, self.WAITS, (self.IDLE, waits))
        assert self.agree(self.IDLE, waits, (self.SILENT, self.WAITS))
        assert self.agree(self.HUNG, self.WAITS, (self.HUNG, waits))

    @pytest.mark.parametrize("stall", [SILENT, IDLE, HUNG])
    def test_rank_in_io_prevents_kill(self, stall: RankStall) -> None:
        receives = self.SLEEPS._replace(state="IO")
        assert not self.agree(stall, receives, (self.SILENT, self.WAITS))
        assert not self.agree(stall, self.WAITS, (self.IDLE, receives))
        assert not self.agree(stall, receives, pods=1)

    def test_spinning_collectives_are_not_killed(self) -> None:
        spins = self.SILENT._replace(idle=frozenset())
        assert not self.agree(spins, self.WAITS, (spins, self.WAITS._replace(rank=1)))

    def test_missing_heartbeats_suffice_in_pod_with_root_cause(self) -> None:
        assert self.agree(self.HUNG, self.SLEEPS)
        assert should_kill_workers(report_stall(self.HUNG, [self.SLEEPS]), None, certain=True)
        assert not should_kill_workers(report_stall(self.HUNG, [self.WAITS]), None, certain=True)


@pytest.mark.parametrize("cause", [None, TestPodsAgree.SLEEPS])
def test_job_stall_survives_json(cause: RankActivity | None) -> None:
    job_stall = JobStall(1, 2, 0, 2, cause, (RankWait(0, "all_reduce 7 of the default group"),))
    assert decode_job_stall(json.loads(json.dumps(job_stall))) == job_stall


@pytest.mark.parametrize("cause", [1, "text", {"what": "x"}, {**TestPodsAgree.SLEEPS._asdict(), "state": "Odd"}])
def test_invalid_activity_of_a_peer_is_ignored(cause: Any) -> None:
    assert decode_activity(cause) is None
    assert decode_activity(TestPodsAgree.SLEEPS._asdict()) == TestPodsAgree.SLEEPS


def test_stall_shows_ranks_for_which_peers_wait_first() -> None:
    ranks = [TestPodsAgree.WAITS, TestPodsAgree.SLEEPS._replace(what='rank 1 is in "x" (a\\b.py:1)')]
    page = parse_page("\n".join(build_stall_rows(TestPodsAgree.SILENT, ranks, 31.0)))
    assert page.values[METRIC_STALLED] == 31
    assert [(stalled.rank, stalled.what) for stalled in page.stalled] == [
        (1, 'rank 1 is in "x" (a\\b.py:1)'),
        (0, TestPodsAgree.WAITS.what),
    ]


def test_only_first_eight_ranks_are_shown() -> None:
    ranks = [TestPodsAgree.WAITS._replace(rank=rank) for rank in range(9)]
    rows = build_stall_rows(TestPodsAgree.SILENT, ranks, 31.0)
    assert [stalled.rank for stalled in parse_page("\n".join(rows)).stalled] == list(range(8))


@pytest.mark.parametrize(
    ("ranks", "known", "stuck", "idle", "cause"),
    [
        (["Behind"], True, True, True, 0),
        (["Waiting", "Behind"], True, True, False, 1),
        (["Waiting", "Stopped"], True, True, True, 1),
        (["Behind", "Busy"], True, False, False, None),
        (["IO", "Waiting"], True, False, False, 0),
        (["Behind", "IO"], True, False, False, 1),
        (["Busy", "IO"], True, False, False, 1),
        (["Waiting"], True, True, True, None),
    ],
)
def test_report_has_flags_and_root_cause(
    ranks: list[str], known: bool, stuck: bool, idle: bool, cause: int | None
) -> None:
    report = report_stall(TestPodsAgree.SILENT, [RankActivity(i, i, state, "") for i, state in enumerate(ranks)])
    assert (report.known, report.stuck, report.idle) == (known, stuck, idle)
    assert (report.cause and report.cause.rank) == cause


def test_computing_rank_is_no_stall_without_known_steps() -> None:
    assert build_stall_rows(TestPodsAgree.IDLE, [TestPodsAgree.WAITS], 31.0)
    assert not build_stall_rows(TestPodsAgree.IDLE, [TestPodsAgree.WAITS, TestPodsAgree.COMPUTES], 31.0)


def test_place_names_line_of_script_before_library() -> None:
    seen = stack("/usr/lib/python3.11/threading.py")
    assert seen.place == "<module> (train.py:9), in load (threading.py:1)"


STACKS = """Stack (most recent call first):
  File "{inner}", line 1 in load
  File "/app/train.py", line 9 in <module>
  File "{launcher}", line 300 in _run_python
  File "{launcher}", line 260 in _run_and_record
  File "{launcher}", line 250 in main
  File "{launcher}", line 30 in main
"""


def stack(inner: str) -> Stack:
    return read_stack(STACKS.format(inner=inner, launcher=worker.__file__))


def test_stack_has_no_frames_of_launcher() -> None:
    seen = stack("/app/data.py")
    assert seen.frames == [("/app/train.py", 9, "<module>"), ("/app/data.py", 1, "load")]
    assert seen.text.splitlines() == [
        "Stack (most recent call last):",
        '  File "/app/train.py", line 9, in <module>',
        '  File "/app/data.py", line 1, in load',
    ]
    assert seen.place == "load (data.py:1)"


def test_waiting_for_peers_is_detected() -> None:
    assert stack("/site-packages/torch/distributed/distributed_c10d.py").waits_for_peers
    assert stack("/site-packages/torch/autograd/graph.py").waits_for_peers
    assert not read_stack("").waits_for_peers
    assert read_stack("rubbish").frames == []


CALL = Collective("all_reduce", 7, "the default group", ())
PENDING = RankCollectives([GroupState(CALL, CALL)])
OVER = RankCollectives([GroupState(CALL, None)])


@pytest.mark.parametrize(
    ("line", "collectives", "seconds", "state"),
    [
        ("work.wait()", RankCollectives(), 20, "Waiting"),
        ("work.wait()", PENDING, 20, "Waiting"),
        ("work.wait()", OVER, 20, "IO"),
        ("loss.item()", PENDING, 20, "Waiting"),
        ("upload.recv(1)", RankCollectives(), 20, "IO"),
        ("upload.recv(int(1))", OVER, 999, "IO"),
        ("upload.recv(1)", PENDING, 1001, "Behind"),
        ("time.sleep(600)", OVER, 20, "IO"),
        ("json.loads(socket.recv(9))", OVER, 20, "IO"),
        ("x = y", OVER, 20, "IO"),
        ("lock.acquire()", RankCollectives(), 20, "Behind"),
        ("with self.lock:", OVER, 20, "Behind"),
        ("with open(path) as file:", OVER, 20, "IO"),
    ],
)
@pytest.mark.parametrize("certain", [False, True])
def test_state_of_sleeping_rank_follows_from_line_collectives_and_time(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    certain: bool,
    line: str,
    collectives: RankCollectives,
    seconds: float,
    state: str,
) -> None:
    (tmp_path / "data.py").write_text(f"{line}\n")
    seen = stack(str(tmp_path / "data.py"))
    with subprocess.Popen(["sleep", "600"]) as process:
        try:
            while process_state(process.pid) != "S":
                time.sleep(0.01)
            examined = examine(tmp_path, monkeypatch, seen, collectives, seconds, process.pid, certain)
        finally:
            process.kill()
    assert examined.state == state
    assert ("waits for other ranks" in examined.what) is (state == "Waiting")
    assert examined.what.startswith("rank 3 ")


def test_computing_rank_is_not_in_io(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = stack("/app/validate.py")
    assert examine(tmp_path, monkeypatch, seen, OVER, 20, os.getpid(), certain=True).state == "Behind"


def monitor_of_sleeping_rank(
    folder: Path, monkeypatch: pytest.MonkeyPatch, state: str, seconds: float, longest: float = 0.0
) -> monitor.StallMonitor:
    """Return a monitor after a check: rank 3 has made no step for ``seconds``, after a pause of ``longest``."""
    (folder / "errors").mkdir()
    config = launcher_pod(folder, nodes=2, watchdog=WatchdogConfig(30, 300, 1000, "Restart"))
    stalls = monitor.StallMonitor(config, MetricsEndpoint(str(folder), lambda: ""), is_stopping=lambda: False)
    watched = WorkerRecord(os.getpid(), 3, 0, 0, world_size=4)
    activity = RankActivity(3, 0, state, "rank 3 is in q.get (train.py:27)")
    examined = [monitor.StalledWorker(watched, activity, "Stack", OVER)]
    monkeypatch.setattr(stalls, "_examine", lambda *_, **__: examined)
    for step, at in ((1.0, 0.0), (2.0, longest), (3.0, longest)):
        stalls._pulse.observe(mark(step), at)
    stalls._examine_silence(HeartbeatWatchdog(PLAN), [watched], longest + seconds)
    return stalls


@pytest.mark.parametrize("state", ["Stopped", "Behind", "IO", "Busy", "Waiting"])
def test_rank_outside_of_collectives_explains_failures_of_its_peers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    stalls = monitor_of_sleeping_rank(tmp_path, monkeypatch, state, 24)
    is_cause = state not in ("Busy", "Waiting")
    awaited = stalls.build_awaited()
    assert (awaited is None) is (state == "Waiting")
    if awaited is not None:
        assert (awaited.category, awaited.rank, awaited.secondary) == ("Hang", 3, not is_cause)
        assert awaited.message == "no step for 24 s: rank 3 is in q.get (train.py:27)"
        assert awaited.traceback == "Stack"

    stalls.record_hang()  # on a restart that other pods have requested
    assert bool(list((tmp_path / "errors").iterdir())) is is_cause


@pytest.mark.parametrize(
    ("seconds", "longest", "is_known"), [(4, 0, False), (6, 0, True), (24, 30, False), (31, 30, True)]
)
def test_rank_is_examined_early_if_no_pause_before_was_as_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float, longest: float, is_known: bool
) -> None:
    stalls = monitor_of_sleeping_rank(tmp_path, monkeypatch, "IO", seconds, longest)
    assert (stalls.build_awaited() is not None) is is_known
    stalls._examine_silence(HeartbeatWatchdog(PLAN), [], 1e6)  # its end: what it did remains known
    assert (stalls.build_awaited() is not None) is is_known
    stalls.forget()
    assert stalls.build_awaited() is None


@pytest.mark.parametrize(
    ("line", "place"),
    [
        ("upload.recv(int(1))", "upload.recv"),
        ("sleep(1)", "sleep"),
        ("json.loads(socket.recv(9))", "<module>"),
        ("x = y", "<module>"),
    ],
)
def test_native_call_of_main_module_is_named_if_it_is_certain(tmp_path: Path, line: str, place: str) -> None:
    (tmp_path / "train.py").write_text(f"{line}\n")
    assert Stack([StackFrame(str(tmp_path / "train.py"), 1, "<module>")], "").place == f"{place} (train.py:1)"
    assert Stack([StackFrame(str(tmp_path / "train.py"), 1, "load")], "").place == "load (train.py:1)"
    library = StackFrame("/usr/lib/python3.11/threading.py", 327, "wait")
    waits = Stack([StackFrame(str(tmp_path / "train.py"), 1, "<module>"), library], "")
    assert waits.place == f"{place} (train.py:1), in wait (threading.py:327)"


@pytest.mark.parametrize("library", ["threading.py", "concurrent/futures/thread.py", "queue.py"])
def test_rank_that_waits_for_another_thread_waits_for_no_lock(library: str) -> None:
    assert not stack(f"/usr/lib/python3.11/{library}").waits_for_lock


def examine(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    seen: Stack,
    collectives: RankCollectives,
    seconds: float,
    pid: int,
    certain: bool,
) -> RankActivity:
    """Return the state of a rank in a stall of ``seconds``."""

    class Request:
        def __init__(self, *_: object) -> None:
            pass

        def read(self) -> dict[int, RankCollectives]:
            return {0: collectives}

    monkeypatch.setattr(monitor, "CollectivesRequest", Request)
    monkeypatch.setattr(monitor, "collect_stacks", lambda *_, **__: {0: seen})
    config = launcher_pod(folder, nodes=2, watchdog=WatchdogConfig(30, 10, 1000, "Restart"))
    stalls = monitor.StallMonitor(config, MetricsEndpoint(str(folder), lambda: ""), is_stopping=lambda: False)
    now = stalls._clock.read(time.monotonic())
    stall = RankStall(now - seconds, "no step", certain=certain, idle=frozenset({0}))
    (examined,) = stalls._examine(stall, [WorkerRecord(pid, 3, 0, 0)], quiet=True)
    return examined.activity


def test_partially_written_stack_is_awaited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "stacks").mkdir()
    file = tmp_path / "stacks" / "0"
    file.write_text("of an earlier request\n")
    config = launcher_pod(tmp_path)
    pieces = STACKS.format(inner="/app/data.py", launcher=worker.__file__).splitlines(keepends=True)
    signalled: list[int] = []

    def write_line(seconds: float) -> None:  # one line per poll, as of a rank with little CPU time
        if pieces:
            with file.open("a") as stream:
                stream.write(pieces.pop(0))

    monkeypatch.setattr("ddp_pod.watchdog.stacks.kill", lambda pid, number: signalled.append(pid))
    monkeypatch.setattr("ddp_pod.watchdog.stacks.catches", lambda pid, number: pid == os.getpid())
    monkeypatch.setattr("time.sleep", write_line)
    running = WorkerRecord(os.getpid(), 0, 0, 0)
    ended = WorkerRecord(2**22 + 1, 1, 1, 0)
    (tmp_path / "stacks" / "1").touch()
    shown = collect_stacks(config, MetricsEndpoint(str(tmp_path), lambda: ""), [running, ended])
    assert signalled == [os.getpid()]
    assert shown[0].place == "load (data.py:1)"
    log = capsys.readouterr().err
    assert "in <module>" in log
    assert "rank 1 (pid 4194305, state gone)" in log


def test_deep_stack_is_read_and_other_thread_ignored() -> None:
    frames = 'Stack (most recent call first):\n  File "/app/train.py", line 9 in descend\n'
    assert read_stack(frames + "  ...\n").place == "descend (train.py:9)"
    assert read_stack(frames).frames == []


@pytest.mark.parametrize("interval", [0.25, 1.0, 5.0])
def test_pod_with_root_cause_has_shorter_grace_period(interval: float) -> None:
    with_cause, waiting = (stall_grace_seconds(2, interval, has_cause=has_cause) for has_cause in (True, False))
    # At worst the other pod detects it one check and one page timeout later, on a busy machine after twice that time.
    page = PAGE_TIMEOUT * 2
    assert waiting >= 2 * (interval + page + SECONDS_FOR_STACKS) + with_cause
    assert with_cause == 2 * interval
    assert waiting <= 40  # the delay of a hang without a root cause
    assert stall_grace_seconds(1, interval, has_cause=False) == 0


def pod(folder: Path, action: str) -> Pod:
    (folder / "errors").mkdir(exist_ok=True)
    plan = dataclasses.replace(PLAN, action=action)
    return launcher_pod(folder, nodes=2, oom_kills=count_oom_kills(), watchdog=plan)


@pytest.mark.parametrize(
    ("action", "secondary", "expected"),
    [
        ("Restart", False, Outcome("Hang", 83)),
        ("Restart", True, Outcome("Hang", 83, secondary=True)),
        ("Fail", False, Outcome("Hang", 81)),
        ("Fail", True, Outcome("Hang", 81, secondary=True)),
    ],
)
def test_worker_killed_by_watchdog_is_hang(tmp_path: Path, action: str, secondary: bool, expected: Outcome) -> None:
    config = pod(tmp_path, action)
    error = {
        "type": "Hang",
        "message": "no step for 10 s: rank 3 is in load",
        "traceback": "Stack",
        "secondary": secondary,
    }
    write_json(os.path.join(config.runtime, "errors", "1.json"), error)
    examined = examine_worker(config, WorkerEnd(-9, local_rank=1))
    assert examined.outcome == expected
    assert examined.message == "no step for 10 s: rank 3 is in load"


def test_an_exit_code_83_of_a_script_is_a_hang_that_fails_the_job_where_asked(tmp_path: Path) -> None:
    assert examine_worker(pod(tmp_path, "Restart"), WorkerEnd(83)).container_exit_code == 83
    assert examine_worker(pod(tmp_path, "Fail"), WorkerEnd(83)).container_exit_code == 81


def test_process_state_is_read() -> None:
    assert process_state(os.getpid()) in ("R", "S")
    assert process_state(2**22 + 1) == ""


def test_signal_handler_of_process_is_detected() -> None:
    before = signal.signal(signal.SIGUSR2, lambda *_: None)
    assert catches(os.getpid(), signal.SIGUSR2)
    signal.signal(signal.SIGUSR2, signal.SIG_DFL)
    assert not catches(os.getpid(), signal.SIGUSR2)
    signal.signal(signal.SIGUSR2, before)
    assert not catches(2**22 + 1, signal.SIGUSR2)
    assert os.getpid() in find_family(os.getppid())
    assert count_cpu_seconds([os.getpid()]) > 0

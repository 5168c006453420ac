"""The launcher's watchdog: heartbeats, budgets, the root cause of a stall, and stacks."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import pytest

from ddp_pod.base.awake_clock import AwakeClock
from ddp_pod.base.files import write_json
from ddp_pod.base.pod import WorkerRecord
from ddp_pod.contract.plan import WatchdogConfig
from ddp_pod.contract.progress import RankProgress
from ddp_pod.contract.records import read_record, to_json
from ddp_pod.contract.run_report import Stall
from ddp_pod.failures.rank_ends import PrintedTraceback
from ddp_pod.features.watchdog import monitor
from ddp_pod.features.watchdog.activity import describe_activity
from ddp_pod.features.watchdog.collectives import Collective, GroupState, RankCollectives
from ddp_pod.features.watchdog.helpers import find_helper
from ddp_pod.features.watchdog.stacks import (
    SECONDS_FOR_STACKS,
    Stack,
    StackFrame,
    collect_stacks,
    find_working_child,
    read_stack,
)
from ddp_pod.features.watchdog.stall import (
    HeartbeatWatchdog,
    Idleness,
    JobStall,
    RankActivity,
    RankStall,
    RankWait,
    StallReport,
    StepMark,
    StepPulse,
    combine_reports,
    describe_stall,
    report_stall,
    should_kill_workers,
    stall_grace_seconds,
)
from ddp_pod.progress.rank_progress import PAGE_TIMEOUT, RankReader
from ddp_pod.rank import worker
from ddp_pod.torchrun.feature_messages import PeersLost
from tests.support.launcher_config import launcher_pod

PLAN = WatchdogConfig(start_seconds=100, stall_seconds=10, checkpoint_seconds=50, action="Restart")
BOTH = {0: 11, 1: 12}


def page(steps: int = 0, heartbeats: int = 0, saving: int = 0) -> RankProgress:
    return RankProgress(steps=steps, heartbeats=heartbeats, saving=saving)


Pages = dict[int, RankProgress]


def same(steps: int) -> Pages:
    return {0: page(steps), 1: page(steps)}


def message(watchdog: HeartbeatWatchdog, now: float) -> str | None:
    stall = watchdog.find_stall(now)
    return None if stall is None else stall.message


@pytest.mark.parametrize(
    ("observed", "fine_until", "field"),
    [
        ([(0, BOTH, {0: RankProgress(loss=1.0)})], 1e6, None),  # a script without steps
        ([(0, BOTH, same(0))], 99, "startSeconds"),
        ([(0, BOTH, same(1)), (7, BOTH, same(2)), (12, BOTH, {0: page(2)})], 16, "stallSeconds"),  # rank 1 is silent
        ([(t, BOTH, {0: page(5, t), 1: page(5)}) for t in range(0, 60, 5)], 60, "stallSeconds"),  # one validates
        ([(0, BOTH, same(1)), (5, BOTH, {0: page(1, saving=1), 1: page(1)})], 54, "checkpointSeconds"),
        ([(0, BOTH, {0: page(1, saving=1), 1: page(1)}), (57, BOTH, same(1))], 66, "stallSeconds"),  # it is saved
        ([(0, BOTH, same(9)), (15, {0: 21, 1: 22}, {})], 114, "startSeconds"),  # restarted
        ([(0, BOTH, same(9)), (15, {}, same(9))], 1e6, None),  # ended
    ],
)
def test_stall_begins_when_the_budget_of_the_phase_is_used_up(
    observed: list[tuple[float, dict[int, int], Pages]], fine_until: float, field: str | None
) -> None:
    watchdog = HeartbeatWatchdog(PLAN)
    for now, pids, pages in observed:
        watchdog.observe(pids, pages, now)
    assert watchdog.find_stall(fine_until) is None
    if field is None:
        assert watchdog.age(fine_until) is None
    else:
        assert f"(spec.watchdog.{field} is " in (message(watchdog, fine_until + 5) or "")


def test_two_stalls_have_different_starts() -> None:
    watchdog = HeartbeatWatchdog(PLAN)
    starts = []
    for step, now in ((1, 0), (2, 30)):
        watchdog.observe(BOTH, {0: page(step)}, now)
        stall = watchdog.find_stall(now + 20)
        assert stall is not None
        starts.append(stall.since)
    assert starts == [0, 30]


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


def mark(steps: float, *, pid: int = 1, longest: float | None = None) -> dict[int, StepMark]:
    return {0: StepMark(pid, float(steps), longest)}


REGULAR = [(now, mark(number)) for number, now in enumerate((0, 2, 4, 6), start=1)]


@pytest.mark.parametrize(
    ("observed", "fine_until", "silence"),
    [
        (REGULAR, 15, 10),
        ([(0, {}), (2, mark(50))], 9, 8),  # many steps between two checks: four times the time between these
        ([(5, mark(20))], 24, 20),  # all steps before the first check: four times the time since the start
        ([(3, mark(20)), (8, mark(20))], 14, 12),
        ([(5, mark(20, longest=0.1))], 14, 10),  # steps that the rank has measured
        ([(0, {}), (5, mark(20, longest=3.0))], 16, 12),
        ([(5, mark(1))], 1000, None),
        ([(0, mark(1)), (2, mark(2)), (102, mark(3)), (104, mark(4))], 503, 400),  # rare steps
        ([*REGULAR, (7, mark(4, longest=20))], 85, 80),  # a pause that the rank has measured
        (REGULAR[:3], 1000, None),  # too few steps
        ([*REGULAR, (21, mark(5))], 80, 60),  # a step ends the silence, which was a pause
        ([*REGULAR, (8, mark(100, pid=2))], 17, 10),  # steps of a new process before the first check
        ([(2, mark(1)), (7, mark(100, pid=2))], 26, 20),
        ([*REGULAR, (8, mark(1, pid=3))], 99, None),
        ([*REGULAR, (7, {}), (101, mark(1))], 110, None),  # no workers
        ([*REGULAR, *((206 + 2 * n, mark(1 + n, pid=2)) for n in range(5))], 223, 10),  # restarted after a hang
    ],
)
def test_silence_is_longer_than_the_budget_and_any_pause_before(
    observed: list[tuple[float, dict[int, StepMark]]], fine_until: float, silence: float | None
) -> None:
    pulse = StepPulse(0)
    for now, marks in observed:
        pulse.observe(marks, now)
    assert pulse.measure_silence(fine_until, 10 if fine_until != 9 else 5) is None
    assert pulse.measure_silence(fine_until + 1, 10 if fine_until != 9 else 5) == silence


SLEEPS = RankActivity(1, 0, "Behind", "rank 1 is in train_step (train.py:50)")
WAITS = RankActivity(0, 0, "Waiting", "rank 0 waits for other ranks in train_step (train.py:52)")
COMPUTES = RankActivity(0, 0, "Busy", "rank 0 is in validate (train.py:80)")
RECEIVES = dataclasses.replace(SLEEPS, state="IO")
SILENT = RankStall(0.0, "no step for 30 s, longer than any pause before", False, True, frozenset({0}))
SPINS = SILENT._replace(idle=frozenset())
IDLE = RankStall(0.0, "the workers have used no CPU for 30 s", False, False, frozenset({0}))
HUNG = RankStall(0.0, "no step for 30 s")
Pod1 = tuple[RankStall, RankActivity]


@pytest.mark.parametrize(
    ("own", "peer", "pods", "kills"),
    [
        ((IDLE, SLEEPS), (SILENT, WAITS), 2, True),  # the pod with the root cause, if another one has seen steps
        ((IDLE, SLEEPS), (HUNG, WAITS), 2, True),
        ((SILENT, WAITS), (IDLE, SLEEPS), 2, False),  # a pod that waits for it
        ((HUNG, WAITS), (IDLE, SLEEPS), 2, False),
        ((IDLE, SLEEPS), (IDLE, WAITS), 2, False),  # no pod has seen steps
        ((IDLE, SLEEPS), None, 1, False),
        ((IDLE, SLEEPS), (SPINS, COMPUTES), 2, False),  # a rank computes
        ((SPINS, COMPUTES), (IDLE, SLEEPS), 2, False),
        ((SPINS, COMPUTES), None, 1, False),
        ((SILENT, SLEEPS), None, 2, False),  # the other pod has not reported
        ((SILENT, WAITS), None, 2, False),
        ((SILENT, WAITS), (IDLE, WAITS), 2, True),  # a deadlock
        ((IDLE, WAITS), (SILENT, WAITS), 2, True),
        ((HUNG, WAITS), (HUNG, WAITS), 2, True),
        ((SPINS, WAITS), (SPINS, WAITS), 2, False),  # collectives that use the CPU
        ((SILENT, RECEIVES), (SILENT, WAITS), 2, False),  # a rank in I/O
        ((HUNG, RECEIVES), (SILENT, WAITS), 2, False),
        ((IDLE, RECEIVES), None, 1, False),
        ((SILENT, WAITS), (IDLE, RECEIVES), 2, False),
        ((HUNG, WAITS), (IDLE, RECEIVES), 2, False),
        ((HUNG, SLEEPS), None, 2, True),  # missing heartbeats suffice in the pod with the root cause
    ],
)
def test_pod_with_the_root_cause_kills_its_workers(own: Pod1, peer: Pod1 | None, pods: int, kills: bool) -> None:
    reports = [report_stall(stall, [activity]) for stall, activity in (own, *filter(None, [peer]))]
    job_stall = combine_reports(reports, pods)
    assert should_kill_workers(reports[0], job_stall, certain=own[0].certain) is kills
    assert should_kill_workers(reports[0], None, certain=own[0].certain) is (own == (HUNG, SLEEPS))


def test_reports_of_peers_are_read_within_limits() -> None:
    job_stall = JobStall(1, 2, 0, 2, SLEEPS, (RankWait(0, "all_reduce 7 of the default group"),))
    assert read_record(JobStall, json.loads(json.dumps(to_json(job_stall)))) == job_stall
    for cause in (1, "text", {"what": "x"}, {**to_json(SLEEPS), "state": "Odd"}):
        hostile = read_record(StallReport, {"known": True, "cause": cause, "waits": [{"collective": 3}, 7]})
        assert combine_reports([hostile], 2) == JobStall(known=1, pods=2)


def test_stall_shows_eight_ranks_and_those_for_which_peers_wait_first() -> None:
    ranks = [*(dataclasses.replace(WAITS, rank=rank) for rank in range(9)), dataclasses.replace(SLEEPS, rank=9)]
    shown = describe_stall(SILENT, ranks, 31.0)
    assert shown.seconds == 31
    assert [rank.rank for rank in shown.ranks] == [9, *range(7)]
    assert shown.ranks[0].what == SLEEPS.what
    assert describe_stall(IDLE, [WAITS], 31.0) != Stall()
    assert describe_stall(IDLE, [WAITS, COMPUTES], 31.0) == Stall(), "it is no stall without known steps"


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
    report = report_stall(SILENT, [RankActivity(i, i, state, "") for i, state in enumerate(ranks)])
    assert (report.known, report.stuck, report.idle) == (known, stuck, idle)
    assert (report.cause and report.cause.rank) == cause


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


@pytest.mark.parametrize(
    ("inner", "peers"),
    [
        ("/site-packages/torch/distributed/distributed_c10d.py", True),
        ("/site-packages/torch/autograd/graph.py", True),
        ("/usr/lib/python3.11/threading.py", False),
        ("/usr/lib/python3.11/concurrent/futures/thread.py", False),
        ("/usr/lib/python3.11/queue.py", False),
    ],
)
def test_innermost_file_tells_waits_for_peers_and_other_threads(inner: str, peers: bool) -> None:
    seen = stack(inner)
    assert seen.waits_for_peers is peers
    assert not seen.waits_for_lock
    assert seen.place == f"<module> (train.py:9), in load ({Path(inner).name}:1)"


def test_incomplete_stack_is_empty_and_deep_one_is_read() -> None:
    frames = 'Stack (most recent call first):\n  File "/app/train.py", line 9 in descend\n'
    assert read_stack(frames + "  ...\n").place == "descend (train.py:9)"
    assert read_stack(frames).frames == []  # of another thread
    assert not read_stack("").waits_for_peers


CALL = Collective("all_reduce", 7, "the default group", ())
PENDING = RankCollectives([GroupState(CALL, CALL)])
OVER = RankCollectives([GroupState(CALL, None)])
NONE = RankCollectives()


@pytest.mark.parametrize(
    ("line", "collectives", "process", "state"),
    [
        ("work.wait()", NONE, "S", "Waiting"),
        ("work.wait()", PENDING, "S", "Waiting"),
        ("work.wait()", OVER, "S", "Behind"),
        ("loss.item()", PENDING, "R", "Waiting"),
        ("loss.item()", PENDING, "T", "Stopped"),
        ("upload.recv(1)", NONE, "S", "Behind"),
        ("upload.recv(1)", PENDING, "S", "Behind"),
        ("x = y", OVER, "R", "Behind"),
    ],
)
@pytest.mark.parametrize(
    ("certain", "idle", "is_known"), [(True, False, True), (False, True, True), (False, False, False)]
)
def test_state_of_a_rank_follows_from_its_line_and_collectives(
    tmp_path: Path,
    line: str,
    collectives: RankCollectives,
    process: str,
    state: str,
    certain: bool,
    idle: bool,
    is_known: bool,
) -> None:
    (tmp_path / "data.py").write_text(f"{line}\n")
    seen = stack(str(tmp_path / "data.py"))
    stall = RankStall(0.0, "no step", certain=certain, idle=frozenset({0} if idle else ()))
    activity = describe_activity(stall, WorkerRecord(1, 3, 0, 0), seen, collectives, process)
    assert activity.state == ("Busy" if state == "Behind" and not is_known else state)
    assert "rank 3 " in activity.what
    assert ("data.py:1" in activity.what) is (state != "Stopped")


@pytest.mark.parametrize(
    ("line", "waits"),
    [
        ("lock.acquire()", True),
        ("with self.lock:", True),
        ("with open(path) as file:", False),
        ("upload.recv(1)", False),
        ("time.sleep(600)", False),
    ],
)
def test_line_that_waits_for_a_lock_is_recognized(tmp_path: Path, line: str, waits: bool) -> None:
    (tmp_path / "data.py").write_text(f"{line}\n")
    assert stack(str(tmp_path / "data.py")).waits_for_lock is waits


def monitor_of_sleeping_rank(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    state: str,
    seconds: float,
    longest: float = 0.0,
    collectives: RankCollectives = OVER,
) -> monitor.StallMonitor:
    """Return a monitor after a check: rank 3 has made no step for ``seconds``, after a pause of ``longest``."""
    (folder / "errors").mkdir()
    config = launcher_pod(folder, nodes=2, watchdog=WatchdogConfig(30, 300, 1000, "Restart"))
    stalls = monitor.StallMonitor(config, RankReader(str(folder)))
    watched = WorkerRecord(os.getpid(), 3, 0, 0, world_size=4)
    activity = RankActivity(3, 0, state, "rank 3 is in q.get (train.py:27)")
    examined = [monitor.StalledWorker(watched, activity, stack("/app/data.py"), collectives)]
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
    awaited = stalls.find_awaited()
    assert (awaited is None) is (state == "Waiting")
    if awaited is not None:
        assert (awaited.category, awaited.rank, awaited.secondary) == ("Hang", 3, not is_cause)
        assert awaited.message == "no step for 24 s: rank 3 is in q.get (train.py:27)"
        assert awaited.traceback == stack("/app/data.py").text
        assert bool(awaited.signature) is (state in ("Stopped", "Behind"))  # a repetition of it ends the job

    assert stalls.answer(PeersLost()) is None  # on a restart that other pods have requested
    assert bool(list((tmp_path / "errors").iterdir())) is is_cause


def test_wait_in_the_standard_library_has_the_function_that_the_script_calls() -> None:
    library = "/usr/lib/python3.11/"
    own = StackFrame("/app/train.py", 17, "main")
    put = [StackFrame(f"{library}queue.py", 140, "put"), StackFrame(f"{library}threading.py", 327, "wait")]
    assert Stack([own, *put], "").place == "main (train.py:17), in put (queue.py:140)"
    gather = [StackFrame(C10D, 81, "wrapper"), StackFrame(C10D, 90, "all_gather")]
    assert Stack([own, *gather], "").place == "main (train.py:17), in all_gather (distributed_c10d.py:90)"


C10D = "/usr/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py"


@pytest.mark.parametrize(
    ("state", "collectives", "inner", "call"),
    [
        ("Waiting", PENDING, C10D, PENDING.pending.text if PENDING.pending else ""),
        ("Waiting", OVER, C10D, "load"),
        ("Waiting", NONE, C10D, ""),
        ("Waiting", OVER, "/app/data.py", ""),
        ("Behind", OVER, C10D, ""),
    ],
)
def test_rank_waits_in_its_collective_or_in_the_call_of_the_library(
    state: str, collectives: RankCollectives, inner: str, call: str
) -> None:
    watched = WorkerRecord(1, 3, 0, 0, world_size=4)
    stalled = monitor.StalledWorker(watched, RankActivity(3, 0, state, "it waits"), stack(inner), collectives)
    assert (stalled.wait.collective if stalled.wait else "") == call


@pytest.mark.parametrize(("function", "call"), [("send", "send"), ("recv", "recv"), ("barrier", "")])
def test_call_between_two_ranks_is_known_without_a_group_that_counts_it(function: str, call: str) -> None:
    frames = Stack([StackFrame("/app/train.py", 17, "fit"), StackFrame(C10D, 2753, function)], "")
    watched = WorkerRecord(1, 3, 0, 0, world_size=4)
    stalled = monitor.StalledWorker(watched, RankActivity(3, 0, "Waiting", "it waits"), frames, NONE)
    assert (stalled.wait.collective if stalled.wait else "") == call


@pytest.mark.parametrize(("other", "is_pair"), [("send", True), ("barrier 3 of the default group", False)])
def test_ranks_that_send_and_receive_past_each_other_get_a_remedy_of_their_own(other: str, is_pair: bool) -> None:
    waits = (RankWait(0, "recv"), RankWait(1, other))
    assert bool(monitor._advise_on_pairs(waits)) is is_pair


def test_call_of_the_innermost_module_is_named_behind_its_decorator() -> None:
    inner = [(C10D, 2169, "_new_process_group_helper"), (C10D, 5000, "new_group")]
    frames = [("/app/train.py", 14, "<module>"), (C10D.replace("distributed_", ""), 81, "wrapper"), *reversed(inner)]
    assert Stack([StackFrame(*frame) for frame in frames], "").library_call == "new_group"


BROADCASTS = Collective("broadcast", 7, "the default group", ())


def waiting_job(*waits: tuple[int, str, int]) -> JobStall:
    """Return the reports of a job of two pods, all ranks of which wait. ``waits``: rank, operation, number of ranks."""
    shared = [RankWait(rank, f"{name} 7 of the default group", ranks=count) for rank, name, count in waits]
    return combine_reports([StallReport(stuck=True, waits=tuple(shared)), StallReport(stuck=True)], 2)


@pytest.mark.parametrize(
    ("job", "is_odd"),
    [
        (waiting_job((3, "all_reduce", 1), (0, "broadcast", 3)), True),  # most ranks are elsewhere
        (waiting_job((3, "all_reduce", 1), (4, "broadcast", 1)), True),  # of two equal sides the lower rank
        (waiting_job((3, "all_reduce", 1), (2, "broadcast", 1)), False),
        (waiting_job((3, "all_reduce", 3), (4, "broadcast", 1)), False),
        (waiting_job((3, "all_reduce", 4)), False),  # a network that does not respond
        (dataclasses.replace(waiting_job((3, "all_reduce", 1), (0, "broadcast", 3)), stuck=1), False),
        (dataclasses.replace(waiting_job((3, "all_reduce", 1), (0, "broadcast", 3)), cause=SLEEPS), False),
        (None, False),
    ],
)
def test_rank_in_another_collective_than_most_explains_the_end_of_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, job: JobStall | None, is_odd: bool
) -> None:
    stalls = monitor_of_sleeping_rank(tmp_path, monkeypatch, "Waiting", 24, collectives=PENDING)
    stalls.job_stall = job
    awaited = stalls.find_awaited()
    assert (awaited is not None) is is_odd
    if awaited is not None:
        assert (awaited.category, awaited.rank, awaited.secondary) == ("UserError", 3, False)
        assert "rank 3 waits" in awaited.message
        assert awaited.signature == "CollectiveMismatch at data.py:1"
        assert "same collectives" in awaited.remedy


def test_ranks_that_wait_in_different_collectives_are_named_before_that_is_a_stall(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stalls = monitor_of_sleeping_rank(tmp_path, monkeypatch, "Waiting", 24, collectives=PENDING)
    (tmp_path / "workers").mkdir()
    stalls.job_stall = waiting_job((3, "all_reduce", 1), (0, "broadcast", 3))
    named = stalls.describe().awaited
    assert "rank 3 waits in all_reduce 7" in named
    assert "rank 0 waits in broadcast 7" in named
    stalls.job_stall = waiting_job((3, "all_reduce", 4))
    assert stalls.describe().awaited == "", "all wait in one collective, which may end"


def test_computing_rank_of_the_only_pod_is_a_cause_while_another_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stalls = monitor_of_sleeping_rank(tmp_path, monkeypatch, "Busy", 24)
    stalls._pod = launcher_pod(tmp_path, nodes=1)
    alone = stalls.find_awaited()
    assert alone is not None
    assert alone.secondary
    waiting = WorkerRecord(os.getpid(), 4, 1, 0, world_size=4)
    activity = RankActivity(4, 1, "Waiting", "it waits")
    stalls._stalled.append(monitor.StalledWorker(waiting, activity, stack(C10D), PENDING))
    awaited = stalls.find_awaited()
    assert awaited is not None
    assert (awaited.category, awaited.rank, awaited.secondary) == ("Hang", 3, False)
    assert awaited.signature == "Hang in load (data.py)", "a loop is at another line each time"


def test_mismatch_is_still_known_when_a_rank_of_it_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stalls = monitor_of_sleeping_rank(tmp_path, monkeypatch, "Waiting", 24, collectives=PENDING)
    stalls.job_stall = waiting_job((3, "all_reduce", 1), (4, "broadcast", 1))
    write_json(str(tmp_path / "errors/0.json"), {})
    stalls._open_stall(IDLE, [], 35.0)
    assert stalls.find_awaited() is not None
    (tmp_path / "errors/0.json").unlink()
    stalls._open_stall(IDLE, [], 36.0)
    assert stalls.find_awaited() is None, "the other pods report anew"


def test_silent_pod_shares_its_waits_before_it_stalls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stalls = monitor_of_sleeping_rank(tmp_path, monkeypatch, "Waiting", 6, collectives=PENDING)
    report = read_record(StallReport, json.loads((tmp_path / "stall.json").read_text()))
    wait = RankWait(3, CALL.text, "load (data.py:1)")
    assert report == StallReport(stuck=True, waits=(wait,)), "it must not count as a stall"
    stalls._examine_silence(HeartbeatWatchdog(PLAN), [WorkerRecord(os.getpid(), 3, 0, 0, world_size=4)], 1.0)
    assert not (tmp_path / "stall.json").exists()


def test_pause_names_the_rank_for_which_a_peer_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "workers").mkdir()
    waiting = StallReport(stuck=True, waits=(RankWait(0, CALL.text, "main (train.py:9)"),))
    stalls = monitor_of_sleeping_rank(tmp_path, monkeypatch, "Busy", 6)
    report = read_record(StallReport, json.loads((tmp_path / "stall.json").read_text()))
    assert report.cause is None, "a rank that computes is no stall"

    stalls.job_stall = combine_reports([waiting, report], 2)
    described = stalls.describe()
    rank = "rank 3 is in q.get (train.py:27)"
    assert described.awaited == f"{rank}; rank 0 waits at main (train.py:9) in {CALL.text}"
    assert (described.seconds, described.ranks) == (None, ())

    stalls.job_stall = combine_reports([StallReport(), report], 2)
    assert not stalls.describe().awaited, "all ranks validate"
    stalls.job_stall = combine_reports([waiting, report], 2)
    stalls.forget()
    assert not stalls.describe().awaited, "a step was made"


def test_rank_that_is_ending_keeps_the_line_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddp_pod.features.watchdog.monitor.list_workers", lambda pod: [])
    stalls = monitor_of_sleeping_rank(tmp_path, monkeypatch, "Busy", 24)
    monkeypatch.undo()
    (tmp_path / "errors" / "0.json").write_text("{}")  # its exception is recorded, and the process ends
    worker = WorkerRecord(os.getpid(), 3, 0, 0, world_size=4)
    known = [stalled.stack.place for stalled in stalls._examine(SILENT, [worker], quiet=True)]
    assert known == ["load (data.py:1)"]


RECORD = PrintedTraceback("ValueError", "record 37 is short", is_last=True, origin="thread prefetch")


@pytest.mark.parametrize(("is_last", "category"), [(True, "UserError"), (False, "Hang")])
def test_exception_of_a_thread_explains_the_wait_for_it_unless_the_script_went_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_last: bool, category: str
) -> None:
    stalls = monitor_of_sleeping_rank(tmp_path, monkeypatch, "Behind", 24)
    helper = RECORD._replace(is_last=is_last)
    stalls._stalled = [stalled._replace(dead_helper=helper) for stalled in stalls._stalled]
    awaited = stalls.find_awaited()
    assert awaited is not None
    assert awaited.category == category
    place = "load (data.py:1)"
    expected = f"ValueError: record 37 is short (in thread prefetch; rank 3 waits for it in {place}: no step for 24 s)"
    assert (awaited.message == expected) is is_last


@pytest.mark.parametrize(("seconds", "is_named"), [(9, False), (16, True)])
def test_rank_that_may_wait_for_a_dead_helper_is_named_early_and_ended_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float, is_named: bool
) -> None:
    monkeypatch.setattr("ddp_pod.features.watchdog.monitor.measure_sleep", lambda pid: 1.0)
    stalls = monitor_of_sleeping_rank(tmp_path, monkeypatch, "Behind", seconds)
    watched = [stalled.worker for stalled in stalls._stalled]
    assert stalls._find_orphaned(watched) is None, "no exception has ended a helper"
    stalls._stalled = [stalled._replace(dead_helper=RECORD, is_orphan=True) for stalled in stalls._stalled]
    stall = stalls._find_orphaned(watched)
    assert (stall is not None) is is_named
    assert stall is None or not stall.certain
    assert stalls._find_orphaned([]) is None, "the rank has ended"


@pytest.mark.parametrize(
    ("inner", "thread", "process"),
    [
        ("/usr/lib/python3.11/threading.py", True, False),
        ("/usr/lib/python3.11/queue.py", True, False),
        ("/usr/lib/python3.11/concurrent/futures/_base.py", True, False),
        ("/usr/lib/python3.11/selectors.py", False, True),
        ("/usr/lib/python3.11/multiprocessing/connection.py", False, True),
        ("/app/queue.py", False, False),
    ],
)
def test_innermost_file_tells_for_what_sort_of_helper_a_rank_waits(inner: str, thread: bool, process: bool) -> None:
    assert (stack(inner).waits_for_thread, stack(inner).waits_for_process) == (thread, process)


TRACE = 'Traceback (most recent call last):\n  File "/app/data.py", line 3, in fill\n    f()\nIndexError: 4\n'


@pytest.mark.parametrize(
    ("output", "inner", "note", "is_dead"),
    [
        (f"Exception in thread a:\n{TRACE}", "queue.py", "an exception has ended thread a: IndexError: 4", True),
        (
            f"2026 - ERROR - prefetcher failed\n{TRACE}",
            "queue.py",
            "the last exception in its log is IndexError: 4",
            False,
        ),
        (f"2026 - ERROR - retry 1\n{TRACE}step 3\n", "queue.py", "", False),
        (f"Exception in thread a:\n{TRACE}", "socket.py", "", False),
        ("step 3\n", "queue.py", "", False),
    ],
)
def test_last_exception_in_the_log_belongs_to_a_wait_for_a_helper(
    tmp_path: Path, output: str, inner: str, note: str, is_dead: bool
) -> None:
    (tmp_path / "output").mkdir()
    (tmp_path / "output/0.end").write_text(output)
    helper = find_helper(launcher_pod(tmp_path), WorkerRecord(1, 0, 0, 0), stack(f"/usr/lib/python3.11/{inner}"))
    assert helper.note == note
    assert (helper.dead is not None) is is_dead


def test_rank_whose_program_is_over_is_reported_however_few_steps_were_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pod = launcher_pod(tmp_path)
    (tmp_path / "output").mkdir()
    monkeypatch.setattr("time.time", lambda: 1020.0)
    monkeypatch.setattr(
        "ddp_pod.features.watchdog.monitor.list_workers", lambda pod: [WorkerRecord(os.getpid(), 3, 0, 0)]
    )
    stalls = monitor.StallMonitor(pod, RankReader(str(tmp_path)))
    assert stalls.describe().ranks == ()
    write_json(str(tmp_path / "output/0.ending"), {"keeper": "process writer is awaited", "since": 1008.5})
    known = stalls.describe()
    assert known.seconds == 11.5
    assert [rank.what for rank in known.ranks] == ["the program of rank 3 is over, but process writer is awaited"]
    write_json(str(tmp_path / "output/0.ending"), {"keeper": "process writer is awaited", "since": None})
    assert stalls.describe().ranks == ()


def test_rank_without_a_stack_explains_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stalls = monitor_of_sleeping_rank(tmp_path, monkeypatch, "Busy", 24)
    stalls._stalled = [stalled._replace(stack=Stack([], "")) for stalled in stalls._stalled]
    assert stalls.find_awaited() is None


@pytest.mark.parametrize(
    ("seconds", "longest", "is_known"), [(4, 0, False), (6, 0, True), (24, 30, False), (31, 30, True)]
)
def test_rank_is_examined_early_if_no_pause_before_was_as_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float, longest: float, is_known: bool
) -> None:
    stalls = monitor_of_sleeping_rank(tmp_path, monkeypatch, "IO", seconds, longest)
    assert (stalls.find_awaited() is not None) is is_known
    stalls._examine_silence(HeartbeatWatchdog(PLAN), [], 1e6)  # its end: what it did remains known
    assert (stalls.find_awaited() is not None) is is_known
    stalls.forget()
    assert stalls.find_awaited() is None


@pytest.mark.parametrize(("steps", "reason"), [(0, "no step was counted"), (2, "too few steps were counted")])
def test_log_has_why_idle_ranks_are_not_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], steps: int, reason: str
) -> None:
    stalls = monitor.StallMonitor(launcher_pod(tmp_path), RankReader(str(tmp_path)))
    monkeypatch.setattr(stalls, "_examine", lambda *_, **__: [])
    stalls._pulse.observe(mark(steps) if steps else {}, 5.0)
    stalls._open_stall(IDLE, [], 35.0)
    assert f"no process is killed, because {reason}" in capsys.readouterr().err


def test_forked_child_for_which_a_rank_waits_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "stacks").mkdir()
    file = tmp_path / "stacks" / "0"
    file.write_text("of an earlier request\n")
    inner = {11: "/usr/lib/python3.11/multiprocessing/connection.py", 13: "/app/data.py"}

    def write_stack(pid: int, number: int) -> None:
        with file.open("a") as stream:
            stream.write(STACKS.format(inner=inner[pid], launcher=worker.__file__))

    monkeypatch.setattr("ddp_pod.features.watchdog.stacks.find_family", lambda pid: [pid, 11, 12, 13])
    monkeypatch.setattr("ddp_pod.features.watchdog.stacks.process_state", lambda pid: "S")
    monkeypatch.setattr(
        "ddp_pod.features.watchdog.stacks.catches", lambda pid, number: pid != 12
    )  # it runs another program
    monkeypatch.setattr("ddp_pod.features.watchdog.stacks.kill", write_stack)
    child = find_working_child(launcher_pod(tmp_path), WorkerRecord(7, 0, 0, 0))
    assert child is not None
    assert (child.pid, child.stack.place) == (13, "load (data.py:1)")
    inner[13] = inner[11]
    assert find_working_child(launcher_pod(tmp_path), WorkerRecord(7, 0, 0, 0)) is None
    file.unlink()
    assert find_working_child(launcher_pod(tmp_path), WorkerRecord(7, 0, 0, 0)) is None


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

    monkeypatch.setattr("ddp_pod.features.watchdog.stacks.kill", lambda pid, number: signalled.append(pid))
    monkeypatch.setattr("ddp_pod.features.watchdog.stacks.catches", lambda pid, number: pid == os.getpid())
    monkeypatch.setattr("time.sleep", write_line)
    running = WorkerRecord(os.getpid(), 0, 0, 0)
    ended = WorkerRecord(2**22 + 1, 1, 1, 0)
    (tmp_path / "stacks" / "1").touch()
    shown = collect_stacks(config, RankReader(str(tmp_path)), [running, ended])
    assert signalled == [os.getpid()]
    assert shown[0].place == "load (data.py:1)"
    log = capsys.readouterr().err
    assert "in <module>" in log
    assert "rank 1 (pid 4194305, state gone)" in log


@pytest.mark.parametrize("interval", [0.25, 1.0, 5.0])
def test_pod_with_root_cause_has_shorter_grace_period(interval: float) -> None:
    with_cause, waiting = (stall_grace_seconds(2, interval, has_cause=has_cause) for has_cause in (True, False))
    # At worst the other pod detects it one check and one page timeout later, on a busy machine after twice that time.
    page = PAGE_TIMEOUT * 2
    assert waiting >= 2 * (interval + page + SECONDS_FOR_STACKS) + with_cause
    assert with_cause == 2 * interval
    assert waiting <= 40  # the delay of a hang without a root cause
    assert stall_grace_seconds(1, interval, has_cause=False) == 0


@pytest.mark.parametrize(("state", "is_named"), [("Behind", True), ("Busy", True), ("Stopped", False)])
def test_remedy_of_a_hang_has_the_line_that_the_rank_does_not_leave(
    state: str, is_named: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "train.py"
    script.write_text("def publish():\n    queue.join()  # all files\n")
    frames = [StackFrame(str(script), 2, "publish"), StackFrame("/usr/lib/python3.11/queue.py", 90, "join")]
    stalls = monitor_of_sleeping_rank(tmp_path, monkeypatch, state, 24)
    stalls._stalled = [stalled._replace(stack=Stack(frames, "")) for stalled in stalls._stalled]
    awaited = stalls.find_awaited()
    assert awaited is not None
    assert ("does not leave its line `queue.join()  # all files` (a lock" in awaited.remedy) is is_named

"""Hangs of real ranks: stacks of all ranks in the log, the straggler's name, and the configured reaction."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import torch

from ddp_pod.contract.plan import WatchdogConfig
from tests.support.launcher_pods import LauncherPods, PodEnd

pytestmark = pytest.mark.process

PodsFactory = Callable[..., LauncherPods]


@pytest.fixture
def pods(tmp_path: Path) -> Iterator[PodsFactory]:
    made: list[LauncherPods] = []

    def make(script: str, **options: object) -> LauncherPods:
        (tmp_path / "train.py").write_text(script)
        made.append(LauncherPods(tmp_path, ["train.py"], **options))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for job in made:
        job.stop()


# Two ranks that step together; rank 1 hangs once, after its fifth step, as HANG sets.
TRAIN = """
import os, signal, sys, time
from ddp_sdk.exporter import Exporter

again = os.path.exists("hung")
rank = int(os.environ["RANK"])
MEET
exporter = Exporter.start()

def load_batch(step):
    if rank == 1 and step == 5 and not again:
        open("hung", "w").close()
        HANG

for step in range(8):
    load_batch(step)
    all_reduce(step)
    exporter.step(samples=1, loss=1.0)
if again:
    open(f"again-{rank}", "w").close()
"""
GLOO = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
def all_reduce(step):
    dist.all_reduce(torch.ones(1))
"""
PREFETCH = """
import threading
def read_ahead():
    time.sleep(600)
threading.Thread(target=read_ahead, name="prefetch", daemon=True).start()
"""
DEAD_PREFETCH = """
import queue, threading
ready = queue.Queue()
def read_ahead():
    raise ValueError("record 37 has 7 of 8 fields")
if rank == 1:
    threading.Thread(target=read_ahead, name="prefetch", daemon=True).start()
"""
# A minimal collective for two ranks that must not import torch.
FILES = """
def wait(step):
    while not os.path.exists(f"at-{1 - rank}-{step}"):
        time.sleep(0.02)
def all_reduce(step):
    open(f"at-{rank}-{step}", "w").close()
    wait(step)
"""
# The same with one byte each way: a waiting rank uses no CPU, and its stack shows a call that waits for a peer.
PIPES = """
wait = os.read
for name in ("to-0", "to-1"):
    try:
        os.mkfifo(name)
    except FileExistsError:
        pass
inbox, outbox = (os.open(f"to-{number}", os.O_RDWR) for number in (rank, 1 - rank))
def all_reduce(step):
    os.write(outbox, b"x")
    wait(inbox, 1)
"""
SLEEP = TRAIN.replace("MEET", GLOO + PREFETCH).replace("HANG", "time.sleep(600)")
STOP = TRAIN.replace("MEET", FILES).replace("HANG", "os.kill(os.getpid(), signal.SIGSTOP)")
# The start budget is long because torch's import is slow. The stall budget is short because nothing else runs then. If
# a busy machine gives a rank no CPU for so long, the budget ends too early; the tests allow for this.


def watchdog(action: str, *, stall: float = 4, start: float = 500, io: float = 0) -> dict[str, WatchdogConfig]:
    return {"watchdog": WatchdogConfig(start, stall, max(io, stall), action)}


def test_sleeping_rank_is_root_cause_and_workers_restart_in_place(pods: PodsFactory, tmp_path: Path) -> None:
    job = pods(SLEEP, max_restarts=5, config=watchdog("Restart"))
    first, second = job.run()
    assert (first.code, second.code) == (0, 0), first.log + second.log
    assert len(list(tmp_path.glob("again-*"))) == 2
    assert "hang: no step for " in second.log
    assert "in load_batch" in second.log
    assert "---- rank 0 (pid " in first.log
    assert "---- rank 1 (pid " in second.log
    assert "Thread 0x" not in second.log  # as faulthandler writes them all, which sometimes crashes a rank
    assert "[launcher] Thread prefetch (most recent call first):" in second.log
    assert re.search(r"launcher\]   File .*train\.py\", line \d+ in read_ahead", second.log)
    restarts = [line for line in second.log.splitlines() if "restarting the workers" in line]
    assert restarts[0].startswith("[launcher] restarting the workers in the same pods, restart 1: no step for"), (
        restarts,
        second.log,
    )
    assert "rank 1 is in load_batch (train.py:" in second.log


def test_exception_that_ended_a_thread_explains_the_wait_for_it(pods: PodsFactory) -> None:
    script = TRAIN.replace("MEET", GLOO + DEAD_PREFETCH).replace("HANG", "ready.get()")
    job = pods(script, nodes=1, nproc=2, max_restarts=0, config=watchdog("Restart", stall=20))
    (ended,) = job.run()
    assert ended.message["category"] == "UserError", ended.log
    assert ended.message["rank"] == 1
    message = ended.message["message"]
    assert message.startswith("ValueError: record 37 has 7 of 8 fields (in thread prefetch; rank 1 waits for it in ")
    assert "load_batch (train.py:" in message
    assert "in read_ahead" in ended.message["traceback"]


def test_stopped_rank_fails_job_with_action_fail(pods: PodsFactory) -> None:
    job = pods(STOP, nodes=1, nproc=2, max_restarts=3, config=watchdog("Fail", stall=8))  # the first alarm is the last
    (ended,) = job.run()
    assert ended.code == 81, ended.log
    assert ended.message["category"] == "Hang"
    assert ended.message["rank"] == 1
    assert ended.message["message"].endswith("the process of rank 1 is stopped (SIGSTOP)")
    assert ended.message["restarts"] == 0
    assert "no stack: the process does not respond" in ended.log
    assert ended.message["progress"]["steps"] == 5


def test_hang_is_only_reported_with_action_report(pods: PodsFactory, tmp_path: Path) -> None:
    script = TRAIN.replace("MEET", FILES).replace("HANG", "while not os.path.exists('enough'): time.sleep(0.05)")
    job = pods(script, nodes=1, nproc=2, config=watchdog("Report"))
    job.start()
    job.until_logged(0, "in load_batch")
    job.until_logged(0, "---- rank 0 (pid ")
    reports = job.log(0).count("hang: ")
    age = heartbeat_age(job)
    job.until(lambda: heartbeat_age(job) > age + 2, "several more checks")
    assert job.log(0).count("hang: ") == reports  # once for each hang
    (tmp_path / "enough").touch()
    ended = job.wait(0)
    assert ended.code == 0, ended.log


def test_rank_stopped_before_first_page_is_named_by_its_pod(pods: PodsFactory) -> None:
    script = STOP.replace(FILES, PIPES).replace("step == 5", "step == 1")
    job = pods(script, max_restarts=5, config=watchdog("Restart"))
    first, second = job.run()
    assert (first.code, second.code) == (0, 0), first.log + second.log
    assert "the process of rank 1 is stopped (SIGSTOP)" in second.log
    assert "killing the workers because of the hang" in second.log
    assert "killing the workers because of the hang" not in first.log


# Two ranks without an exporter: the launcher reads their steps from rank 0's lines.
LOGS = """
import os, time
rank = int(os.environ["RANK"])
MEET

def broadcast():
    wait(inbox, 1)
    wait(inbox, 1)

def train_step(step):
    if step == 50:
        FAULT
    all_reduce(step)

for step in range(1, 60):
    train_step(step)
    time.sleep(0.1)
    if rank == 0:
        print(f"step {step}", flush=True)
""".replace("MEET", PIPES)
PATTERNS = {"log_patterns": ("step (?P<step>[0-9]+)",)}
LOGGED = {**watchdog("Restart"), **PATTERNS}


def test_sleeping_rank_is_killed_if_only_log_shows_steps(pods: PodsFactory) -> None:
    job = pods(LOGS.replace("FAULT", "if rank == 1: time.sleep(1e9)"), config=LOGGED)
    first, second = job.run()
    assert (first.code, second.code) == (83, 83), first.log + second.log
    assert "killing the workers" in second.log
    assert second.message["rank"] == 1
    assert second.message["secondary"] is False
    assert re.search(r"used no CPU for \d+ s: rank 1 is in train_step \(train.py:\d+\)$", second.message["message"])
    assert first.message["secondary"] is True  # it has waited for longer than pod 1 needs; an API server would end it
    assert "; in another pod, rank 1 is in train_step (train.py:" in first.message["message"]


def test_ranks_in_different_collectives_are_killed_and_both_named(pods: PodsFactory) -> None:
    job = pods(LOGS.replace("FAULT", "if rank == 1: broadcast()"), config=LOGGED)
    first, second = job.run()
    assert (first.code, second.code) == (83, 83), first.log + second.log
    assert "rank 0 waits for other ranks in all_reduce (train.py:" in first.message["message"]
    assert "rank 1 waits for other ranks in broadcast (train.py:" in second.message["message"]
    assert "do they call the same collectives" in first.message["message"]
    assert (first.message["secondary"], second.message["secondary"]) == (False, False)  # no other pod explains it


# Two ranks without an exporter whose steps are counted; FAULT is in the step, after the gradients are reduced.
COUNTED = """
import sys, time, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()
second = dist.new_group()
model = DistributedDataParallel(torch.nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

def train_step(step):
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    if step == 20:
        FAULT

for step in range(40):
    train_step(step)
    time.sleep(0.1)
"""
SKIPS = "if rank == 0: dist.all_reduce(torch.ones(3), group=second)"
REVERSES = """
        calls = [(dist.all_reduce, torch.ones(3), second), (dist.broadcast, torch.ones(5), None)]
        for call, tensor, group in calls if rank else reversed(calls):
            call(tensor, **({"src": 0} if group is None else {"group": group}))
"""
needs_recorder = pytest.mark.skipif(
    not hasattr(torch._C._distributed_c10d, "_dump_fr_trace_json"),
    reason="no flight recorder for gloo in this PyTorch",
)
SECOND_GROUP = r"all_reduce 1 of group 1, shape \[3\]"


def find_cause(ended: list[PodEnd]) -> str:
    """Return the message of the pod whose failure is the root cause."""
    causes = [pod.message["message"] for pod in ended if not pod.message["secondary"]]
    assert causes, [pod.log for pod in ended]
    return str(causes[0])


@needs_recorder
@pytest.mark.parametrize("nodes", [1, 2])
def test_hang_names_rank_that_did_not_arrive_and_collective_of_its_peer(pods: PodsFactory, nodes: int) -> None:
    script = COUNTED.replace("FAULT", "if rank == 1: time.sleep(1e9)")
    cause = find_cause(pods(script, nodes=nodes, nproc=2 // nodes, config=watchdog("Fail")).run())
    assert re.search(
        r"rank 1 is in train_step \(train.py:\d+\), after all_reduce \d+ of the default group; "
        r"rank 0 waits at train_step \(train.py:\d+\) in all_reduce \d+ of the default group, shape \[10\]$",
        cause,
    ), cause


@needs_recorder
@pytest.mark.parametrize(
    ("nodes", "fault", "others"),
    [
        (1, SKIPS, r"all_reduce \d+ of the default group, shape \[10\]"),
        (2, SKIPS, r"all_reduce \d+ of the default group, shape \[10\]"),
        (2, REVERSES, r"broadcast \d+ of the default group, shape \[5\]"),
    ],
)
def test_deadlock_names_each_ranks_collective(pods: PodsFactory, nodes: int, fault: str, others: str) -> None:
    job = pods(COUNTED.replace("FAULT", fault), nodes=nodes, nproc=2 // nodes, config=watchdog("Fail"))
    cause = find_cause(job.run())
    assert re.search(rf"waits (for other ranks |at \S+ \(\S+\) )?in .*{SECOND_GROUP}", cause), cause
    assert re.search(rf"waits (for other ranks |at \S+ \(\S+\) )?in .*{others}", cause), cause
    assert "mismatch between collectives" in cause


# Rank 0 waits for a silent socket, or for a lock, while its peer is in a collective.
RECEIVES = "if rank == 0 and not os.path.exists('enough'): socket.create_connection(silent.getsockname()).recv(1)"
LOCKED = "if rank == 0: lock.acquire()"
OUTSIDE = """
import os, socket, threading
silent = socket.create_server(("127.0.0.1", 0))
lock = threading.Lock()
lock.acquire()
"""
REPORTS = "from ddp_sdk.exporter import Exporter\nexporter = Exporter.start()\n"


@pytest.mark.parametrize(
    "reports", [False, pytest.param(True, marks=pytest.mark.nightly)], ids=["counted", "heartbeats"]
)
def test_rank_in_io_is_named_and_not_killed_before_its_limit(pods: PodsFactory, reports: bool) -> None:
    script = OUTSIDE + COUNTED.replace("FAULT", RECEIVES)
    if reports:
        script = REPORTS + script.replace("optimizer.step()", "optimizer.step(); exporter.step(samples=1, loss=1.0)")
    job = pods(script, max_restarts=2, config=watchdog("Restart", io=500))
    job.start()
    job.until_logged(0, "hang: other pods wait for rank 0")
    job.until_logged(1, "hang: in another pod, rank 0 is in")
    named = 'rank="0",state="IO",what="rank 0 is in train_step (train.py:'
    assert re.search(named.replace("(", r"\("), job.page()), job.page()
    age = heartbeat_age(job)
    job.until(lambda: heartbeat_age(job) > age + (30 if reports else 5), "more checks, in which pods would act")
    assert all("killing" not in job.log(index) for index in range(2)), "".join(job.log(index) for index in range(2))


@pytest.mark.parametrize(("fault", "io"), [(RECEIVES, 8), (LOCKED, 500)], ids=["I/O", "lock"])
def test_rank_that_stays_in_io_or_waits_for_lock_is_named_as_hang(pods: PodsFactory, fault: str, io: float) -> None:
    job = pods(OUTSIDE + COUNTED.replace("FAULT", fault), config=watchdog("Fail", io=io))
    assert re.search(r"rank 0 is in train_step \(train.py:", find_cause(job.run()))


GIVES_UP = OUTSIDE + COUNTED.replace('"gloo")', '"gloo", timeout=timedelta(seconds=15))').replace(
    "FAULT", "if rank == 1: lock.acquire()"
)


@pytest.mark.nightly
@pytest.mark.parametrize(("nodes", "restarts"), [(2, 0), (2, 2), (1, 0)])
def test_rank_outside_of_collectives_is_named_if_its_peer_gives_up_before_the_watchdog(
    pods: PodsFactory, nodes: int, restarts: int
) -> None:
    script = f"from datetime import timedelta\n{GIVES_UP}"
    options = {"nodes": nodes, "nproc": 2 // nodes, "max_restarts": restarts}
    job = pods(script, config=watchdog("Restart", stall=300), **options)
    job.start()
    if nodes == 1:
        failure = job.wait(0).message
    elif restarts:
        job.until_logged(1, "restarting the workers in the same pods, restart 1: no step for ")
        failure = job.until(lambda: json.loads(job.page(1, "report")).get("lastFailure"), "the failure")
    else:
        assert job.wait(0).message["secondary"]
        failure = job.wait(1).message["awaited"]  # its agent has lost the rendezvous store
    assert (failure["category"], failure["rank"], failure["secondary"]) == ("Hang", 1, False), failure
    assert "rank 1 is in train_step (train.py:" in failure["message"]
    assert "in train_step" in failure["traceback"]


def test_long_validation_by_rank_0_is_reported_only(pods: PodsFactory, tmp_path: Path) -> None:
    fault = "while rank == 0 and not os.path.exists('enough'): time.sleep(0.1 * (sum(range(1000000)) > 0))"
    job = pods(LOGS.replace("FAULT", fault), config=LOGGED)
    job.start()
    job.until_logged(0, "hang: no step for ")
    job.until_logged(1, "idle: the workers have used no CPU for ")
    shown = 'state="Busy",what="rank 0 is in train_step (train.py:'
    job.until(lambda: shown in job.page(), "what rank 0 does, on the page")
    since = heartbeat_age(job)
    job.until(lambda: heartbeat_age(job) > since + 4, "several more looks, in which pods that agree would act")
    (tmp_path / "enough").touch()
    ended = [job.wait(index) for index in range(2)]
    assert [end.code for end in ended] == [0, 0], ended[0].log + ended[1].log


# Rank 1 computes without an end. Rank 0 waits for it, until its collective times out, and both start again.
COMPUTES = """
import os, time
rank = int(os.environ["RANK"])
again = os.path.exists("again")
PIPES

def all_reduce(step):
    os.write(outbox, b"x")
    if wait(inbox, 1) == b"!":
        open("again", "w").close()
        raise RuntimeError("[gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 30000ms for recv operation")

def compute():
    while not os.path.exists("enough"):
        sum(range(100000))
    os.write(outbox, b"!")
    while True:
        sum(range(100000))

for step in range(1, 60):
    if step == 50 and rank == 1 and not again:
        compute()
    all_reduce(step)
    time.sleep(0.1)
    print(f"step {step}", flush=True)
""".replace("PIPES", PIPES)


def test_computing_rank_is_cause_of_restart_when_its_peer_times_out(pods: PodsFactory, tmp_path: Path) -> None:
    job = pods(COMPUTES, max_restarts=2, config=LOGGED)
    job.start()
    job.until_logged(1, "hang: other pods wait for rank 1")
    (tmp_path / "enough").touch()
    job.until_logged(1, "restarting the workers in the same pods, restart 1: no step for ")
    failure = job.until(lambda: json.loads(job.page(1, "report")).get("lastFailure"), "the failure")
    assert (failure["category"], failure["rank"], failure.get("secondary", False)) == ("Hang", 1, False), failure
    assert "rank 1 is in compute (train.py:" in failure["message"]
    for index in range(2):
        job.signal(index, signal.SIGTERM)


WAITS = "while not os.path.exists('enough'): time.sleep(0.2)"
SAVES_AND_STOPS = f"""
import os, signal, time
for number in (signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(number, lambda *_: os._exit(7))
{WAITS}
"""
BECOMES_ANOTHER = f"""
import os, sys
os.execv(sys.executable, [sys.executable, "-c", {"import os, time" + chr(10) + WAITS!r}])
"""


@pytest.mark.parametrize(
    ("script", "shown"), [(SAVES_AND_STOPS, "train.py"), (BECOMES_ANOTHER, "no stack")], ids=["own signals", "exec"]
)
def test_idle_script_without_steps_is_reported_only(pods: PodsFactory, tmp_path: Path, script: str, shown: str) -> None:
    job = pods(script, nodes=1, config=watchdog("Restart", stall=1, start=1))
    job.start()
    job.until_logged(0, "the workers have used no CPU for ")
    job.until_logged(0, shown)
    (tmp_path / "enough").touch()
    assert job.wait(0).code == 0


def test_silent_log_of_computing_script_is_reported_only(pods: PodsFactory, tmp_path: Path) -> None:
    script = """
import os, time
step = 0
while not os.path.exists("hush"):
    step += 1
    print(f"step {step}\\n", end="", flush=True)
    time.sleep(0.2)
print("hushed", flush=True)
while not os.path.exists("enough"):
    time.sleep(0.1 * (sum(range(1000000)) > 0))
print(f"step {step + 1}", flush=True)
"""
    job = pods(script, nodes=1, config=watchdog("Restart", stall=1, start=1) | PATTERNS)
    job.start()
    seen: set[str] = set()

    def looks() -> int:
        match = re.search(r'^ddp_step\{rank="0"\} (\S+)$', job.page(), re.M)
        seen.update(match.groups() if match else ())
        return len(seen)

    job.until(lambda: looks() > 20, "steps on the page, and looks of the launcher between them")
    (tmp_path / "hush").touch()
    job.until_logged(0, "no step for ")
    job.until_logged(0, "train.py")

    first = job.until(lambda: "hushed" in job.log(0) and heartbeat_age(job), "silence")
    job.until(lambda: heartbeat_age(job) > first + 1, "several more looks")
    (tmp_path / "enough").touch()
    ended = job.wait(0)
    assert ended.code == 0
    assert ended.log.count("hang: no step for ") == 1


def heartbeat_age(job: LauncherPods) -> float:
    """Return the time since the launcher observed a step, seconds; 0 if the page does not contain it."""
    match = re.search(r"^ddp_launcher_heartbeat_age_seconds (\S+)$", job.page(), re.M)
    return float(match[1]) if match else 0.0


def test_agent_in_exit_barrier_does_not_use_up_grace_period(pods: PodsFactory, tmp_path: Path) -> None:
    script = """
import os, time
rank = os.environ["RANK"]
open("started-" + rank, "w").close()
while rank == "1" and not os.path.exists("enough"):
    time.sleep(0.05)
"""
    job = pods(script, env={"DDP_GRACE_SECONDS": "500"})
    job.start()
    job.until(lambda: len(list(tmp_path.glob("started-*"))) == 2, "both ranks run")
    runtime = next(path for path in job.temporary.glob("ddp-*") if str(job.running[0].pid) in path.name)
    job.until(lambda: "finish" in job.log(0) or not _workers_live(job.running[0].pid), "pod 0's worker has ended")
    job.signal(0, signal.SIGTERM)
    ended = job.wait(0)  # less than the grace time, or the wait fails
    assert ended.code == 85
    assert "grace period is over" not in ended.log
    assert not runtime.exists()
    (tmp_path / "enough").touch()


def _workers_live(launcher: int) -> bool:
    return any(_is_worker(process) for process in psutil.Process(launcher).children(recursive=True))


def _is_worker(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE and "worker" in process.cmdline()
    except psutil.NoSuchProcess:  # just now; a zombie's command line counts as one too
        return False

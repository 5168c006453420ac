"""How a pod ends: signals, killed processes, exit codes, programs other than Python. No worker needs torch."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.support.launcher_pods import LauncherPods, PodsFactory, launch_pods

pytestmark = pytest.mark.process


@pytest.fixture
def pods(tmp_path: Path) -> Iterator[PodsFactory]:
    with launch_pods(tmp_path) as factory:
        yield factory


SLEEP = """
import os, time
with open(f"started-{os.environ['RANK']}-{os.environ['TORCHELASTIC_RESTART_COUNT']}", "w"):
    pass
time.sleep(600)
"""


def descendants(job: LauncherPods, index: int = 0) -> list[psutil.Process]:
    return psutil.Process(job.running[index].pid).children(recursive=True)


def until_gone(job: LauncherPods, processes: list[psutil.Process]) -> None:
    job.until(lambda: not any(is_alive(process) for process in processes), "all processes are gone")


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_sigkill_of_the_launcher_leaves_no_process(pods: PodsFactory, tmp_path: Path) -> None:
    job = pods("train.py", script=SLEEP, nodes=1, nproc=2)
    job.start()
    job.until(lambda: len(list(tmp_path.glob("started-*"))) == 2, "both ranks run")
    processes = descendants(job)
    assert len(processes) == 6  # two fork servers, the agent, its workers, and the processes that mark their lines
    job.signal(0, signal.SIGKILL)
    until_gone(job, processes)


def test_the_pod_dies_with_its_owner(pods: PodsFactory, tmp_path: Path) -> None:
    ours, theirs = os.pipe()
    os.set_inheritable(ours, True)
    lifeline = {"env": {"DDP_LIFELINE_FD": str(ours)}, "pass_fds": (ours,)}
    job = pods("train.py", script=SLEEP, nodes=1, config={"warm_start": False}, **lifeline)
    job.start()
    os.close(ours)
    job.until(lambda: (tmp_path / "started-0-0").exists(), "the rank runs")
    processes = descendants(job)
    os.close(theirs)
    assert job.wait(0).code == 137
    until_gone(job, processes)


def test_sigterm_lets_workers_save_and_reports_preempted(pods: PodsFactory, tmp_path: Path) -> None:
    script = """
import os, signal, sys, time
def save(number, frame):
    time.sleep(1)  # longer than none at all
    open("saved-" + os.environ["RANK"], "w").close()
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
open("started-" + os.environ["RANK"], "w").close()
while True:
    time.sleep(0.05)
"""
    job = pods("train.py", script=script, nodes=1, nproc=2, max_restarts=3)
    job.start()
    job.until(lambda: len(list(tmp_path.glob("started-*"))) == 2, "both ranks run")
    job.signal(0, signal.SIGTERM)
    ended = job.wait(0)
    assert ended.code == 85
    assert ended.message["category"] == "Preempted"
    assert len(list(tmp_path.glob("saved-*"))) == 2
    assert "SIGTERM: stopping; the workers have 150 s" in ended.log


def test_worker_ignoring_sigterm_is_killed_after_grace_period(pods: PodsFactory, tmp_path: Path) -> None:
    script = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + SLEEP
    job = pods("train.py", script=script, nodes=1, max_restarts=3, env={"DDP_GRACE_SECONDS": "1"})
    job.start()
    job.until(lambda: (tmp_path / "started-0-0").exists(), "the rank runs")
    processes = descendants(job)
    job.signal(0, signal.SIGINT)
    assert job.wait(0).code == 85
    until_gone(job, processes)


def test_failure_before_signal_is_reported(pods: PodsFactory, tmp_path: Path) -> None:
    script = """
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.environ["RANK"] == "1":
    raise ValueError("the cause")
time.sleep(600)
"""
    runtime = tmp_path / "runtime"
    env = {"DDP_RUNTIME_DIR": str(runtime), "DDP_GRACE_SECONDS": "1"}
    job = pods("train.py", script=script, nodes=1, nproc=2, env=env)
    job.start()
    job.until(lambda: (runtime / "errors" / "1.json").exists(), "rank 1 fails")
    job.signal(0, signal.SIGTERM)
    ended = job.wait(0)
    assert ended.code == 81
    assert ended.message["message"] == "ValueError: the cause"


def test_killed_agent_and_workers_are_restarted(pods: PodsFactory, tmp_path: Path) -> None:
    script = """
import os, time
mark = "started-" + str(len(os.listdir(".")))
again = os.path.exists("first")
open("first", "w").close()
time.sleep(0 if again else 600)
"""
    job = pods("train.py", script=script, nodes=1, max_restarts=1)
    job.start()
    job.until(lambda: (tmp_path / "first").exists(), "the rank runs")
    agent = next(child for child in psutil.Process(job.running[0].pid).children() if child.children())
    agent.kill()
    ended = job.wait(0)
    assert ended.code == 0, ended.log
    assert ended.message["restarts"] == 1
    assert "restarting torchrun's agent, restart 1:" in ended.log


def test_failed_program_is_reported_with_its_last_lines(pods: PodsFactory) -> None:
    words = 'echo starting; echo "Error: no such option: --lr" >&2; exit 4'
    (ended,) = pods("sh", "-c", words, nodes=1).run()
    assert ended.message["message"] == "worker exited with code 4; its last line: 'Error: no such option: --lr'"
    assert ended.message["traceback"] == "starting\nError: no such option: --lr"
    assert "starting\n" in ended.log


def test_shell_command_runs_in_every_rank(pods: PodsFactory) -> None:
    # Each waits until the other has printed: the first failure ends both.
    script = (
        'echo "shell rank $RANK"; touch "said-$RANK"; while [ ! -e said-0 ] || [ ! -e said-1 ]; do sleep 0.05; done'
    )
    (ended,) = pods("sh", "-c", f"{script}; exit $((RANK * 126))", nodes=1, nproc=2, max_restarts=3).run()
    assert "[rank0]: shell rank 0" in ended.log
    assert "[rank1]: shell rank 1" in ended.log
    assert ended.code == 81  # 126 is among the codes that are not retried
    assert ended.message["exitCode"] == 126
    assert ended.message["restarts"] == 0


def test_unresolved_master_ends_pod_after_timeout(pods: PodsFactory) -> None:
    config = {"join_timeout_seconds": 1}
    job = pods("train.py", script="pass", env={"MASTER_ADDR": "job-1-0.job.invalid"}, config=config)
    job.start(1)
    ended = job.wait(1)
    assert ended.code == 86
    assert ended.message["secondary"] is True
    assert ended.message["message"].startswith(
        "DNS has not resolved the name of pod 0, job-1-0.job.invalid, within 1 s"
    )
    assert (ended.message["category"], ended.message["exitCode"]) == ("Network", 86)


def test_taken_rendezvous_port_is_reported(pods: PodsFactory) -> None:
    job = pods("train.py", script="pass")
    with socket.create_server(("", job.port), reuse_port=False):
        job.start(0)
        ended = job.wait(0)
    assert ended.code == 82
    assert f"cannot serve the rendezvous on port {job.port}" in ended.message["message"]


def test_metrics_merge_ranks_and_ignore_invalid_pages(pods: PodsFactory, tmp_path: Path) -> None:
    script = """
import http.server, os, socket, time
rank = os.environ["RANK"]
path = os.path.join(os.environ["DDP_RUNTIME_DIR"], "metrics", rank)
if rank == "0":
    class Page(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"# HELP ddp_loss Loss.\\n# TYPE ddp_loss gauge\\nddp_loss{rank=\\"0\\"} 0.5\\n")
    server = http.server.HTTPServer(("127.0.0.1", 0), Page)
    port = server.server_address[1]
else:
    server = socket.create_server(("127.0.0.1", 0))
    port = server.getsockname()[1]
with open(path + ".tmp", "w") as file:
    file.write(str(port))
os.rename(path + ".tmp", path + ".port")
if rank == "0":
    while not os.path.exists("enough"):
        server.timeout = 0.05
        server.handle_request()
    with open(path + ".prom", "w") as file:
        file.write("# TYPE ddp_loss gauge\\nddp_loss{rank=\\"0\\"} 0.25\\n")
else:
    while not os.path.exists("enough"):  # accepts and never answers
        time.sleep(0.05)
"""
    job = pods("train.py", script=script, nodes=1, nproc=2)
    job.start()
    seen = job.until(lambda: 'ddp_loss{rank="0"} 0.5' in (text := job.page()) and text, "the rank's page")
    job.until(lambda: 'ddp_launcher_phase{phase="Running"} 1' in job.page(), "the agent has seen that they run")
    assert "ddp_launcher_in_place_restarts_total 0" in seen
    assert job.page(path="healthz") == "ok\n"
    (tmp_path / "enough").touch()
    ended = job.wait(0)
    assert ended.code == 0, ended.log
    assert ended.message["progress"]["loss"] == 0.25


def test_sigusr1_logs_stacks_of_all_ranks(pods: PodsFactory, tmp_path: Path) -> None:
    script = "import time\ndef stuck_here():\n    open('stuck', 'w').close()\n    time.sleep(600)\nstuck_here()\n"
    job = pods("train.py", script=script, nodes=1)
    job.start()
    job.until(lambda: (tmp_path / "stuck").exists(), "the rank is stuck")
    job.signal(0, signal.SIGUSR1)
    job.until_logged(0, "in stuck_here")
    job.signal(0, signal.SIGTERM)
    assert job.wait(0).code == 85


def test_rank_losing_successful_peer_reports_it_without_waiting(pods: PodsFactory, tmp_path: Path) -> None:
    script = """
import os, time
if os.environ["RANK"] == "0":
    with open("left.tmp", "w") as file:
        file.write(str(os.getpid()))
    os.rename("left.tmp", "left")
    raise SystemExit
while not os.path.exists("left"):
    time.sleep(0.05)
while os.path.exists("/proc/" + open("left").read()):  # until its agent has seen it
    time.sleep(0.05)
time.sleep(1)
raise RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer")
"""
    job = pods("train.py", script=script, nodes=2, max_restarts=3)
    job.start()
    ended = job.wait(1)
    assert ended.code == 81  # it would leave again
    assert (ended.message["category"], ended.message["secondary"], ended.message["restarts"]) == ("UserError", False, 0)
    assert ended.message["message"].startswith("rank 0 had already ended, with exit code 0,")
    assert "no rank may leave the loop before its peers" in ended.message["remedy"]


def test_signal_during_import_of_launcher_is_handled(pods: PodsFactory, tmp_path: Path) -> None:
    """A container's first process would not receive the signal: the kernel drops signals without a handler there."""
    early = tmp_path / "early"
    early.mkdir()
    (early / "socket.py").write_text("""
import os, signal, sys
if sys.argv[1:2] == ["run"]:
    os.kill(os.getpid(), signal.SIGTERM)
sys.path.remove(os.path.dirname(__file__))
del sys.modules["socket"]
import socket
""")
    job = pods("train.py", script=SLEEP, nodes=1, env={"PYTHONPATH": str(early)}, warm=False)
    job.start()
    ended = job.wait(0)
    assert (ended.code, ended.message["category"]) == (85, "Preempted")
    assert "SIGTERM: stopping" in ended.log


def test_pod_0_does_not_wait_for_peers_with_policy_rank_zero(pods: PodsFactory, tmp_path: Path) -> None:
    script = "import os\nif os.environ['RANK'] == '0': raise SystemExit\n" + SLEEP
    job = pods("train.py", script=script, nodes=2, config={"success_policy": "RankZero"})
    job.start()
    ended = job.wait(0)
    assert (ended.code, "the other pods are not waited for" in ended.log) == (0, True)
    assert (tmp_path / "started-1-0").exists()


CRASHES_AT_ITS_END = """
import atexit, ctypes, os, sys
libc = ctypes.CDLL(None)
libc.__cxa_atexit(ctypes.cast(libc.abort, ctypes.c_void_p), None, None)
"""


@pytest.mark.parametrize(
    ("last", "code"),
    [
        ("", 0),
        ("sys.exit()", 0),
        ("sys.exit(3)", 82),
        ("atexit.register(os.abort)", 82),
        ("os.kill(os.getpid(), 6)", 82),
    ],
)
def test_crash_after_the_program_and_its_exit_handlers_is_a_success(pods: PodsFactory, last: str, code: int) -> None:
    """As gloo's threads can cause it: pytorch#190489."""
    job = pods("train.py", script=f"{CRASHES_AT_ITS_END}{last}", nodes=1, warm=False)
    job.start()
    ended = job.wait(0)
    assert ended.code == code
    assert ("received SIGABRT while its interpreter ended" in ended.log) == (code == 0)

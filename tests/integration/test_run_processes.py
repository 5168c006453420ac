"""`ddp run` over real torchrun processes: failures, recovery, and complete clean-up after every kind of end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from ddp_cli.client.packing.archive import pack
from tests.support import PATIENCE
from tests.support.counts import read_counts
from tests.support.ddp_run import DdpRun, find_pods, manifest

pytestmark = pytest.mark.process

# None of these scripts imports torch: torchrun does that already, and its workers need not.
FAIL_ONCE = """
import os, time
if os.environ["DDP_ATTEMPT"] == "1":
    if os.environ["RANK"] == "1":
        raise RuntimeError("broken on purpose")
    time.sleep(600)  # as a rank does whose peer has left a collective
print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], "in attempt", os.environ["DDP_ATTEMPT"])
"""
# Text that a shell, a format string or another parser of flags would interpret.
HOSTILE = [
    "$(touch pwned)", "`touch pwned`", "; touch pwned", "|| touch pwned", "$HOME", "%(a)s {b} %s", "two words", "'\"\\",
    "line\nbreak", "--nnodes=9", "--", "", "../../pwned", "é…\u202e",
]  # fmt: skip
SAYS_WHAT_IT_GOT = """
import json, os, pathlib, sys
got = sys.argv[1:], {name: os.environ[name] for name in os.environ if name.startswith("HOSTILE_")}
pathlib.Path("got-" + os.environ["RANK"]).write_text(json.dumps(got))
"""
SAVE_ON_SIGTERM = """
import os, pathlib, signal, sys, time
def save(*_):
    pathlib.Path("saved").touch()
    print("step 7/9", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
pathlib.Path("ready").touch()
time.sleep(600)
"""
WAITS_FOR_END = """
import pathlib, time
pathlib.Path("ready").touch()
while not pathlib.Path("end").exists():
    time.sleep(0.1)
"""
DEAF = """
import os, pathlib, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
pathlib.Path("ready-" + os.environ["RANK"]).touch()
time.sleep(600)
"""


STEPS = """
import os, time
saved = "step-" + os.environ["RANK"]
step = int(open(saved).read()) if os.path.exists(saved) else 0
while True:
    time.sleep(0.1)
    step += 1
    with open(saved + ".tmp", "w") as file:
        file.write(str(step))
    os.replace(saved + ".tmp", saved)
    print("step", step, flush=True)
"""


def write(folder: Path, script: str) -> None:
    (folder / "train.py").write_text(script)


LOOP = """
import os, time, torch
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(30):
    if step == 10 and os.environ["RANK"] in os.environ["BAD"]:
        raise ValueError("label 17 out of range")
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    print(f"step {step + 1}/30", flush=True)
    time.sleep(0.02)
"""
CATCH = """
import runpy, traceback
try:
    runpy.run_path("loop.py", run_name="__main__")
except Exception:
    traceback.print_exc()
"""
IN_BACKGROUND = "nohup python loop.py > log-$RANK 2>&1 &"


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("command", "bad", "reason", "parts", "step"),
    [
        (["python", "train.py"], "0", "TracebackAtEnd", ["rank 0", "step 10 of 30", "ValueError: label 17"], (10, 30)),
        (["python", "train.py"], "1", "TracebackAtEnd", ["rank 1", "step 10", "ValueError: label 17"], (30, 30)),
        (["python", "train.py"], "", "", [], (30, 30)),
        (["sh", "-c", "python loop.py || true"], "0", "TracebackAtEnd", ["rank 0", "step 10 of 30"], (10, 30)),
        (["bash", "-c", IN_BACKGROUND], "", "ProcessesLeft", ["still ran: python loop.py"], (None, None)),
    ],
)  # fmt: skip
def test_exit_code_that_hides_a_failure_is_reported(
    tmp_path: Path, command: list[str], bad: str, reason: str, parts: list[str], step: tuple[int | None, int | None]
) -> None:
    write(tmp_path, CATCH)
    (tmp_path / "loop.py").write_text(LOOP)
    text = manifest(command, nodes=1, procPerNode=2, env={"BAD": f"x{bad}"}, processGroupPolicy="Ignore")
    with DdpRun(tmp_path, text) as run:
        assert run.wait() == 0, run.output
        status = run.read_status()
    progress = status.get("progress", {})
    assert (status["phase"], status.get("reason", "")) == ("Succeeded", reason), run.output
    assert (progress.get("step"), progress.get("totalSteps")) == step
    assert all(part in run.output for part in parts), run.output
    assert ("Succeeded with a warning" in run.output) is bool(reason)


GROUPS = """
import os, time, torch
import torch.distributed as dist
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(int(os.environ["STEPS"])):
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    time.sleep(0.1)
dist.destroy_process_group()
"""
NESTED = f"{sys.executable} -m torch.distributed.run --standalone --nproc-per-node=1 groups.py"
ALONE = """
import os, time, torch
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(int(os.environ["STEPS"])):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    time.sleep(0.1)
"""


@pytest.mark.parametrize(
    ("command", "steps", "spec", "reason"),
    [
        (["bash", "run.sh"], "100000", {}, "SeparateGroups"),
        (["python", "alone.py"], "100000", {}, "NoProcessGroup"),
        (["python", "alone.py"], "5", {}, "NoProcessGroup"),
        (["bash", "run.sh"], "5", {"processGroupPolicy": "Ignore"}, ""),
        (["bash", "run.sh"], "5", {"procPerNode": 1}, ""),
        (["python", "groups.py"], "5", {}, ""),
    ],
    ids=["launcher in a script", "no group", "no group at the end", "allowed", "one rank", "one group"],
)
def test_ranks_that_train_apart_fail_the_job_with_the_remedy(
    tmp_path: Path, command: list[str], steps: str, spec: dict[str, Any], reason: str
) -> None:
    (tmp_path / "groups.py").write_text(GROUPS)
    (tmp_path / "alone.py").write_text(ALONE)
    (tmp_path / "run.sh").write_text(f"{NESTED}\n")
    text = manifest(command, nodes=1, env={"STEPS": steps}, **{"procPerNode": 2, **spec})
    with DdpRun(tmp_path, text) as run:
        assert run.wait() == (1 if reason else 0), run.output
        status = run.read_status()
    assert (status["phase"], status.get("reason", "")) == (("Failed", reason) if reason else ("Succeeded", "")), status
    if reason:
        remedy = "the script as the command" if reason == "SeparateGroups" else "init_process_group()"
        assert remedy in run.output
        assert "if ranks are meant to work independently, set spec.processGroupPolicy: Ignore" in run.output


def test_job_recovers_from_failure_of_rank_1_and_succeeds(tmp_path: Path) -> None:
    write(tmp_path, FAIL_ONCE)
    with DdpRun(tmp_path, manifest(["python", "train.py"], nodes=1, procPerNode=2)) as run:
        assert run.wait() == 0, run.output
        status = run.read_status()
    assert status["phase"] == "Succeeded"
    assert (status["attempt"], read_counts(status)["counted"]) == (2, 1)
    assert status["lastFailure"]["rank"] == 1
    assert status["lastFailure"]["message"] == "RuntimeError: broken on purpose"
    logs = {path.stem: path.read_text() for path in (run.run_folder / "logs").glob("*.log")}
    assert sorted(logs) == ["attempt-1-pod-0", "attempt-2-pod-0"]
    assert "rank 0 of 2 in attempt 2" in logs["attempt-2-pod-0"]
    assert "rank 1 of 2 in attempt 2" in logs["attempt-2-pod-0"]
    assert "toy: Succeeded" in run.output
    assert "2 attempts, 1 restart" in run.output
    assert "broken on purpose" in (run.run_folder / "events.log").read_text()


def test_arguments_and_variables_are_passed_unchanged(tmp_path: Path) -> None:
    write(tmp_path, SAYS_WHAT_IT_GOT)
    env = {f"HOSTILE_{number}": text for number, text in enumerate(HOSTILE)}
    with DdpRun(tmp_path, manifest(["python", "train.py", *HOSTILE], nodes=1, procPerNode=2, env=env)) as run:
        assert run.wait() == 0, run.output
        for rank in (0, 1):
            assert json.loads((tmp_path / f"got-{rank}").read_text()) == [HOSTILE, env]
    assert not list(tmp_path.rglob("*pwned*"))
    assert not list(tmp_path.parent.glob("pwned*"))


def test_missing_script_fails_at_once_and_is_named(tmp_path: Path) -> None:
    with DdpRun(tmp_path, manifest(["python", "nowhere.py"])) as run:
        assert run.wait() == 1
        status = run.read_status()
    assert (status["phase"], status["attempt"]) == ("Failed", 1)
    assert status["lastFailure"]["category"] == "UserError"
    assert "training script not found: nowhere.py" in run.output
    assert "logs/attempt-1-pod-" in run.output
    assert (run.run_folder / "summary.txt").read_text() in run.output


def conditions(run: DdpRun) -> dict[str, tuple[str, str]]:
    return {
        condition["type"]: (condition["status"], condition["reason"]) for condition in run.read_status()["conditions"]
    }


def test_run_without_output_reader_trains_and_returns_exit_code(tmp_path: Path) -> None:
    write(tmp_path, "import pathlib, sys; pathlib.Path('trained').touch(); sys.exit(1)")
    (tmp_path / "job.yaml").write_text(
        manifest(["python", "train.py"], nodes=1, recovery={"maxRestarts": 0, "warmStart": "Off"})
    )
    code = "import sys; from ddp_cli.__main__ import main; sys.exit(main())"
    command = [sys.executable, "-c", code, "run", "job.yaml"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.stdout.close()  # as `| head -1` does
        words = process.communicate(timeout=PATIENCE)[1]
    assert process.returncode == 1, words
    assert (tmp_path / "trained").exists()
    assert words.count("cannot write to standard output") == 1
    (summary,) = tmp_path.glob("ddp-runs/toy-*/summary.txt")
    assert "toy: Failed" in summary.read_text()


def test_ctrl_c_lets_workers_save_and_ends_all_processes(tmp_path: Path) -> None:
    write(tmp_path, SAVE_ON_SIGTERM)
    patterns = {"logPatterns": ["step (?P<step>[0-9]+)/(?P<totalSteps>[0-9]+)"]}
    with DdpRun(tmp_path, manifest(["python", "train.py"], nodes=1, metrics=patterns)) as run:
        run.until((tmp_path / "ready").exists, "a worker that trains")
        marks = run.marks()
        assert find_pods(marks)
        run.process.send_signal(signal.SIGINT)
        assert run.wait() == 130
        assert find_pods(marks) == []
        assert conditions(run)["Failed"] == ("True", "Interrupted")
        assert run.read_status()["progress"]["step"] == 7  # and not in the state of the last pass
        assert ">Interrupted</span>" in (run.run_folder / "report.html").read_text()
        log = (run.run_folder / "logs" / "attempt-1-pod-0.log").read_text()
    assert (tmp_path / "saved").exists()
    assert "stopping: the pods have 30 s to save a checkpoint and exit" in run.output
    assert "SIGTERM: stopping; the workers have 30 s to save and exit" in log
    assert "Interrupted: stopped by Ctrl-C while the job was Running." in run.output, run.output
    assert " Failed" not in run.output
    assert "toy: Interrupted" in run.output


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT])
def test_signal_that_is_ignored_at_the_start_ends_no_process_of_the_run(tmp_path: Path, number: int) -> None:
    """As `nohup` ignores SIGHUP, and a shell SIGINT for what it starts in the background of a script."""
    write(tmp_path, WAITS_FOR_END)
    with ExitStack() as stack:
        stack.callback(signal.signal, number, signal.signal(number, signal.SIG_IGN))
        run = stack.enter_context(DdpRun(tmp_path, manifest(["python", "train.py"], nodes=1)))
        run.until((tmp_path / "ready").exists, "a worker that trains")
        for pid in (run.process.pid, *find_pods(run.marks())):
            os.kill(pid, number)
        (tmp_path / "end").touch()
        assert run.wait() == 0, run.output
    assert "stopp" not in run.output


def test_second_ctrl_c_kills_unresponsive_processes(tmp_path: Path) -> None:
    write(tmp_path, DEAF)
    with DdpRun(tmp_path, manifest(["python", "train.py"], nodes=1)) as run:
        run.until((tmp_path / "ready-0").exists, "a worker that trains")
        marks = run.marks()
        run.process.send_signal(signal.SIGINT)
        run.until(lambda: "stopping: the pods have" in run.output, "the first signal being obeyed")
        run.process.send_signal(signal.SIGINT)
        assert run.wait() == 130
        assert find_pods(marks) == []
    assert "killing all pods" in run.output


def test_sigkill_of_ddp_run_ends_launcher_agent_and_workers(tmp_path: Path) -> None:
    write(tmp_path, DEAF.replace("subprocess.Popen", "(lambda *a, **k: None)"))
    with DdpRun(tmp_path, manifest(["python", "train.py"])) as run:
        run.until(lambda: len(list(tmp_path.glob("ready-*"))) == 2, "two workers that train")
        marks = run.marks()
        # launcher, agent and worker of two pods, and the store on pod 0
        assert len(find_pods(marks)) >= 6
        run.process.kill()
        run.process.wait()
        deadline = time.monotonic() + PATIENCE
        while find_pods(marks) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert find_pods(marks) == []
        text = (run.run_folder / "status.yaml").read_text()
        assert text.startswith(f"# Written by `ddp run`, process {run.process.pid} on ")
        assert run.read_status()["phase"] != "Failed"
        killed = run.run_folder
    done = subprocess.run(
        [str(Path(sys.executable).with_name("ddp")), "why", killed.name, "--local"], cwd=tmp_path, capture_output=True,
        text=True, timeout=PATIENCE, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "Interrupted: `ddp run` was killed while the job was " in done.stdout
    assert (killed / "status.yaml").read_text() == text, "a reading command writes nothing"


NOT_SAVED = """
import time
import torch
parameter = torch.nn.Parameter(torch.zeros(1))
optimizer = torch.optim.SGD([parameter], lr=0.1)
for step in range(1, 100000):
    parameter.square().backward()
    optimizer.step()
    time.sleep(0.01)
    if step % 20 == 0:
        print(f"Epoch: [0]  [{step}/10000]  loss: 0.5", flush=True)
"""
PRINTED = {"logPatterns": [r"step (?P<step>\d+)"]}


@pytest.mark.parametrize(
    ("script", "after", "metrics", "from_beginning"),
    [(STEPS, 3, PRINTED, False), (NOT_SAVED, 99, {}, True)],
    ids=["resumes", "saves nothing"],
)
def test_drill_kills_rank_of_run_and_reports_loss(
    tmp_path: Path, script: str, after: int, metrics: dict[str, list[str]], from_beginning: bool
) -> None:
    write(tmp_path, script)
    recovery = {"maxRestarts": 3, "warmStart": "Off"}
    with DdpRun(tmp_path, manifest(["python", "train.py"], metrics=metrics, recovery=recovery)) as run:
        run.until(lambda: "step" in run.output, "a step")
        done = subprocess.run(
            [str(Path(sys.executable).with_name("ddp")), "drill", "--kill=1", f"--after={after}", "-o", "json"],
            cwd=tmp_path, text=True, capture_output=True, timeout=PATIENCE, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert run.process.poll() is None, "the job continues"
    message = json.loads(done.stdout)
    assert message["killed"].startswith("rank 1 (process ")
    assert (message["level"], message["recoverySeconds"] > 0) == ("process", True)
    assert message["stepBefore"] >= after
    # Every step of the first script is saved: at most one step is lost, which ran and never appeared on the page.
    assert message["fromBeginning"] is from_beginning
    assert message["stepsLost"] == (message["stepBefore"] if from_beginning else 0)


TWO_MODULES = {
    "train.py": """
import os, pathlib, time
from pieces.data import read
print("rank", os.environ["RANK"], "has read", read("numbers.txt"), "in attempt", os.environ["DDP_ATTEMPT"])
if os.environ["DDP_ATTEMPT"] == "1":
    if os.environ["RANK"] == "1":
        pathlib.Path(os.environ["SOURCE"], "pieces", "data.py").write_text("raise SystemExit('not what was packed')")
        raise RuntimeError("broken on purpose")
    time.sleep(600)
""",
    "pieces/__init__.py": "",
    "pieces/data.py": "def read(path):\n    with open(path) as file:\n        return file.read().split()\n",
    "numbers.txt": "1 2 3",
    ".gitignore": "*.log\n",
    "old.log": "",
    "id_rsa": "",
}


def test_all_pods_and_attempts_run_packed_folder(tmp_path: Path) -> None:
    source = tmp_path / "source"
    for name, text in TWO_MODULES.items():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(text)
    digest = pack(source).digest
    text = manifest(["python", "train.py"], env={"SOURCE": str(source)})
    with DdpRun(tmp_path, text, ["--workdir", "source", "--logs", "all"]) as run:
        assert run.wait() == 0, run.output
        status = run.read_status()
        folder = run.run_folder
    assert status["attempt"] == 2
    logs = (folder / "logs" / "attempt-2-pod-1.log").read_text()
    assert "rank 1 has read ['1', '2', '3'] in attempt 2" in logs
    assert f"[launcher] unpacked code {digest[:12]}: 5 files in " in logs
    assert "left out possible secrets: id_rsa;" in run.output

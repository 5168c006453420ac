"""Pods of `ddp dev`: real holders, launchers and ranks; orders by the program that `ddp rerun` starts in pod 0."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import random
import shutil
import signal
import socket
import struct
import subprocess
import tarfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ddp_pod.contract.plan import CodeConfig, DevConfig, loopback_address
from ddp_pod.features.dev.contract import REPLACED, Event, Order, decode_event, encode_order
from tests.support.launcher_folder import delivered_launcher
from tests.support.launcher_pods import LauncherPods
from tests.support.pod_python import POD_PYTHON
from tests.support.ports import HeldPort
from tests.support.wheels import make_wheel

pytestmark = pytest.mark.process

TRAIN = """
import os, sys, time, torch, torch.distributed as dist
import part
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
print(f"run of {part.NAME} with {sys.argv[1:]}, world {int(total)}", flush=True)
part.train()
print(f"{part.NAME} is done", flush=True)
"""
WAITS = "import time\ndef train(): time.sleep(600)\n"
RETURNS = "def train(): pass\n"


def pack(files: Mapping[str, str]) -> tuple[bytes, str]:
    """Return an archive and its digest."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as tar:
        for name, text in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(text)
            tar.addfile(member, io.BytesIO(text.encode()))
    return gzip.compress(content.getvalue()), hashlib.sha256(content.getvalue()).hexdigest()


class DevPods:
    """The pods of a job, each with its own folder for the code. Keywords are fields of LauncherPods."""

    def __init__(
        self,
        folder: Path,
        nodes: int,
        *,
        files: Mapping[str, str],
        hold_seconds: float = 600.0,
        runs: int = 0,
        metrics_port: int = 0,
        requirements: str | None = None,
        **options: Any,
    ) -> None:
        archive, digest = pack({"train.py": TRAIN, **files})
        (folder / "code.tar.gz").write_bytes(archive)
        self.pods: list[LauncherPods] = []
        for index in range(nodes + options.get("spares", 0)):
            own = folder / f"code-{index}"
            own.mkdir()
            packages = str(folder / f"packages-{index}")
            code = CodeConfig(str(folder / "code.tar.gz"), digest, str(own), requirements, packages)
            config = {**options.get("config", {}), "dev": DevConfig(hold_seconds, runs), "code": code}
            self.pods.append(LauncherPods(own, ["train.py"], nodes, **{**options, "config": config}, warm=False))
            self.pods[index].env = {
                "TMPDIR": str(self.pods[0].temporary),
                "MASTER_PORT": str(self.pods[0].port),
                "DDP_GRACE_SECONDS": "5",
                "DDP_METRICS_PORT": str(metrics_port),
            }
            self.pods[index].start(index)

    def order(self, kind: str, files: Mapping[str, str] | None = None, **values: Any) -> Iterator[Event]:
        """Send an order, and yield its events."""
        archive, digest = pack({"train.py": TRAIN, **files}) if files is not None else (b"", "")
        with self.open_order(Order(kind, digest=digest, size=len(archive), **values)) as program:
            assert program.stdin is not None
            assert program.stdout is not None
            program.stdin.write(archive)
            program.stdin.flush()
            try:
                yield from map(decode_event, program.stdout)
            finally:
                program.kill()

    @contextmanager
    def open_order(self, order: Order) -> Iterator[subprocess.Popen[bytes]]:
        """Start the program and send it the order, without the archive."""
        with subprocess.Popen(
            [POD_PYTHON, str(delivered_launcher()), "order"],
            env={**os.environ, "TMPDIR": str(self.pods[0].temporary)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        ) as program:
            assert program.stdin is not None
            program.stdin.write(encode_order(order))
            program.stdin.flush()
            yield program

    def run(self, files: Mapping[str, str] | None = None, **values: Any) -> list[Event]:
        """Start another run, and return all events until its end."""
        return list(self.order("run", files, **values))

    def report(self, index: int = 0) -> dict[str, Any]:
        """Return a pod's report."""
        return dict(json.loads(self.pods[index].page(index, "report")))

    def until_held(self) -> None:
        """Wait until no run is under way."""
        self.pods[0].until(lambda: self.report()["phase"] == "Held" and self.report()["dev"].get("result"), "held")

    def wait_for_children(self, index: int) -> set[str]:
        """Return the children of a held pod: a launcher on standby, and its server."""
        pid = self.pods[index].running[index].pid
        self.pods[index].until(lambda: len(list_children(pid)) == 2, "a launcher on standby and its server remain")
        return list_children(pid)

    def log(self, index: int) -> str:
        """Return the log of a pod."""
        return self.pods[index].log(index)

    def stop(self) -> None:
        """End all pods; pod 0 last, whose folder for temporary files all of them use."""
        for pod in reversed(self.pods):
            pod.stop()

    def replace(self, index: int) -> None:
        """Kill a pod and start its successor, as a Job does."""
        pod = self.pods[index]
        pod.signal(index, signal.SIGKILL)
        pod.running[index].wait(60)
        (pod.folder / f"port-{index}").unlink(missing_ok=True)
        for former in pod.temporary.glob("ddp-*") if index == 0 else ():
            if (former / "orders.sock").exists():
                shutil.rmtree(former)
        pod.start(index)

    def log_since(self, index: int, text: str) -> str:
        """Return what a pod has written after the last appearance of a text."""
        return self.log(index).rpartition(text)[2]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., DevPods]]:
    """Return a function that starts pods, whose first run ends at once."""
    started: list[DevPods] = []

    def create(nodes: int = 2, part: str = RETURNS, files: Mapping[str, str] = {}, **options: Any) -> DevPods:
        started.append(DevPods(tmp_path, nodes, files={"part.py": named("one", part), **files}, **options))
        return started[-1]

    yield create
    for pods in started:
        pods.stop()


def named(name: str, body: str = RETURNS) -> str:
    """Return the module of a run with a name."""
    return f"NAME = {name!r}\n{body}"


def test_edited_code_runs_in_the_same_pods(start: Callable[..., DevPods], tmp_path: Path) -> None:
    job = start(files={"old.py": ""})
    job.until_held()
    assert "run of one with [], world 2" in job.log(0) + job.log(1)

    events = job.run({"part.py": named("two")}, replaces_arguments=True, arguments=("--lr", "1"))
    assert [event.kind for event in events] == ["received", "sent", "stopped", "started", "ended"]
    assert (events[-1].run, events[-1].result) == (2, "Succeeded")
    for index in (0, 1):
        assert "run of two with ['--lr', '1'], world 2" in job.log(index)
        assert not (tmp_path / f"code-{index}/old.py").exists(), "the new folder has no such file"
    dev = job.report()["dev"]
    assert (dev["run"], dev["result"]) == (2, "Succeeded")

    released = list(job.order("release"))
    assert [event.kind for event in released] == ["stopped", "released"]
    assert [job.pods[index].wait(index).code for index in (0, 1)] == [0, 0]


FAULTS = {
    "exception": ("def train(): raise KeyError('x')\n", "KeyError"),
    "import": ("import nothing_of_this_name\n", "ModuleNotFoundError"),
    "syntax": ("def train(:\n", "SyntaxError"),
    "exit code": ("import os\ndef train(): os._exit(7)\n", "7"),
    "killed": ("import os, signal\ndef train(): os.kill(os.getpid(), signal.SIGKILL)\n", "SIGKILL"),
    "one rank": (
        "import os, torch.distributed as dist\ndef train():\n    assert os.environ['RANK'] != '1', 'only 1'\n"
        "    dist.barrier()\n",
        "only 1",
    ),
}


def test_failed_runs_leave_pods_held_with_the_cause_and_good_runs_follow(start: Callable[..., DevPods]) -> None:
    job = start()
    job.until_held()
    first = list(map(job.wait_for_children, range(2)))
    for name, (body, cause) in FAULTS.items():
        failed = job.run({"part.py": named(name, body)})[-1]
        assert failed.result == "Failed", name
        assert failed.failure is not None
        assert cause in failed.failure.message, name
        good = job.run({"part.py": named(f"after {name}")})[-1]
        assert (good.result, good.run) == ("Succeeded", failed.run + 1)
        assert f"run of after {name} with [], world 2" in job.log(1)
    again = job.run()[-1]
    assert (again.result, again.run) == ("Succeeded", good.run + 1), "the same code once more"
    former = [event.report.dev for event in job.order("list") if event.report is not None]
    assert [(run.run, run.result) for run in former if run is not None][-2:] == [
        (failed.run, "Failed"),
        (good.run, "Succeeded"),
    ]
    assert any(run is not None and run.failure is not None and cause in run.failure.message for run in former)

    for index, children in enumerate(map(job.wait_for_children, range(2))):
        assert len(children & first[index]) == 1, "all launchers were forked from one server"

    kept = [path.name for path in job.pods[0].temporary.glob("ddp-*/*-*")]
    assert len(kept) <= 6, "at most two archives and the folder of the launcher on standby, of each pod"


def list_children(pid: int) -> set[str]:
    """Return the children of a process."""
    return {*Path(f"/proc/{pid}/task/{pid}/children").read_text().split()}


def test_job_ends_as_its_last_run(start: Callable[..., DevPods]) -> None:
    job = start(part="def train(): raise KeyError('x')\n")
    job.until_held()
    assert [event.kind for event in job.order("release")] == ["stopped", "released"]
    ends = [job.pods[index].wait(index) for index in (0, 1)]
    assert [end.code for end in ends] == [81, 81], "the operator does not restart a pod with this code"
    assert "KeyError" in ends[0].message["message"]


def test_order_replaces_the_present_run_or_stops_it(start: Callable[..., DevPods]) -> None:
    job = start(part=WAITS)
    job.pods[0].until_logged(0, "run of one")
    first = job.order("run", {"part.py": named("two", WAITS)})
    assert next(event for event in first if event.kind == "started").run == 2
    second = job.run({"part.py": named("after two")})[-1]
    assert (second.run, second.result) == (3, "Succeeded")
    end = list(first)[-1]
    assert (end.run, end.result, end.message) == (2, "Stopped", REPLACED)
    assert "one is done" not in job.log(0)

    ignores = (
        "import signal, time\ndef train():\n    signal.signal(signal.SIGTERM, signal.SIG_IGN)\n    time.sleep(600)\n"
    )
    third = job.order("run", {"part.py": named("three", ignores)}, run=30)
    assert next(event for event in third if event.kind == "started").run == 30
    job.pods[0].until_logged(0, "run of three")
    refused = []

    def send_second_order() -> None:
        job.pods[0].until(lambda: "SIGTERM: stopping" in job.log_since(0, "run 30 starts"), "the stop has begun")
        refused.extend(job.run({"part.py": named("five")}))

    sender = threading.Thread(target=send_second_order)
    sender.start()
    stopped = list(job.order("stop"))
    sender.join()
    assert [event.kind for event in stopped] == ["stopped", "ended"]
    assert stopped[-1].result == "Stopped"
    assert [event.kind for event in refused] == ["refused"]
    assert "run of five" not in job.log(0)
    assert job.report()["dev"]["result"] == "Stopped"


def test_broken_transfer_changes_nothing(start: Callable[..., DevPods]) -> None:
    job = start(part=WAITS)
    job.pods[0].until_logged(0, "run of one")
    archive, digest = pack({"train.py": TRAIN, "part.py": named("two")})
    cases = {"cut short": (archive[:-40], digest, len(archive)), "another digest": (archive, "0" * 64, len(archive))}
    for sent, announced, size in cases.values():
        with job.open_order(Order("run", digest=announced, size=size)) as program:
            output, _ = program.communicate(sent, timeout=60)
        assert b"started" not in output
    job.pods[0].until(lambda: "two" not in os.listdir(job.pods[0].folder), "nothing is unpacked")
    good = list(job.order("stop"))
    assert good[-1].run == 1, "the first run went on"


@pytest.mark.parametrize("index", [0, 1])
def test_replaced_pod_gets_the_newest_code(start: Callable[..., DevPods], index: int) -> None:
    job = start(max_restarts=3, config={"restarts_without_progress": 1})
    job.until_held()
    assert job.run({"part.py": named("two")})[-1].result == "Succeeded"
    job.replace(index)
    job.pods[0].until(lambda: job.report().get("dev", {}).get("run") == 2, "pod 0 knows the run")
    job.pods[0].until(lambda: job.run()[-1].run == 3, "run again")
    for pod in (0, 1):
        assert "run of two with [], world 2" in job.log_since(pod, "run 3 starts")

    waits = job.order("run", {"part.py": named("four", WAITS)})
    assert next(event for event in waits if event.kind == "started").run == 4
    job.pods[1].until_logged(1, "run of four")
    job.replace(index)
    job.pods[index].until(lambda: job.log(index).count("run of four with [], world 2") == 2, "the new pod takes part")
    assert "run of one" not in job.log_since(index, "run 4 starts")
    assert list(job.order("stop"))[-1].run == 4


def test_new_attempt_waits_for_code_instead_of_running_the_old_one(start: Callable[..., DevPods]) -> None:
    job = start(runs=5)
    job.pods[0].until(lambda: job.report()["phase"] == "Held", "held")
    assert "run of one" not in job.log(0)
    end = job.run({"part.py": named("six")}, run=6)[-1]
    assert (end.run, end.result) == (6, "Succeeded")


def test_pods_end_by_themselves_when_nobody_uses_them(start: Callable[..., DevPods]) -> None:
    job = start(hold_seconds=3.0)
    assert [job.pods[index].wait(index).code for index in (0, 1)] == [0, 0]
    assert "no run for spec.dev.holdSeconds" in job.log(0)


def test_signals_end_a_held_pod_and_one_that_trains(start: Callable[..., DevPods]) -> None:
    job = start()
    job.until_held()
    job.pods[1].signal(1, signal.SIGTERM)
    end = job.pods[1].wait(1)
    assert (end.code, end.message["category"]) == (85, "Preempted")


def test_one_pod_with_several_ranks(start: Callable[..., DevPods]) -> None:
    with HeldPort() as port:
        number = port.number
    job = start(1, nproc=2, metrics_port=number)
    job.until_held()
    assert job.pods[0].metrics_port() == number
    assert job.run({"part.py": named("two")})[-1].result == "Succeeded"
    assert job.log(0).count("run of two with [], world 2") == 2
    assert "cannot listen" not in job.log(0), "the runs leave the pod's port to the holder"


def test_outsider_is_not_obeyed(start: Callable[..., DevPods]) -> None:
    job = start()
    job.until_held()
    with socket.create_connection((loopback_address(1), job.pods[0].port)) as outsider:
        outsider.sendall(bytes(16) + struct.pack("!II", 20, 0) + bytes(32) + b'{"kind": "release"}')
        assert outsider.recv(16), "a random number"
        assert outsider.recv(1) == b"", "and the end"
    assert job.run({"part.py": named("two")})[-1].result == "Succeeded"


def test_packages_of_edited_requirements_are_installed(
    start: Callable[..., DevPods], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    shows = "import ddp_tiny\nNAME = f'tiny {ddp_tiny.VERSION}'\n" + RETURNS
    wheels = {}
    for version in ("1.5", "2.0"):
        wheels[version] = {"requirements.txt": f"{tmp_path}/ddp_tiny-{version}-py3-none-any.whl\n"}
        make_wheel(tmp_path / f"ddp_tiny-{version}-py3-none-any.whl", "ddp_tiny", version)
    job = start(1, files={"part.py": shows, **wheels["1.5"]}, requirements="requirements.txt")
    job.until_held()
    assert "run of tiny 1.5" in job.log(0)
    assert job.run({"part.py": shows, **wheels["2.0"]})[-1].result == "Succeeded"
    assert job.run({"part.py": shows + "\n", **wheels["2.0"]})[-1].result == "Succeeded"
    assert job.log(0).count("run of tiny 2.0") == 2
    assert job.log(0).count("pip install -r") == 2


def test_pod_0_lost_in_the_middle_of_a_transfer_leaves_the_former_run(start: Callable[..., DevPods]) -> None:
    job = start()
    job.until_held()
    assert job.run({"part.py": named("two")})[-1].result == "Succeeded"
    content = random.Random(1).randbytes(20 << 20).hex()
    events = job.order("run", {"part.py": named("three"), "data.txt": content})
    assert next(events).kind == "received"
    job.replace(0)
    assert "ended" not in [event.kind for event in events]
    job.pods[0].until(lambda: job.report().get("dev", {}).get("run") == 2, "the new pod 0 takes the run of pod 1")
    assert job.run()[-1].result == "Succeeded"
    for index in (0, 1):
        assert "run of two with [], world 2" in job.log_since(index, "run 3 starts")


def list_pods_in_run(job: DevPods, run: int) -> list[int]:
    """Return the pods in which a run has started."""
    return [index for index in range(len(job.pods)) if f"run {run} starts" in job.log(index)]


def test_spare_starts_a_run_only_when_it_is_needed(start: Callable[..., DevPods], tmp_path: Path) -> None:
    job = start(spares=3, max_restarts=3, config={"restarts_without_progress": 1})
    job.until_held()
    over = tmp_path / "over"
    waits = f"while not os.path.exists({str(over)!r}): time.sleep(0.1)"
    files = {"part.py": f"import os, time\nNAME = 'two'\ndef train():\n    {waits}\n"}
    events = job.order("run", files)
    assert next(event for event in events if event.kind == "started").pods == 3
    job.pods[0].until(lambda: "run of two" in job.log(1), "the run trains in pods 0 and 1")
    assert list_pods_in_run(job, 2) == [0, 1, 2]

    job.pods[1].signal(1, signal.SIGKILL)
    job.pods[0].until(lambda: "run of two with [], world 2" in job.log(2), "the first spare takes the place")
    job.pods[0].until(lambda: list_pods_in_run(job, 2) == [0, 1, 2, 3], "another one comes to the rendezvous")
    job.pods[2].signal(2, signal.SIGKILL)
    job.pods[0].until(lambda: "run of two with [], world 2" in job.log(3), "that one takes the place, too")
    over.touch()
    assert [event.result for event in events if event.kind == "ended"] == ["Succeeded"]
    assert [event.kind for event in job.order("release")] == ["stopped", "released"]
    assert [job.pods[index].wait(index).code for index in (0, 3, 4)] == [0, 0, 0]


def test_new_pod_0_takes_the_run_of_those_that_train(start: Callable[..., DevPods]) -> None:
    job = start(spares=2, max_restarts=3, config={"restarts_without_progress": 1})
    job.until_held()
    assert job.run({"part.py": named("two")})[-1].result == "Succeeded"
    job.replace(0)
    job.pods[0].until(lambda: job.report().get("dev", {}).get("run") == 2, "the new pod 0 takes the run of its peers")
    assert job.run()[-1].result == "Succeeded"
    assert "run of two with [], world 2" in job.log_since(0, "run 3 starts")


@pytest.mark.parametrize("options", [{"spares": 1}, {"elastic": (1, 2)}], ids=["spare", "elastic"])
def test_job_with_pods_that_may_join_later(start: Callable[..., DevPods], options: dict[str, Any]) -> None:
    job = start(max_restarts=3, config={"restarts_without_progress": 1}, **options)
    job.until_held()
    for number in (2, 3):
        end = job.run({"part.py": named(f"r{number}")})[-1]
        assert (end.run, end.result) == (number, "Succeeded")
        worlds = [job.log(index).count(f"run of r{number} with [], world 2") for index in range(len(job.pods))]
        assert sum(worlds) == 2
    assert [event.kind for event in job.order("release")] == ["stopped", "released"]
    assert [pod.wait(index).code for index, pod in enumerate(job.pods)] == [0] * len(job.pods)

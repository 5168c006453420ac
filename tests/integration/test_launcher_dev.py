"""Pods of `ddp dev`: real holders, launchers and ranks; orders by the program that `ddp rerun` starts in pod 0."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import subprocess
import tarfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from ddp_pod.contract.dev_order import Event, Order, decode_event, encode_order
from ddp_pod.contract.plan import CodeConfig, DevConfig
from tests.support.launcher_folder import delivered_launcher
from tests.support.launcher_pods import LauncherPods
from tests.support.pod_python import POD_PYTHON

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
    """The pods of a job, each with its own folder for the code."""

    def __init__(self, folder: Path, nodes: int, *, hold_seconds: float = 600.0, files: Mapping[str, str]) -> None:
        archive, digest = pack({"train.py": TRAIN, **files})
        (folder / "code.tar.gz").write_bytes(archive)
        self.pods: list[LauncherPods] = []
        for index in range(nodes):
            code = CodeConfig(
                str(folder / "code.tar.gz"),
                digest,
                str(folder / f"code-{index}"),
                None,
                str(folder / f"packages-{index}"),
            )
            config = {"dev": DevConfig(hold_seconds), "code": code}
            (folder / f"code-{index}").mkdir()
            self.pods.append(LauncherPods(folder / f"code-{index}", ["train.py"], nodes, config=config, warm=False))
            self.pods[index].env = {"TMPDIR": str(self.pods[0].temporary), "MASTER_PORT": str(self.pods[0].port)}
            self.pods[index].start(index)

    def order(self, kind: str, files: Mapping[str, str] | None = None, **values: Any) -> Iterator[Event]:
        """Send an order, and yield its events."""
        archive, digest = pack({"train.py": TRAIN, **files}) if files is not None else (b"", "")
        with subprocess.Popen(
            [POD_PYTHON, str(delivered_launcher()), "order"],
            env={**os.environ, "TMPDIR": str(self.pods[0].temporary)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        ) as program:
            assert program.stdin is not None
            assert program.stdout is not None
            program.stdin.write(encode_order(Order(kind, digest=digest, size=len(archive), **values)) + archive)
            program.stdin.flush()
            try:
                yield from map(decode_event, program.stdout)
            finally:
                program.kill()

    def run(self, files: Mapping[str, str] | None = None, **values: Any) -> list[Event]:
        """Start another run, and return all events until its end."""
        return list(self.order("run", files, **values))

    def report(self, index: int = 0) -> dict[str, Any]:
        """Return a pod's report."""
        return dict(json.loads(self.pods[index].page(index, "report")))

    def until_held(self) -> None:
        """Wait until no run is under way."""
        self.pods[0].until(lambda: self.report()["phase"] == "Held" and self.report()["dev"].get("result"), "held")

    def log(self, index: int) -> str:
        """Return the log of a pod."""
        return self.pods[index].log(index)

    def stop(self) -> None:
        """End all pods."""
        for pod in self.pods:
            pod.stop()


@pytest.fixture
def job(tmp_path: Path) -> Iterator[DevPods]:
    pods = DevPods(tmp_path, 2, files={"part.py": "NAME = 'one'\n" + RETURNS, "old.py": ""})
    yield pods
    pods.stop()


def test_edited_code_runs_in_the_same_pods(job: DevPods, tmp_path: Path) -> None:
    job.until_held()
    assert "run of one with [], world 2" in job.log(0) + job.log(1)

    events = job.run({"part.py": "NAME = 'two'\n" + RETURNS}, replaces_arguments=True, arguments=("--lr", "1"))
    print([(event.kind, event.seconds) for event in events])
    assert [event.kind for event in events] == ["received", "sent", "stopped", "started", "ended"]
    assert events[-1].result == "Succeeded"
    assert events[-1].run == 2
    for index in (0, 1):
        assert "run of two with ['--lr', '1'], world 2" in job.log(index)
        assert not (tmp_path / f"code-{index}/old.py").exists()
    dev = job.report()["dev"]
    assert (dev["run"], dev["result"]) == (2, "Succeeded")

    failed = job.run({"part.py": "NAME = 'three'\ndef train(): raise KeyError('x')\n"})
    assert failed[-1].result == "Failed"
    assert failed[-1].failure is not None
    assert "KeyError" in failed[-1].failure.message

    again = job.run()
    assert (again[-1].run, again[-1].result) == (4, "Failed"), "the same code again"
    broken = job.run({"part.py": "NAME = "})
    assert broken[-1].result == "Failed"
    good = job.run({"part.py": "NAME = 'six'\n" + RETURNS})
    assert good[-1].result == "Succeeded"
    released = list(job.order("release"))
    assert [event.kind for event in released] == ["stopped", "released"]
    assert [job.pods[index].wait(index).code for index in (0, 1)] == [0, 0]


def test_order_replaces_a_run_that_is_under_way(job: DevPods) -> None:
    job.until_held()
    waiting = job.order("run", {"part.py": "NAME = 'two'\n" + WAITS})
    while next(waiting).kind != "started":
        pass
    job.pods[1].until_logged(1, "run of two")
    second = job.run({"part.py": "NAME = 'three'\n" + RETURNS})
    assert second[-1].result == "Succeeded"
    assert "run of three" in job.log(1)
    assert "two is done" not in job.log(0)

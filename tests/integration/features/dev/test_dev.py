"""`ddp dev`, `rerun` and `release` on this machine: edited code runs in the same pods, whatever the run before did."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import PATIENCE
from tests.support.ddp_run import manifest

pytestmark = pytest.mark.process

SCRIPT = """
import hashlib, os, pathlib, signal, sys, time
digest = hashlib.sha256(pathlib.Path(__file__).read_bytes()).hexdigest()
print("code", digest, sys.argv[1:], flush=True)
"""
HANGS = SCRIPT + "time.sleep(600)\n"
STOPS_LATE = f"""{SCRIPT}
signal.signal(signal.SIGTERM, lambda *_: print("stops", flush=True) or time.sleep(8) or sys.exit())
time.sleep(600)
"""


class Command:
    """A running `ddp` with its output."""

    def __init__(self, folder: Path, *words: str) -> None:
        self._output = folder.parent / f"output-{time.monotonic_ns()}"
        code = "import sys; from ddp_cli.__main__ import main; sys.exit(main())"
        with self._output.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-c", code, *words],
                cwd=folder,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    @property
    def output(self) -> str:
        return self._output.read_text()

    def until(self, text: str, count: int = 1) -> None:
        deadline = time.monotonic() + PATIENCE
        while self.output.count(text) < count:
            assert time.monotonic() < deadline, f"{text} is missing:\n{self.output}"
            assert self.process.poll() is None or self.output.count(text) >= count, f"ended early:\n{self.output}"
            time.sleep(0.05)

    def wait(self) -> int:
        return self.process.wait(PATIENCE)


class Job:
    """A job of two pods, and its folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.commands: list[Command] = []
        (folder / "job.yaml").write_text(manifest(["python3", "train.py"], code={"mountPath": "/workspace"}))
        self.digest = self.save(SCRIPT)
        self.dev = self.start("dev", "job.yaml", "--workdir", ".", "--local")

    def save(self, script: str) -> str:
        (self.folder / "train.py").write_text(script)
        self.digest = hashlib.sha256(script.encode()).hexdigest()
        return self.digest

    def start(self, *words: str) -> Command:
        self.commands.append(Command(self.folder, *words))
        return self.commands[-1]

    def rerun(self, *words: str) -> Command:
        return self.start("rerun", "--local", *words)

    def close(self) -> None:
        for command in self.commands:
            command.process.kill()
            command.process.wait()


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    folder = tmp_path / "project"
    folder.mkdir()
    job = Job(folder)
    yield job
    job.close()


def test_each_saved_file_is_run_in_the_same_pods(job: Job) -> None:
    job.dev.until(f"code {job.digest}", 2)
    job.dev.until("run 1 has ended", 3)
    watch = job.rerun("--watch", "--", "--lr", "1")
    watch.until("waiting for a saved file", 1)
    assert watch.output.count(f"code {job.digest} ['--lr', '1']") == 2
    for number, (script, outcome) in enumerate(
        (
            (SCRIPT + "# two\n", "run 3 succeeded"),
            (SCRIPT + "raise KeyError('x')\n", "run 4 failed"),
            ("def (\n", "SyntaxError"),
            (SCRIPT + "# five\n", "run 6 succeeded"),
        ),
        start=2,
    ):
        digest = job.save(script)
        watch.until("waiting for a saved file", number)
        assert outcome in watch.output
        assert watch.output.count(f"code {digest}") == (0 if outcome == "SyntaxError" else 2)

    hanging = job.save(HANGS)
    watch.until(f"code {hanging}", 2)
    digest = job.save(SCRIPT + "# after a hang\n")
    watch.until(f"code {digest}", 2)
    watch.until("run 8 succeeded")
    hanging = job.save(HANGS + "# again\n")
    watch.until(f"code {hanging}", 2)
    watch.process.send_signal(signal.SIGINT)
    assert watch.wait() == 130
    assert "run 9 was stopped" in watch.output

    job.save(SCRIPT)
    assert job.rerun().wait() == 0
    assert job.start("release", "--local").wait() == 0
    assert job.dev.wait() == 0


def test_second_order_is_refused_while_first_is_carried_out(job: Job) -> None:
    job.dev.until("run 1 has ended", 3)
    job.save(STOPS_LATE)
    first = job.rerun()
    first.until(f"code {job.digest}", 2)
    job.save(SCRIPT + "# second\n")
    second = job.rerun()
    job.dev.until("stops")
    third = job.rerun()
    assert third.wait() == 1
    assert "another order" in third.output
    assert second.wait() == 0, second.output
    assert f"code {job.digest}" in second.output
    assert first.wait() == 130, "a run that another replaces is stopped"

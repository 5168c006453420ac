"""`ddp run` as a process, with its output and its run folder."""

from __future__ import annotations

import csv
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import yaml

from ddp_operator.api.constants import ENV_LOCAL_POD
from tests.support import PATIENCE


def manifest(command: Sequence[str], *, nodes: int = 2, env: Mapping[str, str] | None = None, **spec: Any) -> str:
    """Return the YAML of a job whose pods run this command."""
    container = {
        "name": "trainer",
        "image": "example/torch",
        "command": list(command),
        "env": [{"name": name, "value": value} for name, value in (env or {}).items()],
    }
    # Nearly none of these commands imports PyTorch, which a fork server would import for them.
    recovery = {"inPlaceRestarts": 0, "maxRestarts": 1, "warmStart": "Off"}
    body = {"nodes": nodes, "recovery": recovery, "template": {"spec": {"containers": [container]}}, **spec}
    head = {"apiVersion": "ddp-operator.dev/v1alpha1", "kind": "DDPTrainingJob", "metadata": {"name": "toy"}}
    return yaml.safe_dump({**head, "spec": body})


@dataclass
class DdpRun:
    """One `ddp run` in a separate folder. Its remaining processes are killed when the block ends."""

    folder: Path
    text: str
    options: Sequence[str] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    python: str = sys.executable
    program: str = ""
    """A script in place of the `ddp` command."""

    def __enter__(self) -> DdpRun:
        (self.folder / "job.yaml").write_text(self.text)
        self.output_file = self.folder / "output.txt"
        code = "import sys; from ddp_cli.__main__ import main; sys.exit(main())"
        with self.output_file.open("wb") as output:
            self.process = subprocess.Popen(
                [self.python, *([self.program] if self.program else ["-c", code]), "run", "job.yaml", *self.options],
                cwd=self.folder,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)} | dict(self.env),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        marks = self.marks()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for pid in find_pods(marks):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    @property
    def output(self) -> str:
        """Everything it has printed so far."""
        return self.output_file.read_text()

    @property
    def run_folder(self) -> Path:
        """Its run folder."""
        (result,) = (path for path in (self.folder / "ddp-runs").iterdir() if path.name not in ("claims", ".gitignore"))
        return result

    def read_status(self) -> dict[str, Any]:
        """Return the status in status.yaml."""
        document: dict[str, Any] = yaml.safe_load((self.run_folder / "status.yaml").read_text())
        return dict(document["status"])

    def read_rows(self) -> list[dict[str, str]]:
        """Return the rows of metrics.csv."""
        with (self.run_folder / "metrics.csv").open(newline="") as stream:
            return list(csv.DictReader(stream))

    def until(self, probe: Callable[[], Any], event: str) -> Any:
        """Wait until ``probe()`` is true while the run continues; return its result."""
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            ended = self.process.poll() is not None  # read first: the event and the end may follow
            if result := probe():
                return result
            assert not ended, f"ended before {event}:\n{self.output}"
            time.sleep(0.05)
        raise AssertionError(f"never happened: {event}\n{self.output}")

    def wait(self) -> int:
        """Wait for the end; return the exit code."""
        try:
            return self.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"did not end:\n{self.output}") from None

    def marks(self) -> set[str]:
        """Return the UIDs that identify the processes of its pods."""
        results = set()
        for pid in children_of(self.process.pid):
            if mark := read_environment(pid).get(ENV_LOCAL_POD):
                results.add(mark)
        return results


def children_of(pid: int) -> list[int]:
    """Return the direct children of a process."""
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def read_environment(pid: int) -> dict[str, str]:
    """Return the environment with which a process was started; empty if the process has ended."""
    try:
        raw = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return {}
    pairs = (entry.partition(b"=") for entry in raw.split(b"\0") if entry)
    return {name.decode(): value.decode("utf-8", "replace") for name, _, value in pairs}


def find_pods(marks: set[str]) -> list[int]:
    """Return every process that belongs to one of these pods. A zombie has no environment and does not count."""
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    return [pid for pid in pids if read_environment(pid).get(ENV_LOCAL_POD) in marks]

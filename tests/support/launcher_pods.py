"""Pods on this machine for the launcher's tests: real launchers, torchrun agents and workers, each in a log file."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ddp_operator.manifests.torchrun import split_user_command
from tests.support.launcher_config import encoded_config
from tests.support.launcher_folder import delivered_launcher
from tests.support.pod_python import IS_OTHER_PYTHON, POD_PYTHON
from tests.support.ports import HeldPort
from tests.support.warm import WarmProcess

TIMEOUT = 150  # a generous limit: other work on the machine makes everything many times slower


@dataclass
class PodEnd:
    """How a pod ended."""

    code: int
    message: dict[str, Any]
    log: str


@dataclass
class LauncherPods:
    """The pods of one job. ``stop`` ends the remaining processes."""

    folder: Path
    command: Sequence[str]
    nodes: int = 2
    nproc: int = 1
    backend: str = "c10d"
    max_restarts: int = 0
    elastic: tuple[int, int] | None = None
    spares: int = 0
    env: Mapping[str, str] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    """Changes of the default launcher configuration."""
    pass_fds: Sequence[int] = ()
    python: str = POD_PYTHON
    launcher: Path | None = None
    """The program that a pod starts, if it is another one than usual; such pods need ``warm=False``."""
    warm: bool = not IS_OTHER_PYTHON
    """Whether the launcher starts with torch imported already; tests of a fresh interpreter need False."""

    def __post_init__(self) -> None:
        # Short: a DataLoader puts sockets there, whose whole path must be shorter than 108 characters, or it hangs.
        self._temporary = tempfile.TemporaryDirectory(prefix="pods-")
        self.temporary = Path(self._temporary.name)
        self._held = HeldPort()
        self.port = self._held.number
        self.running: dict[int, subprocess.Popen[bytes] | WarmProcess] = {}

    def start(self, *indices: int) -> None:
        """Start pods, by default all of them."""
        command = split_user_command(self.command, [])
        for index in indices or range(self.nodes + self.spares):
            least, most = self.elastic or (0, 0)
            config: dict[str, Any] = {
                "nodes": self.nodes,
                "spares": self.spares,
                "nproc_per_node": self.nproc,
                "elastic": self.elastic is not None,
                "min_nodes": least,
                "max_nodes": most,
                "rendezvous_backend": self.backend,
                "pod_host": "job-1-{}.job",
                "program": command.program,
                "torchrun": command.options,
                "in_place_restarts": self.max_restarts,
                "join_timeout_seconds": TIMEOUT,
                "non_retryable_exit_codes": (2, 126, 127),
                **self.config,
            }
            env = {
                **os.environ,
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(self.port),
                "DDP_RUN_ID": "run-1",
                "DDP_RENDEZVOUS_SECRET": "of these pods",
                "OMP_NUM_THREADS": "1",
                "TMPDIR": str(self.temporary),
                "JOB_COMPLETION_INDEX": str(index),
                **encoded_config(**config),
                "DDP_GRACE_SECONDS": str(TIMEOUT),
                "DDP_METRICS_PORT": "0",
                "DDP_PORT_FILE": str(self.folder / f"port-{index}"),
                "DDP_TERMINATION_LOG": str(self.folder / f"termination-{index}"),
                **self.env,
            }
            argv = [str(self.launcher or delivered_launcher()), "run", "--", *command.argv]
            output = self.folder / f"log-{index}"
            if self.warm and not self.pass_fds:
                self.running[index] = WarmProcess(argv, output=output, folder=self.folder, environ=env)
                continue
            with open(output, "ab") as log:
                self.running[index] = subprocess.Popen(
                    [self.python, *argv],
                    env=env,
                    cwd=self.folder,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                    pass_fds=self.pass_fds,
                )

    def metrics_port(self, index: int = 0) -> int:
        """Wait until the pod serves its metrics, and return the port."""
        file = self.folder / f"port-{index}"
        return int(self.until(lambda: file.exists() and json.loads(file.read_text()), f"pod {index} serves metrics"))

    def page(self, index: int = 0, path: str = "metrics") -> str:
        """Return the present page of the pod."""
        address = f"http://127.0.0.1:{self.metrics_port(index)}/{path}"
        with urllib.request.urlopen(address, timeout=TIMEOUT) as answer:
            assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
            return str(answer.read().decode())

    def log(self, index: int) -> str:
        """Return the output of the pod so far."""
        return (self.folder / f"log-{index}").read_text(errors="replace")

    def wait(self, index: int) -> PodEnd:
        """Wait for one pod's end."""
        try:
            code = self.running[index].wait(TIMEOUT)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"pod {index} does not end:\n{self.log(index)}") from None
        path = self.folder / f"termination-{index}"
        return PodEnd(code, json.loads(path.read_bytes()) if path.exists() else {}, self.log(index))

    def run(self) -> list[PodEnd]:
        """Start all pods and wait for all of them."""
        self.start()
        return [self.wait(index) for index in range(self.nodes)]

    def until(self, condition: Callable[[], object], event: str) -> Any:
        """Poll until the condition holds, and return its value."""
        deadline = time.monotonic() + TIMEOUT
        while not (value := condition()):
            logs = "\n".join(self.log(index) for index in self.running)
            assert time.monotonic() < deadline, f"never: {event}\n{logs}"
            time.sleep(0.02)
        return value

    def until_logged(self, index: int, text: str) -> None:
        """Wait until the pod has written a text."""
        self.until(lambda: text in self.log(index), f"pod {index} says {text!r}")

    def signal(self, index: int, number: int) -> None:
        """Send a signal to the launcher alone."""
        self.running[index].send_signal(number)

    def stop(self) -> None:
        """End the remaining processes."""
        for pod in self.running.values():
            if pod.poll() is None:
                pod.send_signal(signal.SIGKILL)
            pod.wait()
        self._held.stop()
        self._temporary.cleanup()


PodsFactory = Callable[..., LauncherPods]


@contextmanager
def launch_pods(folder: Path, default_script: str = "") -> Iterator[PodsFactory]:
    """Yield a function that returns the pods of a command, with ``script`` as train.py; stop all pods at the end.

    Keywords other than ``script`` are fields of LauncherPods. An empty script is not written.
    """
    jobs: list[LauncherPods] = []

    def create(*command: str, script: str = default_script, **options: object) -> LauncherPods:
        if script:
            (folder / "train.py").write_text(script)
        jobs.append(LauncherPods(folder, command, **options))  # type: ignore[arg-type]
        return jobs[-1]

    try:
        yield create
    finally:
        for job in jobs:
            job.stop()

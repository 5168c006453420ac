"""The operator in a separate process, as users start it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

from tests.support import PATIENCE, ROOT
from tests.support.stoppable import Stoppable
from tests.support.warm import WarmProcess

MODULE = (sys.executable, "-m", "ddp_operator")


class OperatorProcess(Stoppable):
    """Starts on entering and is ready then; ends on leaving, by SIGTERM.

    ``warm``: with its imports done already; tests of a fresh interpreter need False.
    """

    def __init__(
        self,
        kubeconfig: Path,
        log: Path,
        *,
        port: int,
        command: Sequence[str] = MODULE,
        env: Mapping[str, str] = {},
        warm: bool = False,
    ) -> None:
        self._command = command
        self._log = log
        self._port = port
        self._env = os.environ | {"KUBECONFIG": str(kubeconfig), "DDP_OPERATOR_HEALTH_PORT": str(port)} | dict(env)
        self._warm = warm
        self.process: subprocess.Popen[bytes] | WarmProcess | None = None

    @property
    def url(self) -> str:
        """The address of health and metrics."""
        return f"http://127.0.0.1:{self._port}"

    @property
    def log(self) -> str:
        """Its log so far."""
        return self._log.read_text(errors="replace")

    def __enter__(self) -> OperatorProcess:
        if self._warm:
            self.process = WarmProcess(self._command, output=self._log, folder=ROOT, environ=self._env)
        else:
            with self._log.open("ab") as log:
                self.process = subprocess.Popen(self._command, stdout=log, stderr=log, env=self._env)
        try:
            self._wait()
        except BaseException:
            self.process.kill()
            self.process.wait()
            raise
        return self

    def kill(self) -> None:
        """Kill it, as in a crash."""
        process = self.process
        self.process = None
        assert process is not None
        process.kill()
        process.wait()

    def stop(self) -> None:
        """End it by SIGTERM. A second call does no harm."""
        process = self.process
        self.process = None
        if process is None:
            return
        process.send_signal(signal.SIGTERM)
        try:
            code = process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise AssertionError(f"the operator did not stop:\n{self.log}") from None
        if code != 0:
            raise AssertionError(f"the operator ended with exit code {code}:\n{self.log}")

    def _wait(self) -> None:
        assert self.process is not None
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise AssertionError(f"the operator ended with exit code {self.process.poll()}:\n{self.log}")
            try:
                with urlopen(f"http://127.0.0.1:{self._port}/readyz", timeout=5):
                    return
            except (URLError, OSError):
                time.sleep(0.05)
        raise AssertionError(f"the operator did not become ready:\n{self.log}")

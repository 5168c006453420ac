"""Processes forked from a server that has imported torch and Kopf once, for tests that start many."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from multiprocessing import forkserver
from pathlib import Path

CONTEXT = multiprocessing.get_context("forkserver")
# All tests of a worker share one server.
CONTEXT.set_forkserver_preload(["tests.support.warm_imports"])
# Text, because the server would have to import a function by name.
_PROGRAM = """
import os, runpy, sys
os.setsid()
out = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
os.dup2(out, 1)
os.dup2(out, 2)
os.chdir(folder)
os.environ.clear()
os.environ.update(environ)
sys.argv[:] = argv
if argv[0].endswith("launcher.py"):
    from tests.support.warm_launcher import fork_server
    os.posix_spawn = fork_server
if argv[0] == "-m":
    del sys.argv[0]
    runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
else:
    runpy.run_path(argv[0], run_name="__main__")
"""


def start_server() -> None:
    """Start the server, unless it runs. It reads torch's log level once, as the launcher's own agent sets it."""
    before = os.environ.get("TORCH_CPP_LOG_LEVEL")
    os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"
    try:
        forkserver.ensure_running()
    finally:
        if before is None:
            del os.environ["TORCH_CPP_LOG_LEVEL"]
        else:
            os.environ["TORCH_CPP_LOG_LEVEL"] = before


class WarmProcess:
    """A process for ``python argv``, in its own session, with the methods of ``Popen`` that tests use."""

    def __init__(self, argv: Sequence[str], *, output: Path, folder: Path, environ: Mapping[str, str]) -> None:
        start_server()
        output.touch()
        argv = argv[1:] if argv[0] == sys.executable else argv
        names = {"argv": list(argv), "output": str(output), "folder": str(folder), "environ": dict(environ)}
        self._process = CONTEXT.Process(target=exec, args=(_PROGRAM, names))
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        """Return the exit code, a signal's as a negative number; None while it runs."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end. Raises: subprocess.TimeoutExpired."""
        self._process.join(timeout)
        code = self._process.exitcode
        if code is None:
            raise subprocess.TimeoutExpired(["warm"], timeout or 0.0)
        return code

    def kill(self) -> None:
        """Kill it, unless it has ended."""
        self.send_signal(signal.SIGKILL)

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, signal.Signals(number))

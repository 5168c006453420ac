"""`ddp run` in a real terminal of 40 columns: its output there, and the effect of Ctrl-C."""

from __future__ import annotations

import fcntl
import os
import re
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import PATIENCE
from tests.support.ddp_run import manifest

pytestmark = pytest.mark.process

COLUMNS = 40
SCRIPT = """
import time
for step in range(1, 2000):
    print(f"step {step}/4000: loss {1 / step:.4f}", flush=True)
    time.sleep(0.1)
"""
# The terminal of its standard input becomes its own, so that Ctrl-C typed there reaches it.
RUN = """
import fcntl, os, sys, termios
os.setsid()
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.executable, [sys.executable, "-c", "import sys; from ddp_cli.__main__ import main; sys.exit(main())",
                          "run", "job.yaml"])
"""
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class RunInTerminal:
    """`ddp run` of a script in a separate terminal; ``seen`` is all output."""

    def __init__(self, folder: Path, **env: str) -> None:
        pattern = r"step (?P<step>\d+)/(?P<totalSteps>\d+): loss (?P<loss>\S+)"
        text = manifest([sys.executable, "-c", SCRIPT], nodes=1, metrics={"logPatterns": [pattern]})
        (folder / "job.yaml").write_text(text)
        self.ours, theirs = os.openpty()
        modes = termios.tcgetattr(theirs)
        modes[3] &= ~termios.ECHO  # Ctrl-C would be echoed as ^C at the cursor
        termios.tcsetattr(theirs, termios.TCSANOW, modes)
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, COLUMNS, 0, 0))
        variables = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
        variables |= {"TERM": "xterm-256color", "PYTHONPATH": os.pathsep.join(sys.path)} | env
        self.process = subprocess.Popen(
            [sys.executable, "-c", RUN], cwd=folder, env=variables, stdin=theirs, stdout=theirs, stderr=theirs
        )
        os.close(theirs)
        self.seen = ""
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        while True:
            try:
                self.seen += os.read(self.ours, 65536).decode("utf-8", "replace")
            except OSError:  # the last process with the other end has closed it
                return

    @property
    def lines(self) -> list[str]:
        """Return every line as it was drawn at any time, without escape codes."""
        return re.split(r"[\r\n]+", ESCAPES.sub("", self.seen))

    def until(self, shown: str) -> None:
        """Wait until a line matches."""
        deadline = time.monotonic() + PATIENCE
        while not any(re.search(shown, line) for line in self.lines):
            assert time.monotonic() < deadline, f"never shown: {shown}\n{self.seen}"
            time.sleep(0.05)

    def end(self) -> int:
        """Return the exit code once the process has ended and all its output has arrived."""
        code = self.process.wait(PATIENCE)
        self._reader.join()
        return code

    def close(self) -> None:
        """Kill the remaining processes, including the run's pods."""
        self.process.kill()
        self.end()
        os.close(self.ours)


@pytest.fixture(params=["xterm-256color", "dumb"])
def terminal(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[RunInTerminal]:
    made = RunInTerminal(tmp_path, TERM=request.param)
    yield made
    made.close()


def test_progress_is_shown_in_narrow_terminal_and_ctrl_c_ends_in_order(
    terminal: RunInTerminal, request: pytest.FixtureRequest
) -> None:
    terminal.until(r"^ *step \d+/4000: loss")  # the script's own line
    terminal.until(r"0\.\d%")
    os.write(terminal.ours, b"\x03")
    assert terminal.end() == 130
    assert "Interrupted" in terminal.seen
    assert "Traceback" not in terminal.seen
    dumb = "dumb" in request.node.name
    assert bool(ESCAPES.search(terminal.seen)) is not dumb
    bars = [line for line in terminal.lines if "━" in line or "╸" in line]
    assert bool(bars) is not dumb
    assert [line for line in bars if len(line) > COLUMNS] == []

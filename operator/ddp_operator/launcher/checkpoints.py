"""The launcher's side of ``checkpoint.url``: the process that fetches and uploads, and what the pod says of it."""

import json
import os
import signal
import socket
import sys
import time
from contextlib import suppress
from typing import Any, Optional

from .contract import (
    COMMENT_UPLOAD_PROBLEM,
    ENV_ATTEMPT,
    ENV_CHECKPOINT_DIR,
    ENV_RUN_ID,
    METRIC_UPLOAD_BYTES,
    METRIC_UPLOAD_FAILURES,
    METRIC_UPLOAD_STEP,
    METRIC_UPLOAD_TIME,
)
from .files import BOOTSTRAP, log
from .pod import Pod, encode_config
from .processes import kill
from .storage import hide_credentials

_SERIES = (
    (METRIC_UPLOAD_STEP, "gauge", "step", "Step of the newest snapshot of the checkpoints in checkpoint.url."),
    (METRIC_UPLOAD_TIME, "gauge", "time", "When that snapshot was complete."),
    (METRIC_UPLOAD_BYTES, "counter", "bytes", "Bytes of checkpoints that were uploaded."),
    (METRIC_UPLOAD_FAILURES, "gauge", "failures", "Tries to upload that have failed since the last that did not."),
)


class CheckpointMirror:
    """The process; pod 0's lives as long as the launcher, another's as long as it fetches."""

    def __init__(self, pod: Pod) -> None:
        self._pod = pod
        self.channel: Optional[socket.socket] = None  # None while there is no process
        self.pid = 0
        self.ready = False  # whether the folder is as it has to be for the ranks to start
        self.snapshot = ""  # that the folder was last known to be as
        self.asked: Optional[dict[str, Any]] = None  # what is not answered yet
        self.asked_at = 0.0
        self._count = 0
        self._state: dict[str, Any] = {}
        self._unread = b""

    @property
    def url(self) -> str:
        """Where the store is."""
        assert self._pod.checkpoint is not None
        return hide_credentials(self._pod.checkpoint.url)

    def ask(self, **what: Any) -> None:
        """Ask the process for something; it is started if there is none. An answer to an earlier request is ignored."""
        self._count += 1
        what["number"] = self._count
        self.asked, self.asked_at = what, time.monotonic()
        if self.channel is None:
            self._start()
        self._send(what)

    def receive(self) -> list[dict[str, Any]]:
        """Return what the process has reported since the last call; one that was killed is started again."""
        assert self.channel is not None
        try:
            data = self.channel.recv(65536)
        except BlockingIOError:
            return []
        except OSError:
            data = b""
        *lines, self._unread = (self._unread + data).split(b"\n")
        events: list[dict[str, Any]] = [json.loads(line) for line in lines]
        for event in events:
            self._state = event.get("state", self._state)
            if "done" in event:
                self.ready, self.snapshot = True, event["done"]
                if self.asked is not None and event["number"] == self._count:
                    self.asked = None
        ended = any("end" in event for event in events)
        if ended or (self.asked is None and self._pod.node != 0):
            self.close()
        elif not data:
            self._start_again()
        return events

    def close(self) -> None:
        """End the process."""
        if self.channel is not None:
            self.channel.close()
            self.channel = None
        if self.pid:
            kill(self.pid, signal.SIGKILL)

    def note_end(self, pid: int) -> None:
        """Take in that a child of the launcher's has ended."""
        if pid == self.pid:
            self.pid = 0

    @property
    def problem(self) -> str:
        """Why the last try has failed; empty where it has not."""
        return str(self._state.get("problem") or "")

    def describe_unsaved(self) -> str:
        """Return what the store lacks, what its newest snapshot is, and why."""
        has_snapshot = bool(self._state.get("time"))
        step = self._state.get("step")
        if not has_snapshot:
            newest = "there is no snapshot"
        elif step is None:
            newest = "the newest snapshot is an older one"
        else:
            newest = f"the newest snapshot is of step {step}"
        reason = f": {self.problem}" if self.problem else ""
        return f"the last checkpoint was not uploaded to {self.url}, where {newest}{reason}"

    def values(self) -> dict[str, float]:
        """Return the series; none in a pod that uploads nothing."""
        if self._pod.node != 0:
            return {}
        found = ((name, self._state.get(key)) for name, _, key, _ in _SERIES)
        return {METRIC_UPLOAD_BYTES: 0.0, **{name: float(value) for name, value in found if value is not None}}

    def build_rows(self) -> list[str]:
        """Return the lines of the pod's page."""
        values, rows = self.values(), []
        for name, kind, _, words in _SERIES:
            if name in values:
                rows += [f"# HELP {name} {words}", f"# TYPE {name} {kind}", f"{name} {values[name]:.15g}"]
        return rows

    def build_comment(self) -> str:
        """Return the line that says why nothing is uploaded; empty where nothing is wrong."""
        return f'{COMMENT_UPLOAD_PROBLEM}"{self.problem}"\n' if self.problem else ""

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        os.set_inheritable(theirs.fileno(), True)
        about = {
            "pod": encode_config(self._pod),
            "folder": os.environ.get(ENV_CHECKPOINT_DIR) or os.getcwd(),
            "attempt": int(os.environ.get(ENV_ATTEMPT) or 1),
            "runId": os.environ.get(ENV_RUN_ID) or "run",
        }
        words = ["mirror", str(theirs.fileno()), str(os.getpid()), json.dumps(about)]
        self.pid = os.posix_spawn(sys.executable, [sys.executable, "-u", BOOTSTRAP, *words], os.environ)
        theirs.close()
        ours.setblocking(False)
        self.channel, self._unread = ours, b""

    def _start_again(self) -> None:
        self.close()
        log("the process that uploads checkpoints has ended: another one takes its place")
        time.sleep(1.0)
        self._start()
        claim = {"claim": True} if self._pod.node == 0 else {}
        self._send({"number": self._count, **claim, **(self.asked or {})})

    def _send(self, what: dict[str, Any]) -> None:
        with suppress(OSError):  # it has ended, as the channel will show
            if self.channel is not None:
                self.channel.sendall(json.dumps(what).encode() + b"\n")

"""The launcher's side of ``checkpoint.url``: the mirror process and its messages."""

import json
import os
import signal
import socket
import sys
import time
from contextlib import suppress
from typing import NamedTuple

from ...base.files import BOOTSTRAP, log
from ...base.pod import Pod
from ...contract.credentials import hide_credentials
from ...contract.names import ENV_ATTEMPT, ENV_CHECKPOINT_DIR, ENV_RUN_ID
from ...contract.plan import encode_plan
from ...contract.processes import kill
from ...contract.progress import Uploads

NEWEST = ""
"""In a request: fetch the newest snapshot instead of a named one."""
_SECONDS_BEFORE_RESTART = 1.0


class MirrorConfig(NamedTuple):
    """The configuration of the mirror process. ``pod``: from ``encode_plan``; ``folder``: of the checkpoints."""

    pod: str
    folder: str
    attempt: int
    run_id: str


class MirrorRequest(NamedTuple):
    """A request to the mirror process, which executes its fields in their order.

    ``claim``: claim the prefix for this attempt, and upload every change from now on. ``fetch``: the snapshot to
    download, or NEWEST; None: no download. ``flush``: upload the folder after the workers have ended. ``align``: make
    the checkpoints with shards equal to the snapshot, after the workers of all pods have ended.
    """

    number: int
    claim: bool = False
    fetch: str | None = None
    flush: bool = False
    align: bool = False

    def encode(self) -> bytes:
        """Return the request as a line of JSON."""
        return json.dumps(self._asdict()).encode() + b"\n"


class MirrorState(NamedTuple):
    """The state of the store. ``step``, ``time``: of the newest snapshot; ``pending``: whether the folder is newer."""

    step: int | None = None
    time: float | None = None
    bytes: int = 0
    failures: int = 0
    problem: str = ""
    pending: bool = False


class MirrorEvent(NamedTuple):
    """A report of the mirror process.

    ``state``: of the store. ``done``: the request ``number`` is done and the folder equals this snapshot, "" for none.
    ``end``: the process cannot continue; the kind of the problem, described by ``message``.
    """

    state: MirrorState | None = None
    done: str | None = None
    number: int = 0
    end: str = ""
    message: str = ""

    def encode(self) -> bytes:
        """Return the event as a line of JSON."""
        state = None if self.state is None else self.state._asdict()
        return json.dumps({**self._asdict(), "state": state}).encode() + b"\n"


def decode_event(line: bytes) -> MirrorEvent:
    """Read an event."""
    raw = json.loads(line)
    state = None if raw["state"] is None else MirrorState(**raw["state"])
    return MirrorEvent(**{**raw, "state": state})


class CheckpointMirror:
    """The mirror process. It lives as long as the launcher in pod 0 and in pods with shards, else as long as a fetch.

    ``is_uploading``: whether it uploads changes: in pod 0 all, in other pods shards.
    """

    def __init__(self, pod: Pod) -> None:
        self._pod = pod
        self.channel: socket.socket | None = None  # None while there is no process
        self.pid = 0
        self.ready = False  # whether a fetch has prepared the folder for the ranks
        self.snapshot = ""  # that the folder last equalled
        self.is_uploading = False
        self._pending: MirrorRequest | None = None
        self.requested_at = 0.0
        self._count = 0
        self._state: MirrorState | None = None  # before the first report
        self._unread = b""

    @property
    def url(self) -> str:
        """The store's URL without credentials."""
        assert self._pod.checkpoint is not None
        return hide_credentials(self._pod.checkpoint.url)

    @property
    def is_busy(self) -> bool:
        """Whether the last request is not done."""
        return self._pending is not None

    def request(
        self, *, claim: bool = False, fetch: str | None = None, flush: bool = False, align: bool = False
    ) -> None:
        """Send a request to the process, which is started if necessary. It replaces an earlier request."""
        self._count += 1
        self._pending = MirrorRequest(self._count, claim, fetch, flush, align)
        self.is_uploading = self.is_uploading or claim
        self.requested_at = time.monotonic()
        if self.channel is None:
            self._start()
        self._send(self._pending)

    def receive(self) -> list[MirrorEvent]:
        """Return the events since the last call; restart a killed process."""
        assert self.channel is not None
        try:
            data = self.channel.recv(65536)
        except BlockingIOError:
            return []
        except OSError:
            data = b""
        *lines, self._unread = (self._unread + data).split(b"\n")
        events = [decode_event(line) for line in lines]
        for event in events:
            self._apply(event)
        has_ended = any(event.end for event in events)
        if has_ended or (self._pending is None and not self.is_uploading):
            self.close()
        elif not data:
            self._restart()
        return events

    def _apply(self, event: MirrorEvent) -> None:
        if event.state is not None:
            self._state = event.state
        if event.done is None:
            return
        self.ready = True
        self.snapshot = event.done
        if event.number == self._count:
            self._pending = None

    def close(self) -> None:
        """End the process."""
        if self.channel is not None:
            self.channel.close()
            self.channel = None
        if self.pid:
            kill(self.pid, signal.SIGKILL)

    def note_end(self, pid: int) -> None:
        """Note that a child of the launcher has ended."""
        if pid == self.pid:
            self.pid = 0

    @property
    def problem(self) -> str:
        """Why the last upload or fetch has failed; empty if it has not."""
        return self._state.problem if self._state else ""

    def describe_unsaved(self) -> str:
        """Return a message about the checkpoint that the store does not have."""
        if self._pod.node != 0:
            reason = f": {self.problem}" if self.problem else ""
            return f"the shards of pod {self._pod.node} were not uploaded to {self.url}{reason}"
        if self._state is None or not self._state.time:
            newest = "it has no snapshot"
        elif self._state.step is None:
            newest = "its newest snapshot is older"
        else:
            newest = f"its newest snapshot has step {self._state.step}"
        reason = f": {self.problem}" if self.problem else ""
        return f"the last checkpoint was not uploaded to {self.url}, {newest}{reason}"

    def summarize(self) -> Uploads:
        """Return what the pod reports; only pod 0 reports more than a problem."""
        if self._pod.node != 0:
            return Uploads(problem=self.problem)
        state = self._state or MirrorState()
        return Uploads(state.step, state.time, state.bytes, state.failures, state.problem)

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        os.set_inheritable(theirs.fileno(), True)
        config = MirrorConfig(
            pod=encode_plan(self._pod),
            folder=os.environ.get(ENV_CHECKPOINT_DIR) or os.getcwd(),
            attempt=int(os.environ.get(ENV_ATTEMPT) or 1),
            run_id=os.environ.get(ENV_RUN_ID) or "run",
        )
        arguments = ["mirror", str(theirs.fileno()), str(os.getpid()), json.dumps(config._asdict())]
        self.pid = os.posix_spawn(sys.executable, [sys.executable, "-u", BOOTSTRAP, *arguments], os.environ)
        theirs.close()
        ours.setblocking(False)
        self.channel = ours
        self._unread = b""

    def _restart(self) -> None:
        self.close()
        log("the process that uploads checkpoints has ended unexpectedly: restarting it")
        time.sleep(_SECONDS_BEFORE_RESTART)
        self._start()
        request = self._pending or MirrorRequest(self._count)
        self._send(request._replace(claim=self.is_uploading))

    def _send(self, request: MirrorRequest) -> None:
        with suppress(OSError):  # the process has ended, as the channel will show
            if self.channel is not None:
                self.channel.sendall(request.encode())

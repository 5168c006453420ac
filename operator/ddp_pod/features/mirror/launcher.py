"""The mirror of ``checkpoint.url``, in the pod's first process."""

import os
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ...base.files import log
from ...base.launcher_part import LauncherPart
from ...base.pod import Pod
from ...base.service import Answer, Conclusion, Control, Ending, Service
from ...contract.names import ENV_CHECKPOINT_DIR
from ...failures.agent_failure import UNREACHABLE, build_store_failure
from .checkpoints import NEWEST, CheckpointMirror
from .messages import SnapshotNeeded
from .shards import has_shards, wait_for_shards


class MirrorService(Service):
    """Keeps the checkpoint folder and the store equal. A problem of the store ends the pod.

    Without the store the progress would be lost with the pods, or their states would differ.
    """

    name = "mirror"
    is_vital = True

    def __init__(self, pod: Pod, control: Control | None = None) -> None:
        self._pod = pod
        self._control = control
        self._mirror = CheckpointMirror(pod)
        self._agent_waits = False  # for a snapshot
        self._finds_shards = False  # whether a pod other than pod 0 has shards, which it must upload
        self._has_problem = False  # which has ended the workers
        self._upload_until: float | None = None  # the end of the last upload, unless the pod was asked to stop
        self._is_finishing = False
        self._unsaved = ""

    # -- while the ranks run

    def start(self, control: Control) -> None:
        """Fetch the newest snapshot, and in pod 0 upload from now on."""
        self._control = control
        self._mirror.request(claim=self._pod.node == 0, fetch=NEWEST)

    def run(self) -> None:
        """In other pods than pod 0, wait for shards."""
        if self._pod.node == 0:
            return
        wait_for_shards(self._folder)
        # The flag first: the supervisor may wait without a limit, and reads it only when it is woken.
        self._finds_shards = True
        if self._control is not None:
            self._control.wake()

    def list_watched(self) -> Sequence[Any]:
        """Return the socket of the process."""
        return () if self._mirror.channel is None else (self._mirror.channel,)

    def find_timeout(self) -> float | None:
        """Return a second while a request is under way, as its time is limited."""
        return 1.0 if self._mirror.is_busy else None

    def is_ready(self) -> bool:
        """Return whether the folder has the newest checkpoints, from which the ranks are to start."""
        return self._mirror.ready

    def follow(self, ready: Sequence[Any]) -> None:
        """Handle the events of the process, and the end of its last request."""
        mirror = self._mirror
        if mirror.channel is not None and mirror.channel in ready:
            for event in mirror.receive():
                if event.end:
                    self._abort(event.end, event.message)
        if self._is_finishing:
            self._follow_upload()
            return
        # The claim before the reply: a round must not start with shards that nobody uploads.
        if not mirror.is_busy and self._finds_shards and not mirror.is_uploading:
            mirror.request(claim=True)
        if mirror.is_busy:
            self._limit_request()
        elif self._agent_waits and self._control is not None:
            self._agent_waits = False
            self._control.reply(mirror.snapshot)

    def answer(self, request: object) -> object:
        """Make the checkpoint folder equal the snapshot with which the pods start a round; they upload it before."""
        if not isinstance(request, SnapshotNeeded):
            return Answer.NOT_MINE
        snapshot = request.known
        if self._pod.node == 0:
            self._mirror.request(flush=True, align=True)
        elif snapshot is None:
            if has_shards(self._folder):
                self._mirror.request(claim=True, flush=True)
        elif self._mirror.is_uploading:
            self._mirror.request(fetch=snapshot or None, align=True)
        elif snapshot != self._mirror.snapshot:
            self._mirror.request(fetch=snapshot)
        self._agent_waits = True
        self.follow(())  # which replies, if there was nothing to do
        return Answer.LATER

    def forget(self) -> None:
        """Forget the request of an agent that was killed: its successor would read the reply as that to its own."""
        self._agent_waits = False

    def list_processes(self) -> Collection[int]:
        """Return the process."""
        return {self._mirror.pid}

    def note_end(self, pid: int) -> None:
        """Note that a child of the launcher has ended."""
        self._mirror.note_end(pid)

    def report(self) -> Mapping[str, object]:
        """Return the uploads for the report."""
        return {"uploads": self._mirror.summarize()}

    @property
    def _folder(self) -> str:
        return os.environ.get(ENV_CHECKPOINT_DIR, "")

    def _limit_request(self) -> None:
        mirror = self._mirror
        has_timed_out = time.monotonic() - mirror.requested_at > self._pod.join_timeout_seconds
        if has_timed_out and self._control is not None and self._control.has_agent:
            reason = mirror.problem or "it takes longer than spec.rendezvous.joinTimeoutSeconds"
            self._abort(UNREACHABLE, f"cannot synchronize the checkpoint folder with {mirror.url}: {reason}")

    def _abort(self, kind: str, message: str) -> None:
        self._has_problem = True
        if self._control is not None:
            self._control.abort(build_store_failure(self._pod, kind, message))

    # -- the end

    def finish(self, ending: Ending) -> None:
        """Begin to upload the workers' last checkpoint.

        The limit is the workers' grace period for a pod that was stopped or has failed, and the watchdog's time for a
        checkpoint for one that succeeded.
        """
        pod = self._pod
        if not self._mirror.ready or self._has_problem or (pod.node != 0 and not has_shards(self._folder)):
            return
        limit = pod.grace
        if ending.succeeded and pod.watchdog is not None:
            limit = pod.watchdog.checkpoint_seconds
        self._upload_until = time.monotonic() + limit
        self._is_finishing = True
        self._mirror.request(claim=pod.node != 0, flush=True)

    def is_finished(self) -> bool:
        """Return whether the upload has ended."""
        return not self._is_finishing

    def conclude(self) -> Conclusion:
        """Return the missing part of the store, and the uploads for the termination message."""
        return Conclusion(unsaved=self._unsaved, uploads=self._mirror.summarize())

    def _follow_upload(self) -> None:
        mirror = self._mirror
        stop_at = None if self._control is None else self._control.finish_by
        deadline = self._upload_until if stop_at is None else stop_at  # a signal may arrive during the upload
        is_late = mirror.channel is None or (deadline is not None and time.monotonic() >= deadline)
        if mirror.is_busy and not self._has_problem and not is_late:
            return
        if mirror.is_busy and not self._has_problem:
            self._unsaved = mirror.describe_unsaved()
            log(self._unsaved)
        self._is_finishing = False
        mirror.close()


def _create(pod: Pod, reader: Any) -> Sequence[Service]:
    return (MirrorService(pod),)


PART = LauncherPart(create=_create)

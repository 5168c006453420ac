"""Endpoint for the progress that a script posts in the format of Kubeflow's Trainer (KEP-2779).

Hugging Face's Trainer posts if the two variables that the shim sets exist. A request needs the pod's token.
"""

import functools
import hmac
import json
import os
import re
import time
from collections.abc import Mapping
from typing import Any

from ..base.files import log, write_json
from ..base.pod import Pod
from ..contract.names import TRAINER_STATUS_FILE
from ..rank.counters import CounterMemory, RankCounters
from .log_patterns import LogProgress
from .output import write_progress

_PATH = re.compile(rb"/trainer-status/(\d{1,4})/(\d{1,10})")
_BEARER = re.compile(rb"\r\nauthorization: *bearer +(\S+)", re.IGNORECASE)
_NAMES = {
    "step": ("currentstep", "globalstep", "step"),
    "totalSteps": ("totalsteps", "maxsteps"),
    "epoch": ("currentepoch", "epoch"),
    "epochs": ("totalepochs", "epochs", "numepochs"),
    "loss": ("loss", "trainloss"),
    "learningRate": ("learningrate", "lr"),
    "samplesPerSecond": ("samplespersecond",),
    "valLoss": ("evalloss", "valloss"),
    "valAccuracy": ("evalaccuracy", "valaccuracy"),
}
_GROUPS = {name: group for group, names in _NAMES.items() for name in names}


class _PostedProgress:
    """The progress that one process of a rank has posted. ``process``: its pid, as in the request's path."""

    def __init__(self, process: bytes, progress: LogProgress) -> None:
        self.process = process
        self.progress = progress
        self._total_steps = ""

    def complete(self, groups: dict[str, str]) -> dict[str, str]:
        """Add a step to a status without one. If the process never posts total steps, percents count as steps."""
        percent = groups.pop("percent", "0")
        self._total_steps = groups.get("totalSteps", self._total_steps)
        if "step" in groups:
            return groups
        if percent == "100" and self._total_steps:
            groups["step"] = self._total_steps  # the last status of Hugging Face's Trainer has no step
        elif percent != "0" and not self._total_steps:
            groups.update(step=percent, totalSteps="100")
        return groups


class TrainerStatus:
    """The endpoint of one pod."""

    def __init__(self, pod: Pod, counters: CounterMemory | None = None) -> None:
        self._pod = pod
        self._counters = counters
        self._token = os.urandom(16).hex()
        self._posted: dict[bytes, _PostedProgress] = {}  # by local rank

    def offer(self, port: int) -> None:
        """Write the port and the token to the files from which workers read them."""
        path = os.path.join(self._pod.runtime, "token")
        try:
            with open(path, "w", encoding="ascii", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
                file.write(self._token)
            write_json(os.path.join(self._pod.runtime, TRAINER_STATUS_FILE), {"port": port, "token": path})
        except OSError as error:
            log(f"scripts cannot post their progress: cannot write {path}: {error.strerror}")

    def receive(self, path: bytes, head: bytes, body: bytes) -> str:
        """Handle a posted status. Returns the status line of the response."""
        match = _PATH.fullmatch(path)
        bearer = _BEARER.search(head)
        if not match or int(match[1]) >= self._pod.nproc_per_node:
            return "404 Not Found"
        if not bearer or not hmac.compare_digest(bearer[1], self._token.encode()):
            return "403 Forbidden"
        try:
            groups = _read_status(json.loads(body)["trainerStatus"])
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return "422 Unprocessable Entity"

        posted = self._find_progress(local_rank=match[1], process=match[2])
        if posted.progress.take(posted.complete(groups), time.time()):
            write_progress(self._pod, int(match[1]), posted.progress, "post")
        return "200 OK"

    def _find_progress(self, local_rank: bytes, process: bytes) -> _PostedProgress:
        """Return the progress of a rank's process; a new process of the rank gets new counters."""
        posted = self._posted.get(local_rank)
        if posted is not None and posted.process == process:
            return posted
        if posted is not None:
            progress = posted.progress.restarted()
        else:
            progress = LogProgress([], self._pod.epochs, False, functools.partial(self._read_counters, int(local_rank)))
        posted = _PostedProgress(process, progress)
        self._posted[local_rank] = posted
        return posted

    def _read_counters(self, local_rank: int) -> RankCounters | None:
        return None if self._counters is None else self._counters.read(local_rank)


def _read_status(status: Mapping[str, Any]) -> dict[str, str]:
    """Return the values of a trainerStatus by the names of LOG_GROUPS, and its ``percent``.

    Raises: KeyError, TypeError or AttributeError for a document of another form.
    """
    groups = {}
    for metric in status.get("metrics") or ():
        name = re.sub(r"[^a-z]", "", str(metric["name"]).lower())
        value = str(metric["value"])
        if name in _GROUPS:
            groups[_GROUPS[name]] = value
    percent = status.get("progressPercentage")
    if percent is not None:
        groups["percent"] = str(percent)
    return groups

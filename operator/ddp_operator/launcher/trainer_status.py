"""The progress that a script posts as it would to Kubeflow's Trainer (KEP-2779), for those that do so by themselves.

Hugging Face's Trainer does, where it finds the two variables that the shim sets. Only who knows the pod's token may.
"""

import hmac
import json
import os
import re
import time
from typing import Any

from .contract import TRAINER_STATUS_FILE
from .files import log, write_json
from .log_patterns import LogProgress
from .output import write_page
from .pod import Pod

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


class _Rank:
    """What a process of a rank has posted."""

    def __init__(self, process: bytes, progress: LogProgress) -> None:
        self.process, self.progress = process, progress
        self._total = ""

    def complete(self, groups: dict[str, str]) -> dict[str, str]:
        """Return what was posted with a step: where none is ever named, the percents are the steps."""
        percent = groups.pop("percent", "0")
        self._total = groups.get("totalSteps", self._total)
        if "step" not in groups and percent == "100" and self._total:
            groups["step"] = self._total  # Hugging Face's last word names none
        elif "step" not in groups and percent != "0" and not self._total:
            groups.update(step=percent, totalSteps="100")
        return groups


class TrainerStatus:
    """The endpoint of one pod."""

    def __init__(self, pod: Pod) -> None:
        self._pod = pod
        self._token = os.urandom(16).hex()
        self._ranks: dict[bytes, _Rank] = {}

    def offer(self, port: int) -> None:
        """Let the workers know where it is."""
        path = os.path.join(self._pod.runtime, "token")
        try:
            with open(path, "w", encoding="ascii", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
                file.write(self._token)
            write_json(os.path.join(self._pod.runtime, TRAINER_STATUS_FILE), {"port": port, "token": path})
        except OSError as error:
            log(f"scripts cannot post their progress: cannot write {path}: {error.strerror}")

    def receive(self, path: bytes, head: bytes, body: bytes) -> str:
        """Take in what a rank posts. Returns the status line of the reply."""
        place, bearer = _PATH.fullmatch(path), _BEARER.search(head)
        if not place or int(place[1]) >= self._pod.nproc_per_node:
            return "404 Not Found"
        if not bearer or not hmac.compare_digest(bearer[1], self._token.encode()):
            return "403 Forbidden"
        try:
            groups = _read_status(json.loads(body)["trainerStatus"])
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return "422 Unprocessable Entity"
        former = self._ranks.get(place[1])
        if former is None or former.process != place[2]:
            progress = former.progress.restarted() if former else LogProgress([], self._pod.epochs, per_epoch=False)
            former = self._ranks[place[1]] = _Rank(place[2], progress)
        if former.progress.take(former.complete(groups), time.time()):
            write_page(self._pod, int(place[1]), former.progress, "post")
        return "200 OK"


def _read_status(status: dict[str, Any]) -> dict[str, str]:
    """Return what a trainerStatus says, by the names of LOG_GROUPS, and its ``percent``."""
    named = {re.sub(r"[^a-z]", "", str(one["name"]).lower()): str(one["value"]) for one in status.get("metrics") or ()}
    percent = status.get("progressPercentage")
    groups = {_GROUPS[name]: value for name, value in named.items() if name in _GROUPS}
    return groups if percent is None else {**groups, "percent": str(percent)}

"""The one table of failures: what the launcher, the operator and docs/api.md know of a category and of an exit code."""

import signal
from typing import Any, Final, Iterable, NamedTuple

from .contract import EXIT_HANG, EXIT_OOM, EXIT_PEER_LOST, EXIT_PREEMPTED, EXIT_RETRYABLE, EXIT_USER_ERROR


class Category(NamedTuple):
    """What is true of all failures of a category. ``remedy``: where nothing better is known."""

    name: str
    meaning: str
    remedy: str
    own: bool = False
    """Whether it is the script's, so that its repetition without progress ends the job."""
    symptom: bool = False
    """Whether it is what a rank reports that has lost its peer: true, but a lost pod or node explains it better."""
    vague: bool = False
    """Whether a lost node explains it better: a symptom, or an end that says nothing."""


_PEER: Final = "another rank went away first, or the network did; look for the earliest failure of the other pods"
USER_ERROR: Final = Category(
    "UserError",
    "the script, its data or its arguments",
    "fix the line of the script that the traceback points to",
    own=True,
)
OOM: Final = Category(
    "OOM",
    "memory of the container or of the GPU",
    "lower the batch size, or raise the memory limit of the trainer container (resources.limits.memory)",
    own=True,
)
CUDA: Final = Category(
    "CUDAError",
    "a GPU, or a kernel on it",
    "look at the node's GPU (nvidia-smi, dmesg); CUDA_LAUNCH_BLOCKING=1 shows the failing call",
)
NCCL: Final = Category("NCCL", "communication by NCCL", _PEER, symptom=True, vague=True)
NETWORK: Final = Category(
    "Network", "communication without NCCL: gloo, the rendezvous, DNS", _PEER, symptom=True, vague=True
)
HANG: Final = Category(
    "Hang",
    "no progress within the watchdog's budget",
    "the log has the stacks of all ranks; a phase that is long by nature needs a longer budget in spec.watchdog, or "
    "calls of exporter.heartbeat()",
    symptom=True,
    vague=True,
)
KILLED: Final = Category(
    "Killed",
    "a process was killed from outside; by whom is not known",
    "see who may have sent the signal: the kernel of a node that is short of memory (dmesg and kubectl describe node), "
    "or somebody by hand; of the container's own memory limit there is no sign",
    vague=True,
)
PREEMPTED: Final = Category("Preempted", "the pod was deleted, evicted or preempted", "", vague=True)
NODE_LOST: Final = Category(
    "NodeLost",
    "the pod's node is gone or not ready",
    "look at the node; status.failedNodes lists the nodes that the next attempts avoid",
)
IMAGE_PULL: Final = Category(
    "ImagePull", "the image never came", "look at the image's name and tag, and at imagePullSecrets"
)
UNKNOWN: Final = Category("Unknown", "an end without an explanation", "", own=True, vague=True)
CATEGORIES: Final = {
    one.name: one
    for one in (USER_ERROR, OOM, CUDA, NCCL, NETWORK, HANG, KILLED, PREEMPTED, NODE_LOST, IMAGE_PULL, UNKNOWN)
}


class Outcome(NamedTuple):
    """A failure's category, the launcher's exit code for it, and whether another rank's failure explains it."""

    category: str
    exit_code: int
    secondary: bool = False


# What each exit code of ours stands for where nothing more is known. Only after 81 no other attempt is made.
EXIT_CODES: Final = {
    one.exit_code: one
    for one in (
        Outcome(USER_ERROR.name, EXIT_USER_ERROR),
        Outcome(UNKNOWN.name, EXIT_RETRYABLE),
        Outcome(HANG.name, EXIT_HANG),
        Outcome(OOM.name, EXIT_OOM),
        Outcome(PREEMPTED.name, EXIT_PREEMPTED),
        Outcome(NETWORK.name, EXIT_PEER_LOST, True),
    )
}
_FROM_OUTSIDE: Final = (signal.SIGHUP, signal.SIGINT, signal.SIGKILL, signal.SIGTERM)
SIGNIFICANT_SECONDS: Final = 300.0
"""Workers that report no steps and ran so long have made progress."""


def judge_exit_code(code: int) -> Outcome:
    """Return the outcome of a process that left no more than its exit code (negative: a signal's number)."""
    killed = (-code if code < 0 else code - 128) in _FROM_OUTSIDE
    return Outcome(KILLED.name, EXIT_RETRYABLE) if killed else EXIT_CODES.get(code, EXIT_CODES[EXIT_RETRYABLE])


def format_failure(category: str, places: Iterable[tuple[str, Any]], message: str) -> str:
    """Return a failure in one line, such as ``UserError (rank 1, exit code 1): KeyError: 10``."""
    place = format_place(places)
    return category + (f" ({place})" if place else "") + f": {message or 'no message'}"


def format_place(places: Iterable[tuple[str, Any]]) -> str:
    """Return where a failure happened, of what is known."""
    return ", ".join(f"{name} {value}" for name, value in places if value not in (None, ""))

"""Texts of failures and remedies that the launcher and the operator, or the operator and the commands, share."""

import re
from collections.abc import Iterable
from typing import Any, Final

from .failure_record import RankEnd

UNRESOLVED: Final = "name does not resolve yet"
"""Problem of a connection to pod 0."""
HIDDEN_FAILURE_REMEDY: Final = (
    "its exit code 0 hides the failure: let the exception end the script, without a try that only prints it and "
    "without || true, and write set -o pipefail before a pipe"
)
PROGRAM_REMEDY: Final = (
    "{program} is not in the image, or is not executable: use an image with Python and PyTorch, or correct command in "
    "spec.template (an image without python may have python3)"
)
BROKEN_PYTHON: Final = re.compile(
    r"^(Fatal Python error: init_\w+: |Could not find platform independent libraries"
    r"|\S*python\S*: error while loading shared libraries: )[^\n]*",
    re.M,
)
"""What a Python prints that cannot start."""
BROKEN_PYTHON_REMEDY: Final = (
    "this Python cannot start: correct or remove PYTHONHOME, PYTHONPATH and LD_LIBRARY_PATH in the environment, which "
    "may be meant for another Python, or repair its installation"
)
DISK_REMEDY: Final = (
    "raise ephemeral-storage in resources, or write to a volume: files in the container and its log count"
)
EMPTY_DIR_REMEDY: Final = (
    "raise sizeLimit of the emptyDir {volume} in spec.template (it is {limit}), write less to it, or use a claim"
)
SHARED_MEMORY_REMEDY: Final = (
    "raise spec.sharedMemory (it is {limit}) and the container memory limit, or use fewer DataLoader workers"
)
PROBE_REMEDY: Final = (
    "correct or remove {field} of container {container} in spec.template: the kubelet kills the container when it fails"
)
SENDER_REMEDY: Final = (
    "find the sender: a process of the pod (the script, a library, another container with shareProcessNamespace), or "
    "a person (kubectl exec, the node's container runtime); the kernel short of memory sends SIGKILL only"
)
INIT_CONTAINER_REMEDY: Final = "see its log: kubectl logs {pod} -c {container}"
NON_FINITE_REMEDY: Final = (
    "the training diverges: return to an earlier checkpoint, then reduce the learning rate, extend the warm-up or clip "
    "the gradients, and prefer bf16 to fp16; if only one rank is affected, check its data and its GPU"
)


def describe_rank_end(end: RankEnd) -> str:
    """Return how a rank ended that exited with 0 and may not have completed its training."""
    position = " without a visible step"
    if end.step:
        position = f" at step {end.step:.0f}" + (f" of {end.total:.0f}" if end.total else "")
    trace = f" with a traceback in its output ({end.exception})" if end.exception else ""
    count = len(end.processes)
    remaining = f" while {count} of its processes still ran: {', '.join(end.processes)}" if count else ""
    kept = f"; the launcher ended it, because {end.keeper}" if end.keeper else ""
    return f"rank {end.rank} ended with exit code 0{position}{trace}{remaining}{kept}"


def format_failure(category: str, places: Iterable[tuple[str, Any]], message: str) -> str:
    """Return a failure in one line, such as ``UserError (rank 1, exit code 1): KeyError: 10``."""
    place = format_place(places)
    head = f"{category} ({place})" if place else category
    return f"{head}: {message or 'no message'}"


def format_place(places: Iterable[tuple[str, Any]]) -> str:
    """Return where a failure happened; unknown parts are omitted."""
    return ", ".join(f"{name} {value}" for name, value in places if value not in (None, ""))

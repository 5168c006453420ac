"""The table of failures: categories and exit codes, as the launcher, the operator and the documentation use them."""

import signal
from typing import Final, NamedTuple

from .names import EXIT_HANG, EXIT_OOM, EXIT_PEER_LOST, EXIT_PREEMPTED, EXIT_RETRYABLE, EXIT_USER_ERROR


class Category(NamedTuple):
    """What all failures of a category have in common. ``remedy`` applies where no more specific one is known."""

    name: str
    meaning: str
    remedy: str
    own: bool = False
    """Whether the script, or what it runs on, causes it, so that a repetition without progress ends the job."""
    symptom: bool = False
    """Whether ranks report it after losing a peer, so that a lost pod or node is the better explanation."""
    vague: bool = False
    """Whether a lost node is the better explanation: a symptom, or an exit without a reason."""


_AVOIDED: Final = "status.failedNodes lists the nodes that the next attempts avoid"
_PEER: Final = "another rank or the network failed first; look for the earliest failure of the other pods"
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
    "check the node's GPU (nvidia-smi, Xid errors in dmesg); CUDA_LAUNCH_BLOCKING=1 shows the failing call",
)
NCCL: Final = Category("NCCL", "communication by NCCL", _PEER, symptom=True, vague=True)
NETWORK: Final = Category(
    "Network", "communication without NCCL: gloo, the rendezvous, DNS", _PEER, symptom=True, vague=True
)
HANG: Final = Category(
    "Hang",
    "no progress within the time limits of spec.watchdog",
    "find out why the rank does not leave its line (a lock, a failed thread or process, a service, SIGSTOP, an "
    "endless computation); if it is slow by design, let all ranks take part, or raise spec.watchdog and the timeout of "
    "init_process_group",
    symptom=True,
    vague=True,
)
KILLED: Final = Category(
    "Killed",
    "a process was killed by a signal that it did not raise itself",
    "find the sender of the signal: the kernel of a node short of memory (dmesg, kubectl describe node), or a person; "
    "nothing shows that the container reached its own memory limit",
    vague=True,
)
PREEMPTED: Final = Category("Preempted", "the pod was evicted or preempted", "", vague=True)
POD_DELETED: Final = Category(
    "PodDeleted",
    "a client deleted the pod, without an eviction",
    "the API server's audit log names the client",
    vague=True,
)
NODE_LOST: Final = Category(
    "NodeLost",
    "the pod's node was deleted or is not ready",
    f"check the node; {_AVOIDED}",
)
IMAGE_PULL: Final = Category(
    "ImagePull", "the image was not pulled", "check the image's name and tag, and imagePullSecrets"
)
REPLICAS: Final = Category(
    "ReplicasDiffer",
    "parameters of ranks differ that were equal, or a rank lost its loss first (recovery.replicaMismatch: Restart)",
    "check the GPU and memory of the rank's node, and its batch; change parameters by the optimizer alone",
)
NODE_FAULT: Final = Category(
    "NodeFault",
    "the node's hardware or storage: an input/output error, an instruction that its CPU lacks, memory of a GPU",
    f"check the node (dmesg, nvidia-smi -q -d ECC) and the storage behind the path; {_AVOIDED}",
    own=True,
)
UNKNOWN: Final = Category("Unknown", "an exit without a known reason", "", own=True, vague=True)
CATEGORIES: Final = {
    category.name: category
    for category in (
        USER_ERROR, OOM, CUDA, NCCL, NETWORK, HANG, KILLED, PREEMPTED, POD_DELETED, NODE_LOST, IMAGE_PULL, REPLICAS,
        NODE_FAULT, UNKNOWN,
    )
}  # fmt: skip


class Outcome(NamedTuple):
    """A failure's category, the launcher's exit code for it, and whether another rank's failure caused it."""

    category: str
    exit_code: int
    secondary: bool = False


# The outcome of each of the launcher's exit codes. The operator starts another attempt after all of them but 81.
EXIT_CODES: Final = {
    outcome.exit_code: outcome
    for outcome in (
        Outcome(USER_ERROR.name, EXIT_USER_ERROR),
        Outcome(UNKNOWN.name, EXIT_RETRYABLE),
        Outcome(HANG.name, EXIT_HANG),
        Outcome(OOM.name, EXIT_OOM),
        Outcome(PREEMPTED.name, EXIT_PREEMPTED),
        Outcome(NETWORK.name, EXIT_PEER_LOST, True),
    )
}
_FROM_OUTSIDE: Final = (
    signal.SIGHUP, signal.SIGINT, signal.SIGKILL, signal.SIGTERM, signal.SIGXCPU, signal.SIGXFSZ,
)  # fmt: skip
SIGNIFICANT_SECONDS: Final = 300.0
"""Workers that report no steps count as having made progress after this time."""


def judge_exit_code(code: int) -> Outcome:
    """Return the outcome of a process of which only the exit code is known (negative: a signal's number)."""
    number = -code if code < 0 else code - 128
    if number in _FROM_OUTSIDE:
        return Outcome(KILLED.name, EXIT_RETRYABLE)
    if number == signal.SIGILL:
        return Outcome(NODE_FAULT.name, EXIT_RETRYABLE)
    return EXIT_CODES.get(code, EXIT_CODES[EXIT_RETRYABLE])

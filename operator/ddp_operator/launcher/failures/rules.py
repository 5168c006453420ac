"""The rules by which the launcher classifies the end of a worker: category, exit code of the pod, secondary or not."""

import re
import signal
from typing import Callable, Collection, Final, NamedTuple

from ...contract.failure_table import CUDA, EXIT_CODES, HANG, NCCL, NETWORK, OOM, USER_ERROR, Outcome, judge_exit_code
from ...contract.names import EXIT_HANG, EXIT_OOM, EXIT_PEER_LOST, EXIT_RETRYABLE, EXIT_USER_ERROR
from ..processes import has_gpu
from .text import MISMATCH, NO_DEVICES, NO_GPU

AT_START: Final = ("SyntaxError", "IndentationError", "TabError", "ImportError", "ModuleNotFoundError")
"""Exceptions of a script that cannot start."""

FATAL: Final = Outcome(USER_ERROR.name, EXIT_USER_ERROR)
SCRIPT_ERROR: Final = Outcome(USER_ERROR.name, EXIT_RETRYABLE)
_OUT_OF_MEMORY: Final = Outcome(OOM.name, EXIT_OOM)
_CUDA_ERROR: Final = Outcome(CUDA.name, EXIT_RETRYABLE)
_SIGKILL: Final = (-signal.SIGKILL, 128 + signal.SIGKILL)

_OOM_MESSAGE: Final = re.compile(
    r"out of memory|OutOfMemoryError|MemoryError|can't allocate memory|not enough memory|STATUS_ALLOC_FAILED", re.I
)
_PEERS: Final = re.compile(r"Dist(Backend|Network|Store)Error|gloo|nccl|ProcessGroup|TCPStore|c10d|rendezvous", re.I)
_LOST: Final = re.compile(
    r"connection (was )?(closed|reset|refused|aborted)|broken pipe|socket closed|timed? ?out|remote p(eer|rocess)"
    r"|connectFullMesh|nccl(Remote|System|Internal)Error|unhandled system error|recvValue|Dist(Network|Store)Error",
    re.I,
)
# Excludes devices that a mistake of the script names: tensors on cuda:0 and cpu, a torch.cuda.FloatTensor, 'cuda'.
_CUDA_MESSAGE: Final = re.compile(
    r"(?<!['\"])\bCUDA\b(?![:.]?\w|['\"])|cudnn|cublas|AcceleratorError|\bNVML\b|\bHIP error", re.I
)
# Faults of GPU and network have one of these types, or one of torch's own. Other types are the script's.
_FAULT: Final = re.compile(r"(SystemExit: )?(RuntimeError|OSError|TimeoutError|(\w+\.)+\w+): ")
_PORT_IN_USE: Final = re.compile("in use|EADDRINUSE")


class WorkerEnd(NamedTuple):
    """The end of a worker, from torchrun's report and the worker's error file."""

    exit_code: int
    """Negative: the number of the signal that killed it."""
    exception_type: str = ""
    """With its module, such as ``torch.OutOfMemoryError``; empty without an exception."""
    message: str = ""
    traceback: str = ""
    time: float = 0.0
    rank: int = 0
    local_rank: int = 0
    hang_is_secondary: bool = False
    """Whether the watchdog attributes the hang to another rank."""

    @property
    def text(self) -> str:
        """The exception as Python prints it."""
        return f"{self.exception_type}: {self.message}"


class PodFacts(NamedTuple):
    """Facts of the pod that the classification depends on."""

    oom_killed: bool = False
    """Whether the kernel has killed a process of this container for memory."""
    non_retryable_exit_codes: Collection[int] = ()


class FailureRule(NamedTuple):
    """An outcome, and the ends that have it."""

    applies: Callable[[WorkerEnd, PodFacts], bool]
    outcome: Callable[[WorkerEnd], Outcome]


def _is_hang(end: WorkerEnd, facts: PodFacts) -> bool:
    return end.exception_type == HANG.name


def _has_own_exit_code(end: WorkerEnd, facts: PodFacts) -> bool:
    return end.exit_code in EXIT_CODES


def _is_non_retryable(end: WorkerEnd, facts: PodFacts) -> bool:
    return end.exit_code in facts.non_retryable_exit_codes


def _is_killed_for_memory(end: WorkerEnd, facts: PodFacts) -> bool:
    return end.exit_code in _SIGKILL and facts.oom_killed


def _has_no_exception(end: WorkerEnd, facts: PodFacts) -> bool:
    return not end.exception_type


def _is_out_of_memory(end: WorkerEnd, facts: PodFacts) -> bool:
    return bool(_OOM_MESSAGE.search(end.text))


def _lacks_gpu(end: WorkerEnd, facts: PodFacts) -> bool:
    return bool(NO_GPU.search(end.text) or (NO_DEVICES.search(end.text) and not has_gpu()))


def _calls_other_collectives(end: WorkerEnd, facts: PodFacts) -> bool:
    return bool(MISMATCH.search(end.text))


def _is_communication_error(end: WorkerEnd, facts: PodFacts) -> bool:
    return bool(_PEERS.search(end.text) and _FAULT.match(end.text))


def _is_cuda_error(end: WorkerEnd, facts: PodFacts) -> bool:
    return bool(_CUDA_MESSAGE.search(end.text) and _FAULT.match(end.text))


def _cannot_start(end: WorkerEnd, facts: PodFacts) -> bool:
    lacks_module = end.exception_type == "SystemExit" and "No module named" in end.message
    return end.exception_type in AT_START or lacks_module


def _matches_any_end(end: WorkerEnd, facts: PodFacts) -> bool:
    return True


def _always(outcome: Outcome) -> Callable[[WorkerEnd], Outcome]:
    return lambda end: outcome


def _judge_communication_error(end: WorkerEnd) -> Outcome:
    category = NCCL if "nccl" in end.text.lower() else NETWORK
    peer_lost = bool(_LOST.search(end.text)) and not _PORT_IN_USE.search(end.text)
    return Outcome(category.name, EXIT_PEER_LOST if peer_lost else EXIT_RETRYABLE, peer_lost)


RULES: Final = (
    FailureRule(_is_hang, _always(EXIT_CODES[EXIT_HANG])),
    FailureRule(_has_own_exit_code, lambda end: EXIT_CODES[end.exit_code]),
    FailureRule(_is_non_retryable, _always(FATAL)),
    FailureRule(_is_killed_for_memory, _always(_OUT_OF_MEMORY)),
    FailureRule(_has_no_exception, lambda end: judge_exit_code(end.exit_code)),
    FailureRule(_is_out_of_memory, _always(_OUT_OF_MEMORY)),
    FailureRule(_lacks_gpu, _always(FATAL)),  # the next pod has no GPU either
    FailureRule(_calls_other_collectives, _always(SCRIPT_ERROR)),
    FailureRule(_is_communication_error, _judge_communication_error),
    FailureRule(_is_cuda_error, _always(_CUDA_ERROR)),
    FailureRule(_cannot_start, _always(FATAL)),
    FailureRule(_matches_any_end, _always(SCRIPT_ERROR)),
)
"""In order: the first rule that applies decides."""


def classify(end: WorkerEnd, *, oom_killed: bool, non_retryable: Collection[int] = ()) -> Outcome:
    """Return the outcome of a worker's end by the first rule that applies."""
    facts = PodFacts(oom_killed, non_retryable)
    return next(rule.outcome(end) for rule in RULES if rule.applies(end, facts))


def is_lost_rendezvous(text: str) -> bool:
    """Return whether an error of torchrun's agent, as Python prints it, is the loss of a connection to a peer."""
    return bool(_PEERS.search(text) and _LOST.search(text))

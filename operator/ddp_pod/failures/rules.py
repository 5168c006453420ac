"""The classification of the end of a worker: category, exit code of the pod, secondary or not, and kind of failure.

What is most certain decides: what was found instead, errno, HTTP status, then the type of the exception or of one in
its chain, then the words of messages.
"""

import builtins
import errno
import itertools
import os
import re
import signal
from collections.abc import Collection, Sequence
from typing import Final, NamedTuple

from ..base.exceptions import MESSAGE_PART, EndedChild, ExceptionFacts, parse_chain, shorten
from ..contract.failure_table import CUDA, EXIT_CODES, HANG, NCCL, NETWORK, Outcome, judge_exit_code
from ..contract.names import EXIT_HANG, EXIT_PEER_LOST, EXIT_RETRYABLE
from ..contract.processes import has_gpu
from .kinds import (
    FATAL,
    HELPER,
    KINDS,
    NO_DEVICES,
    NO_GPU,
    OUT_OF_MEMORY,
    PEERS,
    REFUSED_ARGUMENTS,
    SCRIPT_ERROR,
    UNKNOWN_KIND,
    FailureKind,
)

AT_START: Final = ("SyntaxError", "ImportError")
"""Exceptions of a script that cannot start, and their subclasses."""

_CUDA_ERROR: Final = Outcome(CUDA.name, EXIT_RETRYABLE)
_SIGKILL: Final = (-signal.SIGKILL, 128 + signal.SIGKILL)

# Errors of the system that no later exception of the chain explains better. Others may have been handled.
_EXHAUSTED: Final = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC, errno.EDQUOT)
# Mistakes in the line that raises them, whichever exception was handled meanwhile.
_MISTAKES: Final = {"ArithmeticError", "AssertionError", "AttributeError", "LookupError", "NameError", "TypeError"}
# Numbers in messages of Python, c10d, Rust and torch.
_NUMBER: Final = re.compile(r"\[Errno (\d+)\]|\(errno: (\d+)|\(os error (\d+)\)|^unable to [^\n]*\((\d+)\)$", re.M)
_NAMED: Final = ("E2BIG", "EACCES", "EADDRINUSE", "EAGAIN", "EDQUOT", "EFBIG", "EIO", "EMFILE", "ENAMETOOLONG",
                 "ENFILE", "ENOEXEC", "ENOMEM", "ENOSPC", "EROFS", "ESTALE")  # fmt: skip
"""Numbers that are recognized by their names and texts; texts about networks and paths have several meanings."""
_ERRNOS: Final = {
    text.lower(): number
    for number in (getattr(errno, name) for name in _NAMED if hasattr(errno, name))
    for text in (errno.errorcode[number], os.strerror(number))
}
_ERRNO_TEXT: Final = re.compile(rf"(?<!\w)({'|'.join(map(re.escape, _ERRNOS))})(?!\w)", re.I)

_PEERS: Final = re.compile(PEERS, re.I)
_COLLECTIVE_PLACE: Final = re.compile(r"[/\\]torch[/\\](distributed[/\\]|nn[/\\]parallel[/\\]distributed\.py)")
_LOST: Final = re.compile(
    r"connection (was )?(closed|reset|refused|aborted)|broken pipe|socket closed|timed? ?out|remote p(eer|rocess)"
    r"|connectFullMesh|nccl(Remote|System|Internal)Error|unhandled system error|recvValue|Dist(Network|Store)Error",
    re.I,
)
_TIMEOUT: Final = re.compile(r"timed? ?out", re.I)
_CUDA_MESSAGE: Final = re.compile(
    r"\b(CUDA|HIP)( \w+)? error|\[CUDA\]|\bCU(DNN|BLAS|SOLVER|SPARSE|FFT)_|\bcu(dnn|blas|solver|sparse|fft)\w* error"
    r"|AcceleratorError|\bNVML\b",
    re.I,
)
# Faults of the network have one of these types; faults of a GPU also those of other packages.
_NETWORK_FAULT: Final = re.compile(r"(RuntimeError|TimeoutError|(torch|c10|gloo|std)\.[\w.]+)$")
_GPU_FAULT: Final = re.compile(r"(RuntimeError|(\w+\.)+\w+)$")
_RUNPY: Final = re.compile(r"\brunpy(\.py|>)$")  # exits if there is no such program
_PORT_IN_USE: Final = re.compile("in use|EADDRINUSE")
_TYPED: Final = re.compile(r"((?:\w+\.)*[A-Z]\w*): (.*)", re.S)


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
    stopped: bool = False
    """Whether the agent has stopped it after the end of another rank."""
    chain: Sequence[ExceptionFacts] = ()
    """The exceptions that led to its end, the outermost first; empty: only their texts are known."""
    place: str = ""
    """The line of the script in which it hung, outside of collectives and of I/O; empty: somewhere else."""
    child: EndedChild | None = None
    """The helper process of the rank that a signal had killed."""
    remedy: str = ""
    """By the watchdog, if it has seen more than the error's text shows."""

    @property
    def text(self) -> str:
        """The exception as Python prints it."""
        return f"{self.exception_type}: {self.message}"


class Judgement(NamedTuple):
    """The outcome of a worker's end, and if one is known its kind, with the exception that shows it."""

    outcome: Outcome
    kind: FailureKind = UNKNOWN_KIND
    cause: ExceptionFacts = ExceptionFacts()
    timed_out: bool = False
    """Whether the rank gave up a wait for a peer."""


def classify(end: WorkerEnd, *, oom_killed: bool, non_retryable: Collection[int] = ()) -> Outcome:
    """Return the outcome of a worker's end. ``oom_killed``: the kernel killed a process of the container for memory."""
    return judge(end, oom_killed=oom_killed, non_retryable=non_retryable).outcome


def judge(end: WorkerEnd, *, oom_killed: bool, non_retryable: Collection[int] = ()) -> Judgement:
    """Return the outcome and the kind of a worker's end."""
    if end.exception_type == HANG.name:
        return Judgement(EXIT_CODES[EXIT_HANG])
    judgement = _judge_chain(list_exceptions(end)) if end.exception_type else Judgement(judge_exit_code(end.exit_code))
    if end.exit_code in EXIT_CODES:
        return judgement._replace(outcome=EXIT_CODES[end.exit_code])
    if end.exit_code in non_retryable:
        return judgement._replace(outcome=FATAL)
    is_child_killed = judgement.kind is HELPER and end.child is not None and end.child.number == signal.SIGKILL
    if oom_killed and (end.exit_code in _SIGKILL or is_child_killed):
        return judgement._replace(outcome=OUT_OF_MEMORY)
    return judgement


def _judge_chain(chain: Sequence[ExceptionFacts]) -> Judgement:
    judgement = find_kind(chain)
    if judgement is None:
        return _judge_origin(chain)
    if judgement.kind.outcome is None:
        return judgement._replace(outcome=_judge_origin(chain).outcome)
    if judgement.kind is NO_GPU and NO_DEVICES in judgement.cause.message and has_gpu():
        return judgement._replace(outcome=SCRIPT_ERROR)
    return judgement


def list_exceptions(end: WorkerEnd) -> list[ExceptionFacts]:
    """Return the exceptions that led to an end, if necessary from its texts."""
    if end.chain:
        return [complete_facts(facts) for facts in end.chain]
    chain = parse_chain(end.traceback.splitlines()) or [ExceptionFacts()]
    outermost = chain[0]._replace(types=(end.exception_type,), message=shorten(end.message, MESSAGE_PART))
    return [complete_facts(facts) for facts in (outermost, *chain[1:])]


def find_kind(chain: Sequence[ExceptionFacts]) -> Judgement | None:
    """Return the kind of failures to which a chain of exceptions belongs, with its outcome; None if none is known.

    An exception that was handled meanwhile may have nothing to do with the outermost one, and comes last.
    """
    certain = [facts for facts in chain if not facts.handled or facts.errno in _EXHAUSTED]
    possible = [facts for facts in _list_explanations(chain) if facts not in certain]
    for exceptions in (certain, possible):
        # The table's order: a library often wraps an exception of a special kind in one of a general kind.
        for matches, kind, facts in itertools.product(_MATCHES, KINDS, exceptions):
            if matches(kind, facts):
                return Judgement(kind.outcome or SCRIPT_ERROR, kind, facts)
    return None


def complete_facts(facts: ExceptionFacts) -> ExceptionFacts:
    """Return the facts with those that follow from their texts.

    These are the exception in the text of an exit, the bases of a builtin class, and an errno if none was recorded.
    """
    exit_text = _TYPED.match(facts.message) if facts.types[0] == "SystemExit" else None
    if exit_text:
        facts = facts._replace(types=(exit_text[1],), message=exit_text[2], line="")
    builtin = getattr(builtins, facts.types[0], None)
    if len(facts.types) == 1 and isinstance(builtin, type):
        facts = facts._replace(types=tuple(base.__name__ for base in builtin.__mro__))
    return facts if facts.errno is not None else facts._replace(errno=_find_errno(facts))


def _find_errno(facts: ExceptionFacts) -> int | None:
    number = _NUMBER.search(facts.message)
    if number:
        return int(next(filter(None, number.groups())))
    name = None if facts.by_script else _ERRNO_TEXT.search(facts.text)
    return _ERRNOS[name[0].lower()] if name else None


def _list_explanations(chain: Sequence[ExceptionFacts]) -> list[ExceptionFacts]:
    """Return the exceptions that may explain the outermost one."""
    is_mistake = bool(chain) and not _MISTAKES.isdisjoint(chain[0].types)
    return [facts for facts in chain if not (is_mistake and facts.handled)]


def _has_errno(kind: FailureKind, facts: ExceptionFacts) -> bool:
    return facts.errno in kind.errnos and _is_where(kind, facts)


def _has_status(kind: FailureKind, facts: ExceptionFacts) -> bool:
    return facts.status in kind.statuses


def _has_content(kind: FailureKind, facts: ExceptionFacts) -> bool:
    return facts.content in kind.contents


def _has_type(kind: FailureKind, facts: ExceptionFacts) -> bool:
    return any(map(facts.is_a, kind.types)) and not any(map(facts.is_a, kind.unlike)) and _is_where(kind, facts)


def _is_where(kind: FailureKind, facts: ExceptionFacts) -> bool:
    return bool(re.search(kind.where, "\n".join((facts.text, facts.path, facts.place, facts.line, facts.content))))


def _has_words(kind: FailureKind, facts: ExceptionFacts) -> bool:
    if not kind.words or (facts.by_script and not kind.own_words):
        return False
    if kind.errnos and facts.errno is not None and facts.errno not in kind.errnos:
        return False
    return bool(re.search(kind.words, facts.text if facts.message else f"{facts.text}{facts.line}"))


_MATCHES: Final = (_has_content, _has_errno, _has_status, _has_type, _has_words)  # the most certain first


def _judge_origin(chain: Sequence[ExceptionFacts]) -> Judgement:
    """Return the outcome of an exception of no known kind by where it comes from: a peer, a GPU or the script."""
    for facts in _list_explanations(chain):
        if facts.by_script:
            continue
        if _NETWORK_FAULT.match(facts.types[0]) and _is_of_peers(facts):
            return _judge_communication_error(facts)
        if _GPU_FAULT.match(facts.types[0]) and _CUDA_MESSAGE.search(facts.text):
            return Judgement(_CUDA_ERROR, cause=facts)
    outermost = chain[0]
    return Judgement(FATAL if is_unrunnable(outermost) or any(map(outermost.is_a, AT_START)) else SCRIPT_ERROR)


def is_unrunnable(facts: ExceptionFacts) -> bool:
    """Return whether Python has no such program: runpy exits so, and a module's text may be all that is known."""
    return facts.types[0] == "SystemExit" and bool(_RUNPY.search(facts.place) or "No module named" in facts.message)


def _is_of_peers(facts: ExceptionFacts) -> bool:
    """Return whether an exception tells of other ranks: by the library that it names, or by the call that raised it."""
    if REFUSED_ARGUMENTS.match(facts.message) and not _LOST.search(facts.message):
        return False
    if _PEERS.search(facts.text):
        return True
    return bool(_COLLECTIVE_PLACE.search(facts.place) and _LOST.search(facts.message))


def _judge_communication_error(facts: ExceptionFacts) -> Judgement:
    category = NCCL if "nccl" in facts.text.lower() else NETWORK
    peer_lost = bool(_LOST.search(facts.text)) and not _PORT_IN_USE.search(facts.text)
    outcome = Outcome(category.name, EXIT_PEER_LOST if peer_lost else EXIT_RETRYABLE, peer_lost)
    return Judgement(outcome, cause=facts, timed_out=peer_lost and bool(_TIMEOUT.search(facts.text)))


def is_lost_rendezvous(text: str) -> bool:
    """Return whether an error of torchrun's agent, as Python prints it, is the loss of a connection to a peer."""
    return bool(_PEERS.search(text) and _LOST.search(text))

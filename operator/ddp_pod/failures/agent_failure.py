"""Failures that no worker caused: of torchrun's agent, and of the launcher's own tasks for the workers."""

import sys
import time
from dataclasses import replace
from typing import Final, NamedTuple

from ..base.exceptions import describe
from ..base.known_failure import KnownFailure
from ..base.pod import Pod
from ..contract.failure_record import TYPE_LIMIT, Failure
from ..contract.failure_table import CATEGORIES, EXIT_CODES, NETWORK, Outcome
from ..contract.names import EXIT_PEER_LOST, EXIT_RETRYABLE
from ..contract.processes import count_oom_kills
from .kinds import FATAL
from .rules import WorkerEnd, classify, is_lost_rendezvous
from .text import (
    FLAGS_REMEDY,
    JOIN_REMEDY,
    STORE_REMEDY,
    SUPERSEDED_REMEDY,
    TORCH_REMEDY,
    describe_absence,
    describe_exit,
    find_advice,
)

STORE_ERRORS: Final = ("RendezvousConnectionError", "DistNetworkError", "DistStoreError")
"""Errors of an agent that has lost the rendezvous store, by torch's names."""
RENDEZVOUS_CLOSED: Final = "RendezvousClosedError"
# Reasons for which the launcher ends its agent.
MASTER_NOT_FOUND: Final = "MasterNotFound"
SUPERSEDED: Final = "CheckpointSuperseded"
UNUSABLE: Final = "CheckpointStoreUnusable"
UNREACHABLE: Final = "CheckpointStoreUnreachable"
STORE_PROBLEMS: Final = (SUPERSEDED, UNUSABLE, UNREACHABLE)
_PEER_LOST: Final = EXIT_CODES[EXIT_PEER_LOST]
_RETRYABLE: Final = EXIT_CODES[EXIT_RETRYABLE]


class AgentEnd(NamedTuple):
    """The end of torchrun's agent by its own report, or the launcher's reason to end it; empty without a report."""

    result: str = ""
    """``ok``, ``failed`` (workers failed), ``signal`` or ``error``."""
    failure: Failure | None = None
    """The failure, if the result is ``error``."""
    interrupted: bool = False
    """Whether another pod was asked to stop before this one."""

    @property
    def reason(self) -> str:
        """The type name of the error; empty without one."""
        return self.failure.exception_type if self.failure is not None else ""


class ArgumentError(KnownFailure):
    """torchrun refuses one of the user's options."""

    def __init__(self, problem: str) -> None:
        super().__init__(f"torchrun refused its options: {problem}", FATAL, FLAGS_REMEDY)


class CauseUnknownError(KnownFailure):
    """Another restart of the workers would not help."""

    def __init__(self) -> None:
        message = "the ranks lost their peers again without progress, and no pod has reported why"
        super().__init__(message, _PEER_LOST, NETWORK.remedy)


RUN_OVER: Final = (RENDEZVOUS_CLOSED, CauseUnknownError.__name__)
"""Errors of an agent whose last restart has not started any worker."""


class _Verdict(NamedTuple):
    outcome: Outcome
    message: str
    remedy: str


def examine_agent_error(pod: Pod, error: BaseException) -> Failure:
    """Return the classified failure of torchrun's agent from the exception that ended it."""
    known = describe(error)
    name = known["type"]
    if isinstance(error, KnownFailure):
        verdict = _Verdict(error.outcome, known["message"], error.remedy)
    else:
        verdict = _judge_torchrun_error(pod, name, known["message"])
    return replace(_build_failure(pod, name, verdict), traceback=known["traceback"])


def _judge_torchrun_error(pod: Pod, name: str, message: str) -> _Verdict:
    master = f"{pod.master}:{pod.port}"
    text = f"{name}: {message}"
    if name == "RendezvousTimeoutError":
        limit = f"within {pod.join_timeout_seconds:g} s"
        return _Verdict(_PEER_LOST, f"not all {pod.nodes} pods joined the rendezvous at {master} {limit}", JOIN_REMEDY)
    if name.startswith("Rendezvous") or is_lost_rendezvous(text):
        return _Verdict(_PEER_LOST, f"lost the rendezvous at {master}: {text}", NETWORK.remedy)
    if name == "ModuleNotFoundError":
        return _Verdict(FATAL, f"{sys.executable} cannot run torchrun: {message}", TORCH_REMEDY)
    return _Verdict(_RETRYABLE, f"torchrun failed: {text}", find_advice(text))


def examine_agent_exit(pod: Pod, status: int) -> Failure:
    """Return the failure of an agent that ended without a report. ``status``: negative for a signal."""
    outcome = classify(WorkerEnd(status), oom_killed=count_oom_kills() > pod.oom_kills)
    message = f"torchrun's agent {describe_exit(status)}"
    return _build_failure(pod, "", _Verdict(outcome, message, CATEGORIES[outcome.category].remedy))


def build_absence_failure(pod: Pod, problem: str) -> Failure:
    """Return the failure of a pod that has not reached pod 0. ``problem``: of the last attempt."""
    message, remedy = describe_absence(pod, problem)
    return _build_failure(pod, MASTER_NOT_FOUND, _Verdict(_PEER_LOST, message, remedy))


def build_move_failure(pod: Pod, address: str) -> Failure:
    """Return the failure of an agent whose store was lost with pod 0. ``address``: of the new pod 0."""
    message = f"lost the rendezvous store with pod 0, which was replaced; the new one is at {address}:{pod.port}"
    return _build_failure(pod, STORE_ERRORS[0], _Verdict(_PEER_LOST, message, NETWORK.remedy))


def build_store_failure(pod: Pod, problem: str, message: str) -> Failure:
    """Return the failure of a pod without its checkpoints. ``problem``: one of STORE_PROBLEMS."""
    if problem == SUPERSEDED:
        verdict = _Verdict(_PEER_LOST, message, SUPERSEDED_REMEDY)
    elif problem == UNUSABLE:
        verdict = _Verdict(FATAL, message, STORE_REMEDY)
    else:
        verdict = _Verdict(Outcome(NETWORK.name, EXIT_RETRYABLE), message, STORE_REMEDY)
    return _build_failure(pod, problem, verdict)


def _build_failure(pod: Pod, name: str, verdict: _Verdict) -> Failure:
    outcome = verdict.outcome
    return Failure(
        category=outcome.category,
        container_exit_code=outcome.exit_code,
        secondary=outcome.secondary,
        pod_index=pod.node,
        exception_type=name[:TYPE_LIMIT],
        message=verdict.message,
        remedy=verdict.remedy,
        time=time.time(),
    )

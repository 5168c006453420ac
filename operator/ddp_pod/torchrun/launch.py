"""The process of torchrun's agent, which the fork server forks for the launcher."""

import ctypes
import importlib
import os
import socket
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NoReturn

from ..base.files import log
from ..base.pod import Pod
from ..contract.names import ENV_AGENT_PID
from ..failures.agent_failure import AgentEnd, examine_agent_error
from .channel import AgentRequest, Started, StoreStarted
from .fork_server import AgentFork
from .frames import decode
from .launcher_channel import LauncherChannel
from .part import AgentPart

_CPP_LOG_LEVEL = "TORCH_CPP_LOG_LEVEL"


LoadParts = Callable[[Pod], Sequence[AgentPart]]


def run_agent(fork: AgentFork, load_parts: LoadParts) -> NoReturn:
    """Become torchrun's agent. ``load_parts``: returns the features' parts in it."""
    code = 1
    try:
        os.environ[ENV_AGENT_PID] = str(os.getpid())
        code = _run_agent(fork, load_parts)
    except BaseException as error:
        log("".join(traceback.format_exception(type(error), error, error.__traceback__)))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _run_agent(fork: AgentFork, load_parts: LoadParts) -> int:
    """Run torchrun in this process and report to the launcher. Returns the exit code."""
    request: AgentRequest = decode(fork.request)
    channel = socket.socket(fileno=fork.descriptors[0])
    launcher = LauncherChannel(channel)
    launcher.report(Started(os.getpid(), fork.server))
    try:
        if fork.problem is not None:
            raise fork.problem
        _host_store(request, channel, launcher, fork.descriptors[1:])
        agent: Any = importlib.import_module(".agent", __package__)
        parts = load_parts(request.pod)
        if not launcher.wait_for_release():
            return 1
        end: AgentEnd = agent.run_torchrun(request, launcher, fork.forker, parts)
    except Exception as error:
        end = AgentEnd("error", examine_agent_error(request.pod, error))
    launcher.report(end)
    return 0 if end.result == "ok" else 1


def _host_store(
    request: AgentRequest, channel: socket.socket, launcher: LauncherChannel, guards: Sequence[int]
) -> None:
    """Prepare PyTorch's log, and host the rendezvous store if there is a guard of it."""
    torch: Any = importlib.import_module("torch")
    # A store that ends before its clients logs C++ stacks, even in a successful run.
    log_errors_only(torch)
    for guard in guards:
        store: Any = importlib.import_module(".store", __package__)
        pod = request.pod
        launcher.report(StoreStarted(store.fork_store(pod.store_address, pod.port, guard, channel)))
        os.close(guard)


def log_errors_only(torch: Any) -> None:
    """Limit the log of this process's C++ code to errors, unless the pod's environment sets the level."""
    if os.environ.get(_CPP_LOG_LEVEL):
        return
    os.environ[_CPP_LOG_LEVEL] = "ERROR"
    with suppress(OSError, AttributeError):  # where the symbol has another name the log is longer
        ctypes.CDLL(os.path.join(os.path.dirname(torch.__file__), "lib", "libc10.so"))._ZN3c1011initLoggingEv()
    del os.environ[_CPP_LOG_LEVEL]

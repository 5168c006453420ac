"""The process of torchrun's agent, which the fork server forks for the launcher."""

import ctypes
import importlib
import os
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from ..base.pod import Pod, decode_pod
from ..contract.records import to_json
from ..failures.agent_failure import examine_agent_error
from .channel import AgentRequest, LauncherChannel
from .fork_server import RankForker

_CPP_LOG_LEVEL = "TORCH_CPP_LOG_LEVEL"


def run_agent(
    raw: Mapping[str, Any],
    channel: socket.socket,
    guards: Sequence[int],
    problem: Exception | None,
    forker: RankForker | None,
) -> int:
    """Run torchrun in this process and report to the launcher over ``channel``. Returns the exit code.

    ``raw``: an AgentRequest; ``guards``: of the store that this agent hosts; ``problem``: why torch could not be
    imported.
    """
    request = AgentRequest(**raw)
    pod = decode_pod(request.pod)
    launcher = LauncherChannel(channel)
    try:
        if problem is not None:
            raise problem
        _host_store(pod, channel, launcher, guards)
        agent: Any = importlib.import_module(".agent", __package__)
        if not launcher.wait_for_release():
            return 1
        arguments = agent.parse_arguments([*request.flags, "--no-python", *request.entry])
        result = agent.run_torchrun(pod, arguments, launcher, forker, request.restarts)
    except Exception as error:
        result = {"result": "error", "failure": to_json(examine_agent_error(pod, error))}
    launcher.report(result)
    return 0 if result["result"] == "ok" else 1


def _host_store(pod: Pod, channel: socket.socket, launcher: LauncherChannel, guards: Sequence[int]) -> None:
    torch: Any = importlib.import_module("torch")
    # A store that ends before its clients logs C++ stacks, even in a successful run.
    log_errors_only(torch)
    for guard in guards:
        store: Any = importlib.import_module(".store", __package__)
        launcher.report({"store": store.fork_store(pod.store_address, pod.port, guard, channel)})
        os.close(guard)


def log_errors_only(torch: Any) -> None:
    """Limit the log of this process's C++ code to errors, unless the pod's environment sets the level."""
    if os.environ.get(_CPP_LOG_LEVEL):
        return
    os.environ[_CPP_LOG_LEVEL] = "ERROR"
    with suppress(OSError, AttributeError):  # where the symbol has another name the log is longer
        ctypes.CDLL(os.path.join(os.path.dirname(torch.__file__), "lib", "libc10.so"))._ZN3c1011initLoggingEv()
    del os.environ[_CPP_LOG_LEVEL]

"""torchrun's agent: a forked child of the launcher, the only one that imports torch."""

from __future__ import annotations

import importlib
import json
import os
import select
import socket
from typing import Any

from .pod import Pod
from .rendezvous_store import fork_store
from .torchrun_patches import adapt_torchrun
from .tracebacks import describe

_CPP_LOG_LEVEL = "TORCH_CPP_LOG_LEVEL"
REPEATED, NEW = b"r", b"n"  # the launcher's reply to the agent's report of failures
_SECONDS_FOR_REPLY = 10.0


def agent_main(pod: Pod, flags: list[str], entry: list[str], channel: socket.socket, store_guard: int | None) -> int:
    """Run torchrun in this process and report to the launcher over ``channel``. Returns the exit code."""

    def report(event: dict[str, Any]) -> None:
        channel.sendall(json.dumps(event).encode() + b"\n")

    def is_repeated(event: dict[str, Any]) -> bool:
        """Report failures; the launcher replies whether they repeat an earlier one."""
        report(event)
        return bool(select.select([channel], [], [], _SECONDS_FOR_REPLY)[0]) and channel.recv(1) == REPEATED

    try:
        quiet = os.environ.setdefault(_CPP_LOG_LEVEL, "") == ""
        if quiet:  # a store that ends before its clients fills the log with C++ stacks, also when all is well
            os.environ[_CPP_LOG_LEVEL] = "ERROR"
        torch = importlib.import_module("torch")
        if quiet:
            del os.environ[_CPP_LOG_LEVEL]  # the workers' own logs stay as they are
        if store_guard is not None:
            report({"store": fork_store(torch, pod.port, store_guard, channel)})
            os.close(store_guard)
        torchrun = importlib.import_module("torch.distributed.run")
        leave = adapt_torchrun(pod, report, is_repeated)
        if channel.recv(1) != b"g":  # the launcher sends it when the master is reachable
            return 1
        errors = importlib.import_module("torch.distributed.elastic.multiprocessing.errors")
        processes = importlib.import_module("torch.distributed.elastic.multiprocessing.api")
    except Exception as error:
        report({"result": "error", **describe(error)})
        return 1
    try:
        arguments = torchrun.parse_args([*flags, "--no-python", *entry])
    except SystemExit:
        report(
            {"result": "error", "type": "ArgumentError", "message": "torchrun refused its arguments", "traceback": ""}
        )
        return 2
    try:
        torchrun.run(arguments)
    except errors.ChildFailedError:
        report({"result": "failed"})  # which worker and why was reported when it happened
        return 1
    except processes.SignalException as error:
        leave()
        report({"result": "signal", "signal": int(error.sigval)})
        return 1
    except Exception as error:
        report({"result": "error", **describe(error)})
        return 1
    report({"result": "ok"})
    return 0

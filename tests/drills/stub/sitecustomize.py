"""A stand-in for torchrun, so that the soak's jobs need not import PyTorch. Python imports it at its start.

It contains the parts of torch that the launcher uses, joins the other pods in a folder (``DRILL_MEETING``) and starts
one worker. The soak tests the launcher, its agent and store, the shim and the local cluster.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import types
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any


def _nodes() -> int:
    return int(json.loads(os.environ["DDP_LAUNCHER_CONFIG"])["nodes"])


class MemoryStore:
    """The methods of a store that agents of one pod call."""

    def __init__(self, *_: Any) -> None:
        self._values: dict[str, str] = {}

    def add(self, key: str, amount: int) -> int:
        self._values[key] = str(int(self._values.get(key, "0")) + amount)
        return int(self._values[key])

    def set(self, key: str, value: str) -> None:
        self._values[key] = value

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        if key not in self._values and expected:
            return expected.encode()
        if self._values.get(key, "") == expected:
            self._values[key] = desired
        return self._values[key].encode()


class TCPStore(MemoryStore):
    """Listens, so that the other pods find that the master exists."""

    def __init__(self, host: str, port: int, *_: Any, master_listen_fd: int | None = None, **__: Any) -> None:
        super().__init__()
        self._socket = None if master_listen_fd is None else socket.socket(fileno=master_listen_fd)


class SignalException(Exception):
    """The agent received a signal to stop."""

    def __init__(self, message: str, number: signal.Signals) -> None:
        super().__init__(message)
        self.sigval = number


class WorkerState(StrEnum):
    HEALTHY = "HEALTHY"
    FAILED = "FAILED"
    SUCCEEDED = "SUCCEEDED"


@dataclass
class RunResult:
    state: WorkerState
    failures: Any = None
    return_values: Any = None


@dataclass
class WorkerSpec:
    entrypoint: str
    args: tuple[str, ...]
    rdzv_handler: Any
    local_world_size: int = 1
    max_restarts: int = 0
    master_addr: str | None = None
    master_port: int | None = None


class LocalElasticAgent:
    """Starts one worker and waits for it."""

    def __init__(self, spec: WorkerSpec, logs_specs: Any = None) -> None:
        self._group = types.SimpleNamespace(spec=spec, workers=[], store=MemoryStore(), group_world_size=1)

    def get_worker_group(self) -> Any:
        return self._group

    def _rendezvous(self, group: Any) -> None:
        nodes = _nodes()
        place = Path(os.environ["DRILL_MEETING"], os.environ["DDP_RUN_ID"])
        place.mkdir(exist_ok=True)
        (place / os.environ["JOB_COMPLETION_INDEX"]).touch()
        while len(list(place.iterdir())) < nodes:
            time.sleep(0.01)

    def _start_workers(self, group: Any) -> dict[int, int]:
        rank = os.environ.get("JOB_COMPLETION_INDEX", "0")
        ranks = {"RANK": rank, "LOCAL_RANK": "0", "WORLD_SIZE": str(_nodes())}
        command = [group.spec.entrypoint, *(word.replace("${local_rank}", "0") for word in group.spec.args)]
        self._worker = subprocess.Popen(command, env=os.environ | ranks)
        return {0: self._worker.pid}

    def _shutdown(self, death_sig: Any = None) -> None:
        pass

    def run(self) -> RunResult:
        """Run a worker to its end."""
        self._rendezvous(self._group)
        self._start_workers(self._group)
        return RunResult(WorkerState.FAILED if self._worker.wait() else WorkerState.SUCCEEDED)


class RendezvousHandler:
    """The base class of the launcher's handler, whose rounds are not used: the agents join in a folder."""


def parse_args(words: Sequence[str]) -> Sequence[str]:
    """Return the worker's command line, which follows the flags."""
    return list(words[words.index("--no-python") + 1 :])


def config_from_args(command: Sequence[str]) -> tuple[Any, str, list[str]]:
    """Return a configuration and the worker's command line."""
    config = types.SimpleNamespace(
        rdzv_backend="c10d",
        rdzv_endpoint="",
        run_id="",
        min_nodes=1,
        max_nodes=1,
        local_addr="",
        rdzv_configs={},
        nproc_per_node=1,
    )
    return config, command[0], list(command[1:])


def _module(name: str, **members: Any) -> None:
    module = sys.modules[name] = types.ModuleType(name)
    vars(module).update(members)
    parent, _, last = name.rpartition(".")
    if parent:
        if parent not in sys.modules:
            _module(parent)
        setattr(sys.modules[parent], last, module)


def _nothing(*_: Any, **__: Any) -> Any:
    return types.SimpleNamespace()


_ELASTIC = "torch.distributed.elastic"
_module("torch")
_module("torch.distributed", TCPStore=TCPStore, HashStore=MemoryStore, PrefixStore=_nothing)
_module(
    "torch.distributed.run",
    get_args_parser=lambda: types.SimpleNamespace(parse_args=parse_args),
    config_from_args=config_from_args,
)
_module(
    f"{_ELASTIC}.agent.server.api",
    RunResult=RunResult,
    Worker=_nothing,
    WorkerGroup=object,
    WorkerSpec=WorkerSpec,
    WorkerState=WorkerState,
)
_module(f"{_ELASTIC}.agent.server.local_elastic_agent", LocalElasticAgent=LocalElasticAgent)
_module(f"{_ELASTIC}.multiprocessing", SignalException=SignalException)
_module(f"{_ELASTIC}.multiprocessing.errors", ProcessFailure=_nothing)
_module(f"{_ELASTIC}.multiprocessing.tail_log", TailLog=_nothing)
_module(f"{_ELASTIC}.utils", macros=None)
_module(f"{_ELASTIC}.rendezvous", RendezvousParameters=_nothing)
_module(f"{_ELASTIC}.rendezvous.api", RendezvousHandler=RendezvousHandler)
_module(f"{_ELASTIC}.rendezvous.registry", get_rendezvous_handler=_nothing)

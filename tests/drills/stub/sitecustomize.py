"""Python finds this at its start: a stand-in for torchrun, so that the soak's jobs need not import PyTorch.

It has as much of torch as the launcher touches, meets the other pods in a folder (``DRILL_MEETING``) and starts one
worker. What soaks is ours: the launcher, its agent and store, the shim, the local cluster.
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
from pathlib import Path
from typing import Any


def _nodes() -> int:
    return int(json.loads(os.environ["DDP_LAUNCHER_CONFIG"])["nodes"])


class TCPStore:
    """Listens, so that the other pods find that the master is there."""

    def __init__(self, host: str, port: int, *_: Any, **__: Any) -> None:
        self._socket = socket.create_server(("127.0.0.1", port), backlog=64)

    def check(self, keys: list[str]) -> bool:
        return False


class ChildFailedError(Exception):
    """A worker failed."""


class SignalException(Exception):
    """The agent was told to stop."""

    sigval = signal.SIGTERM


class PContext:
    def close(self, death_sig: Any = None, timeout: float = 30) -> None:
        pass

    def pids(self) -> dict[int, int]:
        return {}


class SubprocessHandler:
    def __init__(self) -> None:
        self._stdout = self._stderr = None

    def _popen(self, args: Any, env: Any) -> None:
        pass


class DynamicRendezvousHandler:
    def __init__(self) -> None:
        self._state_holder = self._op_executor = None

    def num_nodes_waiting(self) -> int:
        return 0


class BackendRendezvousStateHolder:
    def __init__(self, cache_duration: float = 1.0) -> None:
        self._state = self._settings = self._backend = None

    def _sanitize(self) -> None:
        pass


class DistributedRendezvousOpExecutor:
    def __init__(self) -> None:
        self._node = self._state_holder = None

    def run(self) -> None:
        pass


class C10dRendezvousBackend:
    def __init__(self) -> None:
        self._key = ""

    def _call_store(self) -> None:
        pass


class RendezvousJoinOp:
    def __call__(self) -> None:
        pass


class Action:
    SYNC = KEEP_ALIVE = MARK_RENDEZVOUS_COMPLETE = None


class NodeDescGenerator:
    def generate(self, local_addr: str | None = None) -> None:
        pass


class LocalElasticAgent:
    """Starts one worker and waits for it."""

    def __init__(self) -> None:
        self._store = self._worker_group = self._remaining_restarts = self._pcontext = None

    def _rendezvous(self) -> None:
        nodes = _nodes()
        place = Path(os.environ["DRILL_MEETING"], os.environ["DDP_RUN_ID"])
        place.mkdir(exist_ok=True)
        (place / os.environ["JOB_COMPLETION_INDEX"]).touch()
        while len(list(place.iterdir())) < nodes:
            time.sleep(0.01)

    def _start_workers(self) -> None:
        pass

    def _restart_workers(self) -> None:
        pass

    def _monitor_workers(self) -> None:
        pass

    def _exit_barrier(self) -> None:
        pass

    def run(self, command: Sequence[str]) -> int:
        """Run a worker; return its exit code."""
        self._rendezvous()
        rank = os.environ.get("JOB_COMPLETION_INDEX", "0")
        ranks = {"RANK": rank, "LOCAL_RANK": "0", "WORLD_SIZE": str(_nodes())}
        worker = subprocess.Popen([word.replace("${local_rank}", "0") for word in command], env=os.environ | ranks)
        self._start_workers()
        return worker.wait()


def parse_args(words: Sequence[str]) -> Sequence[str]:
    """Return the worker's command line: what stands behind the flags."""
    return list(words[words.index("--no-python") + 1 :])


def run(command: Sequence[str]) -> None:
    """Be torchrun."""
    if LocalElasticAgent().run(command):
        raise ChildFailedError


def _module(name: str, **members: Any) -> None:
    module = sys.modules[name] = types.ModuleType(name)
    vars(module).update(members)
    parent, _, last = name.rpartition(".")
    if parent:
        if parent not in sys.modules:
            _module(parent)
        setattr(sys.modules[parent], last, module)


_module("torch")
_module("torch.distributed", TCPStore=TCPStore)
_module("torch.distributed.run", parse_args=parse_args, run=run)
_module("torch.distributed.elastic.multiprocessing.errors", ChildFailedError=ChildFailedError)
_module(
    "torch.distributed.elastic.multiprocessing.api",
    PContext=PContext,
    SubprocessHandler=SubprocessHandler,
    SignalException=SignalException,
    _terminate_process_handler=None,
)
_module("torch.distributed.elastic.agent.server.local_elastic_agent", LocalElasticAgent=LocalElasticAgent)
_module("torch.distributed.elastic.rendezvous.c10d_rendezvous_backend", C10dRendezvousBackend=C10dRendezvousBackend)
_module(
    "torch.distributed.elastic.rendezvous.dynamic_rendezvous",
    DynamicRendezvousHandler=DynamicRendezvousHandler,
    _NodeDescGenerator=NodeDescGenerator,
    _BackendRendezvousStateHolder=BackendRendezvousStateHolder,
    _RendezvousJoinOp=RendezvousJoinOp,
    _DistributedRendezvousOpExecutor=DistributedRendezvousOpExecutor,
    _RendezvousExitOp=None,
    _RendezvousCloseOp=None,
    _RendezvousState=None,
    _Action=Action,
    _delay=None,
    _should_keep_alive=None,
)

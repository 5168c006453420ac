"""This pod: its plan, its environment, its runtime directory and its clock."""

import dataclasses
import os
from typing import NamedTuple

from ..contract.names import (
    EXIT_USER_ERROR,
)
from ..contract.plan import PodPlan, loopback_address
from .files import read_json


class PodSetupError(Exception):
    """The ranks cannot start. ``exit_code``: the launcher's; ``output``: the last lines of the failed command."""

    def __init__(self, message: str, hint: str, exit_code: int = EXIT_USER_ERROR, output: str = "") -> None:
        super().__init__(message)
        self.hint = hint
        self.exit_code = exit_code
        self.output = output


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pod(PodPlan):
    """One pod of the job.

    ``oom_kills``: the cgroup's count before the ranks start; ``run_id``: of the attempt;
    ``steps``: the run's total, if an option of the script's command sets it. ``ip``: of this pod, empty if unknown;
    ``secret``: with which the pods of the attempt sign what they exchange in the rendezvous store; ``identity``: of
    this launcher, which tells the pod apart from another one in its place.
    """

    node: int
    master: str
    port: int
    grace: float
    metrics_port: int
    runtime: str
    oom_kills: int
    steps: int | None = None
    ip: str = ""
    secret: str = ""
    identity: str = ""
    run_id: str = "run"

    @property
    def local(self) -> bool:
        """Whether all pods are on this machine (`ddp run`)."""
        return self.master == "localhost" or self.master.startswith("127.")

    @property
    def is_multi_node(self) -> bool:
        """Whether the pod has a rendezvous with other pods."""
        return self.nodes > 1 or self.elastic

    @property
    def address(self) -> str:
        """The host at which other pods reach this one."""
        if not self.is_multi_node:
            return "127.0.0.1"
        return loopback_address(self.node) if self.local else self.pod_host.format(self.node)

    @property
    def store_address(self) -> str:
        """The address on which pod 0 serves the rendezvous store; empty for all."""
        return self.master if self.local else self.ip

    @property
    def store_host(self) -> str:
        """The host at which this pod reaches the rendezvous store."""
        if self.node == 0 and not self.local:
            return self.ip or "localhost"
        return self.master


class WorkerRecord(NamedTuple):
    """The record of a worker's process, written by its shim.

    ``kind``: script, module, code or program; ``started``: Unix time; ``store``: address of torchrun's store, and
    ``run``: its id, as the environment has them.
    """

    pid: int
    rank: int
    local_rank: int
    restart: int
    world_size: int | None = None
    kind: str = ""
    started: float = 0.0
    store: str = ""
    run: str = ""


def read_worker(pod: Pod, local_rank: int) -> WorkerRecord | None:
    """Return the record of a worker; None before its shim has written it."""
    return read_worker_file(os.path.join(pod.runtime, "workers", f"{local_rank}.json"))


def list_workers(pod: Pod) -> list[WorkerRecord]:
    """Return the records of this pod's workers."""
    folder = os.path.join(pod.runtime, "workers")
    records = [read_worker_file(os.path.join(folder, name)) for name in os.listdir(folder) if name.endswith(".json")]
    return [record for record in records if record is not None]


def read_worker_file(path: str) -> WorkerRecord | None:
    """Return the record in a file; None if it has none."""
    raw = read_json(path)
    if not all(isinstance(raw.get(key), int) for key in ("pid", "rank", "localRank", "restart")):
        return None
    world_size = raw.get("worldSize")
    started = raw.get("started")
    return WorkerRecord(
        pid=raw["pid"],
        rank=raw["rank"],
        local_rank=raw["localRank"],
        restart=raw["restart"],
        world_size=world_size if isinstance(world_size, int) else None,
        kind=str(raw.get("kind", "")),
        started=started if isinstance(started, float) else 0.0,
        store=str(raw.get("store", "")),
        run=str(raw.get("run", "")),
    )

"""This pod: its plan, its environment, its runtime directory and its clock."""

import dataclasses
import json
import math
import os
from collections.abc import Mapping
from typing import Final, NamedTuple

from ..contract.names import (
    DEFAULT_RENDEZVOUS_PORT,
    ENV_COMPLETION_INDEX,
    ENV_GRACE_SECONDS,
    ENV_LAUNCHER_CONFIG,
    ENV_MASTER_ADDR,
    ENV_MASTER_PORT,
    ENV_METRICS_PORT,
    ENV_POD_IP,
    ENV_RENDEZVOUS_SECRET,
    ENV_RUN_ID,
    ENV_RUNTIME_DIR,
    EXIT_USER_ERROR,
    STOPPING_FILE,
)
from ..contract.plan import VERSION, PodPlan, decode_plan, from_json, loopback_address
from ..contract.processes import count_oom_kills, read_cpu_quota
from .files import read_json

_IDENTITY_BYTES: Final = 8


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


def decode_pod(text: str) -> Pod:
    """Read a pod from the output of ``encode_plan``."""
    pod: Pod = from_json(Pod, json.loads(text))
    return pod


def read_pod(env: Mapping[str, str], runtime: str) -> Pod:
    """Return the pod. Raises: ValueError that names the variable."""

    def number(name: str, default: float) -> float:
        try:
            return float(env.get(name) or default)
        except ValueError:
            raise ValueError(f"{name}={env[name]!r} is not a number") from None

    plan = decode_plan(env.get(ENV_LAUNCHER_CONFIG))
    if plan.version != VERSION:
        raise ValueError(
            f"{ENV_LAUNCHER_CONFIG} has version {plan.version}, but this launcher reads version {VERSION}; mount the "
            "launcher of the operator that created the Job"
        )
    pod = Pod(
        **vars(plan),
        node=int(number(ENV_COMPLETION_INDEX, 0)),
        master=env.get(ENV_MASTER_ADDR) or "127.0.0.1",
        port=int(number(ENV_MASTER_PORT, DEFAULT_RENDEZVOUS_PORT)),
        grace=number(ENV_GRACE_SECONDS, 30),
        metrics_port=int(number(ENV_METRICS_PORT, 0)),
        runtime=runtime,
        oom_kills=count_oom_kills(),
        ip=env.get(ENV_POD_IP, ""),
        secret=env.get(ENV_RENDEZVOUS_SECRET, "").strip(),
        identity=os.urandom(_IDENTITY_BYTES).hex(),
        run_id=env.get(ENV_RUN_ID) or "run",
    )
    if pod.is_multi_node and not pod.secret:
        raise ValueError(
            f"{ENV_RENDEZVOUS_SECRET} is empty, so any client of the rendezvous could restart the ranks; give all pods "
            "of the attempt the same random value, as the operator and `ddp run` do"
        )
    return pod


def default_threads(nproc: int) -> str | None:
    """Return the default of OMP_NUM_THREADS: the cgroup's CPUs per worker; without a quota torchrun's default."""
    cpus = read_cpu_quota()
    if cpus is not None:
        return str(max(1, math.floor(cpus / nproc)))
    return "1" if nproc > 1 else None


class RuntimeDirectory(NamedTuple):
    """The pod's private folder. ``is_temporary``: whether the launcher created it and removes it at its end."""

    path: str
    is_temporary: bool


def list_temporary_folders() -> list[str]:
    """Return the folders that may contain a launcher's private folder, the first choice first."""
    return [folder for folder in (os.environ.get("TMPDIR", ""), "/tmp", "/dev/shm", os.getcwd()) if folder]


def make_runtime_dir() -> RuntimeDirectory:
    """Create the pod's private folder: the configured one, or one below the first writable folder.

    Raises: ValueError.
    """
    configured = os.environ.get(ENV_RUNTIME_DIR)
    if configured:
        candidates = [configured]
    else:
        name = f"ddp-{os.getpid()}-{os.urandom(6).hex()}"
        candidates = [os.path.join(parent, name) for parent in list_temporary_folders()]
    problem: OSError | None = None
    for path in candidates:
        try:
            _prepare_runtime_dir(path)
        except OSError as error:
            problem = error
            continue
        return RuntimeDirectory(path, not configured)
    raise ValueError(f"no folder for temporary files: {problem}; mount an emptyDir at /tmp")


def _prepare_runtime_dir(path: str) -> None:
    """Create the subfolders and remove the files of a former launcher. Raises: OSError."""
    for name in ("metrics", "workers", "errors", "groups", "stacks", "output"):
        folder = os.path.join(path, name)
        os.makedirs(folder, mode=0o700, exist_ok=True)
        for stale in os.listdir(folder):
            os.unlink(os.path.join(folder, stale))
    if os.path.exists(os.path.join(path, STOPPING_FILE)):
        os.unlink(os.path.join(path, STOPPING_FILE))


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


class AwakeClock:
    """Seconds that this process has observed; a pause in which it was frozen counts at most ``most``.

    A suspended machine, ``docker pause`` or a machine without a free CPU freezes the watched processes too, and nothing
    checks them meanwhile: such a pause must not use up their time limits. Times are of a monotonic clock.
    """

    def __init__(self, most: float, now: float) -> None:
        self._most = most
        self._last = now
        self._seen = 0.0

    def tick(self, now: float) -> float:
        """Record a check, and return its time."""
        self._seen = self.read(now)
        self._last = now
        return self._seen

    def read(self, now: float) -> float:
        """Return the time between two checks."""
        return self._seen + min(max(0.0, now - self._last), self._most)

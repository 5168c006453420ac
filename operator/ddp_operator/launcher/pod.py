"""This pod as its environment describes it, and what follows from it for torchrun.

What the operator configures is one JSON document in one variable, of the same type on both sides.
"""

import dataclasses
import json
import math
import os
from typing import Any, Optional, Sequence

from .contract import (
    DEFAULT_RENDEZVOUS_PORT,
    ENV_COMPLETION_INDEX,
    ENV_GRACE_SECONDS,
    ENV_LAUNCHER_CONFIG,
    ENV_MASTER_ADDR,
    ENV_MASTER_PORT,
    ENV_METRICS_PORT,
    ENV_RUNTIME_DIR,
    EXIT_USER_ERROR,
    STOPPING_FILE,
)
from .files import read_json
from .processes import count_oom_kills, read_cpu_quota


class PodSetupError(Exception):
    """What the ranks need is not there. ``exit_code``: the launcher's; ``output``: last lines of what has failed."""

    def __init__(self, message: str, hint: str, exit_code: int = EXIT_USER_ERROR, output: str = "") -> None:
        super().__init__(message)
        self.hint, self.exit_code, self.output = hint, exit_code, output


@dataclasses.dataclass(frozen=True)
class WatchdogConfig:
    """spec.watchdog."""

    start_seconds: float
    stall_seconds: float
    checkpoint_seconds: float
    action: str


@dataclasses.dataclass(frozen=True)
class PreflightConfig:
    """spec.preflight and spec.network, where there is something to check. ``fail``: a problem ends the pod.

    ``require``: a problem of the network between the ranks does so in any case. ``transports``: what may carry their
    data, by the names of ``nccl_log``; empty: anything, but for sockets where ``require`` is set.
    """

    fail: bool
    checks: tuple[str, ...]
    min_bytes_per_second: float
    min_pair_bytes_per_second: float = 0.0
    require: bool = False
    transports: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class CodeConfig:
    """spec.code: the archive, the folder that it becomes, and where the packages of ``requirements`` go."""

    archive: str
    digest: str
    folder: str
    requirements: Optional[str]
    packages: str


@dataclasses.dataclass(frozen=True)
class CheckpointStoreConfig:
    """spec.checkpoint, where it has a URL: of the folder's snapshots there the newest ``keep`` are kept."""

    url: str
    keep: int


@dataclasses.dataclass(frozen=True)
class LauncherConfig:
    """A job as all of its pods see it; of an elastic one ``nodes`` are those at its start. ``spares`` wait beside them.

    ``restarts_without_progress``: after so many failures in a row without a new step the workers are not restarted in
    the same pods any more; None: always.
    """

    nodes: int
    spares: int
    nproc_per_node: int
    elastic: bool
    in_place_restarts: int
    restarts_without_progress: Optional[int]
    join_timeout_seconds: float
    non_retryable_exit_codes: tuple[int, ...]
    success_policy: str
    watchdog: Optional[WatchdogConfig]
    preflight: Optional[PreflightConfig]
    checkpoint: Optional[CheckpointStoreConfig]
    log_patterns: tuple[str, ...]
    epochs: Optional[int]
    warm_start: bool
    code: Optional[CodeConfig]

    @property
    def regroups(self) -> bool:
        """Whether pods may join and leave the group while the job runs."""
        return self.elastic or self.spares > 0

    @property
    def awaits_peers(self) -> bool:
        """Whether the workers start again for free, and wait for the others, where only a peer was lost."""
        budget = self.in_place_restarts > 0 and self.restarts_without_progress is not None
        return self.elastic or (self.nodes > 1 and budget)


_NESTED = {
    "watchdog": WatchdogConfig,
    "preflight": PreflightConfig,
    "checkpoint": CheckpointStoreConfig,
    "code": CodeConfig,
}


def encode_config(config: LauncherConfig) -> str:
    """Return the document."""
    return json.dumps(_to_json(config), separators=(",", ":"))


def decode_config(text: Optional[str]) -> LauncherConfig:
    """Read the document. Raises: ValueError that names the variable and the field."""
    if not text:
        raise ValueError(f"{ENV_LAUNCHER_CONFIG} is not set; pods are started by the operator or `ddp run`")
    try:
        config: LauncherConfig = _from_json(LauncherConfig, json.loads(text))
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{ENV_LAUNCHER_CONFIG} cannot be read: {type(error).__name__}: {error}") from None
    return config


def decode_pod(text: str) -> "Pod":
    """Read what ``encode_config`` made of a pod."""
    pod: Pod = _from_json(Pod, json.loads(text))
    return pod


def _to_json(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return {_key(field): _to_json(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return value


def _from_json(kind: Any, raw: Any) -> Any:
    values = {field.name: raw[_key(field)] for field in dataclasses.fields(kind)}
    for name, value in values.items():
        if name in _NESTED and value is not None:
            values[name] = _from_json(_NESTED[name], value)
        elif isinstance(value, list):
            values[name] = tuple(value)
    return kind(**values)


def _key(field: Any) -> str:
    first, *others = str(field.name).split("_")
    return first + "".join(word.capitalize() for word in others)


@dataclasses.dataclass(frozen=True)
class Pod(LauncherConfig):
    """This pod of the job. ``program``: what it runs is no Python; ``oom_kills``: those before its ranks started;
    ``steps``: those of the run, where the script's command says it."""

    node: int
    master: str
    port: int
    grace: float
    metrics_port: int
    runtime: str
    oom_kills: int
    program: bool = False
    steps: Optional[int] = None

    @property
    def local(self) -> bool:
        """Whether all pods are on this machine (`ddp run`)."""
        return self.master == "localhost" or self.master.startswith("127.")

    @property
    def is_multi_node(self) -> bool:
        """Whether there is a rendezvous with other pods."""
        return self.nodes > 1 or self.elastic


def read_pod(env: dict[str, str], runtime: str, *, program: bool = False) -> Pod:
    """Return the pod. Raises: ValueError that names the variable."""

    def number(name: str, default: float) -> float:
        try:
            return float(env.get(name) or default)
        except ValueError:
            raise ValueError(f"{name}={env[name]!r} is not a number") from None

    return Pod(
        **vars(decode_config(env.get(ENV_LAUNCHER_CONFIG))),
        node=int(number(ENV_COMPLETION_INDEX, 0)),
        master=env.get(ENV_MASTER_ADDR) or "127.0.0.1",
        port=int(number(ENV_MASTER_PORT, DEFAULT_RENDEZVOUS_PORT)),
        grace=number(ENV_GRACE_SECONDS, 30),
        metrics_port=int(number(ENV_METRICS_PORT, 0)),
        runtime=runtime,
        oom_kills=count_oom_kills(),
        program=program,
    )


def loopback_address(index: int) -> str:
    """Return the address of a pod on this machine. Lexical order is the order of the indices: torchrun ranks by it."""
    return "127.0.0.1" if index == 0 else f"127.0.{100 + index // 100}.{100 + index % 100}"


def add_pod_flags(flags: Sequence[str], pod: Pod) -> list[str]:
    """Return torchrun's flags with what only the pod knows. Later flags win: the pod's come last, a default first."""
    flags = ["--monitor-interval=0.1", *flags]  # 5 s in older versions: a failure would be seen late
    static = any(flag == "--rdzv-backend=static" for flag in flags)
    if static:
        return [*flags, f"--master-addr={pod.master}", f"--master-port={pod.port}", f"--node-rank={pod.node}"]
    if not pod.is_multi_node:
        return [*flags, "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1"]
    host = "localhost" if pod.node == 0 and not pod.local else pod.master
    address = [f"--local-addr={loopback_address(pod.node)}"] if pod.local else []
    return [*flags, f"--rdzv-endpoint={host}:{pod.port}", *address]


def default_threads(nproc: int) -> Optional[str]:
    """Return OMP_NUM_THREADS for workers where nobody set it: the cgroup's CPUs shared out, else as torchrun does."""
    cpus = read_cpu_quota()
    if cpus is not None:
        return str(max(1, math.floor(cpus / nproc)))
    return "1" if nproc > 1 else None


def make_runtime_dir() -> tuple[str, bool]:
    """Return the pod's private folder, and whether it is ours to remove."""
    given = os.environ.get(ENV_RUNTIME_DIR)
    places = [given] if given else [os.environ.get("TMPDIR", ""), "/tmp", "/dev/shm", os.getcwd()]
    problem: Optional[OSError] = None
    for place in filter(None, places):
        path = place if given else os.path.join(place, f"ddp-{os.getpid()}-{os.urandom(6).hex()}")
        try:
            for name in ("metrics", "workers", "errors", "groups", "stacks", "output"):
                folder = os.path.join(path, name)
                os.makedirs(folder, mode=0o700, exist_ok=True)
                for stale in os.listdir(folder):
                    os.unlink(os.path.join(folder, stale))
            if os.path.exists(os.path.join(path, STOPPING_FILE)):
                os.unlink(os.path.join(path, STOPPING_FILE))
        except OSError as error:
            problem = error
            continue
        return path, not given
    raise ValueError(f"no folder for temporary files: {problem}; mount an emptyDir at /tmp")


def list_workers(pod: Pod) -> list[dict[str, Any]]:
    """Return what the workers of this pod have recorded of themselves: pid, rank, localRank, restart and more."""
    folder = os.path.join(pod.runtime, "workers")
    found = [read_json(os.path.join(folder, name)) for name in os.listdir(folder) if name.endswith(".json")]
    numbers = ("pid", "rank", "localRank", "restart")
    return [worker for worker in found if all(isinstance(worker.get(key), int) for key in numbers)]


def measure_groups(pod: Pod) -> dict[str, int]:
    """Return the ranks of the job and the size of the smallest process group of this pod's; nothing if unknown."""
    workers = list_workers(pod)
    groups = [read_json(os.path.join(pod.runtime, "groups", f"{one['localRank']}.json")) for one in workers]
    sizes = [one["size"] for one in groups if isinstance(one.get("size"), int)]
    worlds = [one["worldSize"] for one in workers if isinstance(one.get("worldSize"), int)]
    if not workers or len(sizes) < len(workers) or len(worlds) < len(workers):
        return {}
    return {"worldSize": max(worlds), "groupSize": min(sizes)}

"""What the environment says about this pod, and what follows from it for torchrun."""

from __future__ import annotations

import json
import math
import os
import re
from typing import Any, NamedTuple, Sequence

from .contract import (
    DEFAULT_RENDEZVOUS_PORT,
    ENV_COMPLETION_INDEX,
    ENV_EPOCHS,
    ENV_GRACE_SECONDS,
    ENV_JOIN_TIMEOUT,
    ENV_LOG_PATTERNS,
    ENV_MASTER_ADDR,
    ENV_MASTER_PORT,
    ENV_METRICS_PORT,
    ENV_NODES,
    ENV_NON_RETRYABLE,
    ENV_NPROC_PER_NODE,
    ENV_PREFLIGHT,
    ENV_RUNTIME_DIR,
    ENV_SUCCESS_POLICY,
    ENV_WATCHDOG,
    PREFLIGHT_CHECKS,
    STOPPING_FILE,
)
from .files import read_json
from .processes import count_oom_kills


class WatchdogPlan(NamedTuple):
    """Budgets in seconds, and what follows when one is used up. ``action`` is Restart, Fail or Report."""

    start: float
    stall: float
    checkpoint: float
    action: str


def read_watchdog(text: str) -> WatchdogPlan | None:
    """Read ``start=900,stall=300,checkpoint=1800,action=Restart``. Raises: ValueError."""
    if not text:
        return None
    words = dict(word.partition("=")[::2] for word in text.split(","))
    try:
        start, stall, checkpoint = (float(words[name]) for name in ("start", "stall", "checkpoint"))
        return WatchdogPlan(start, stall, checkpoint, words["action"])
    except (KeyError, ValueError):
        raise ValueError(f"{ENV_WATCHDOG}={text!r} is not start=…,stall=…,checkpoint=…,action=…") from None


class Pod(NamedTuple):
    """What the environment says about this pod."""

    node: int
    nodes: int
    master: str
    port: int
    grace: float
    join_timeout: float
    non_retryable: list[int]
    metrics_port: int
    runtime: str
    oom_kills: int
    watchdog: WatchdogPlan | None = None
    log_patterns: tuple[str, ...] = ()
    epochs: int | None = None
    nproc: int = 1
    preflight: PreflightPlan | None = None
    elastic: bool = False
    program: bool = False
    success_policy: str = "AllNodes"

    @property
    def local(self) -> bool:
        """Whether all pods are on this machine (`ddp run`)."""
        return self.master == "localhost" or self.master.startswith("127.")


def read_pod(env: dict[str, str], runtime: str) -> Pod:
    """Return the pod. Raises: ValueError that names the variable."""

    def number(name: str, default: str) -> float:
        try:
            return float(env.get(name) or default)
        except ValueError:
            raise ValueError(f"{name}={env[name]!r} is not a number") from None

    return Pod(
        node=int(number(ENV_COMPLETION_INDEX, "0")),
        nodes=int(number(ENV_NODES, "1")),
        master=env.get(ENV_MASTER_ADDR) or "127.0.0.1",
        port=int(number(ENV_MASTER_PORT, str(DEFAULT_RENDEZVOUS_PORT))),
        grace=number(ENV_GRACE_SECONDS, "30"),
        join_timeout=number(ENV_JOIN_TIMEOUT, "600"),
        non_retryable=[int(code) for code in re.findall(r"\d+", env.get(ENV_NON_RETRYABLE, ""))],
        metrics_port=int(number(ENV_METRICS_PORT, "0")),
        runtime=runtime,
        oom_kills=count_oom_kills(),
        watchdog=read_watchdog(env.get(ENV_WATCHDOG, "")),
        log_patterns=tuple(json.loads(env.get(ENV_LOG_PATTERNS) or "[]")),
        epochs=int(number(ENV_EPOCHS, "0")) or None,
        nproc=int(number(ENV_NPROC_PER_NODE, "1")),
        preflight=read_preflight(env.get(ENV_PREFLIGHT, "")),
        success_policy=env.get(ENV_SUCCESS_POLICY) or "AllNodes",
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
    if pod.nodes == 1 and not pod.elastic:
        return [*flags, "--rdzv-endpoint=localhost:0", "--local-addr=127.0.0.1"]
    host = "localhost" if pod.node == 0 else pod.master
    address = [f"--local-addr={loopback_address(pod.node)}"] if pod.local else []
    return [*flags, f"--rdzv-endpoint={host}:{pod.port}", *address]


def default_threads(nproc: str) -> str | None:
    """Return OMP_NUM_THREADS for workers where nobody set it: the cgroup's CPUs shared out, else as torchrun does."""
    if not nproc.isdigit():
        return None
    try:
        with open("/sys/fs/cgroup/cpu.max", encoding="ascii") as file:
            quota, period = file.read().split()
        if quota != "max":
            return str(max(1, math.floor(int(quota) / int(period) / int(nproc))))
    except (OSError, ValueError):
        pass
    return "1" if int(nproc) > 1 else None


class PreflightPlan(NamedTuple):
    """What to try, and whether a failure ends the pod. ``least`` is in bytes a second."""

    fail: bool
    checks: tuple[str, ...]
    least: float


def read_preflight(text: str) -> PreflightPlan | None:
    """Read ``mode=Warn,checks=dns+tcp,least=0``; None where there is nothing to try. Raises: ValueError."""
    if not text:
        return None
    words = dict(word.partition("=")[::2] for word in text.split(","))
    try:
        checks = tuple(check for check in PREFLIGHT_CHECKS if check in words["checks"].split("+"))
        plan = PreflightPlan(words["mode"] == "Fail", checks, float(words["least"]))
    except (KeyError, ValueError):
        raise ValueError(f"{ENV_PREFLIGHT}={text!r} is not mode=…,checks=…,least=…") from None
    return plan if checks and words["mode"] != "Off" else None


def make_runtime_dir() -> tuple[str, bool]:
    """Return the pod's private folder, and whether it is ours to remove."""
    given = os.environ.get(ENV_RUNTIME_DIR)
    places = [given] if given else [os.environ.get("TMPDIR", ""), "/tmp", "/dev/shm", os.getcwd()]
    problem: OSError | None = None
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
    """Return what the workers of this pod have said of themselves: pid, rank, localRank, restart and more."""
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

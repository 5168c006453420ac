"""How a process of the launcher gets its pod, from the environment, and the pod's runtime directory."""

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
)
from ..contract.plan import VERSION, decode_plan, from_json
from ..contract.processes import count_oom_kills, read_cpu_quota
from .pod import Pod
from .runtime_files import STOPPING_FILE

_IDENTITY_BYTES: Final = 8


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

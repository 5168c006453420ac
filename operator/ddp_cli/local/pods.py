"""Build a pod's command line and environment, and the status that a kubelet would write for its process."""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Final

from ddp_cli.local.container import Lookup, build_environment, expand, prepare_volumes, rewrite_paths
from ddp_cli.local.job_controller import Json
from ddp_cli.local.machine import LOOPBACK_VARIABLES, VISIBLE_DEVICES, find_interpreter
from ddp_operator.api import constants
from ddp_operator.api.child_names import is_reserved_variable
from ddp_operator.api.cluster import Object
from ddp_operator.api.kubeobjects import find_trainer, format_time
from ddp_operator.manifests.children import LABEL_JOB_NAME
from ddp_operator.manifests.torchrun import is_interpreter
from ddp_pod.contract.plan import loopback_address

POD_IP: Final = "127.0.0.1"
_DEFAULT_TERMINATION_LOG: Final = "/dev/termination-log"
_LOG_TAIL_BYTES: Final = 2048


@dataclass(frozen=True, slots=True)
class LocalPodPlan:
    """A pod's process before it is started."""

    command: tuple[str, ...]
    environment: Mapping[str, str]
    folder: str | None
    termination_log: Path
    port_file: Path


@dataclass(frozen=True, slots=True)
class PodPlace:
    """The folders, GPUs and port of this machine for one pod. ``memory``: its folder in shared memory."""

    folder: Path
    claims: Path
    gpus: Sequence[str] = ()
    metrics_port: int = 0
    memory: Path | None = None


def plan_pod(pod: Object, place: PodPlace, lookup: Lookup, base: Mapping[str, str]) -> LocalPodPlan:
    """Create the pod's folders, and return its command line and environment. Raises: MissingReference, OSError."""
    container = find_trainer(pod)
    place.folder.mkdir(parents=True, exist_ok=True)
    termination_log = place.folder / "termination-log"
    port_file = place.folder / "metrics-port"
    places = prepare_volumes(pod, container, place.folder / "volumes", place.claims, lookup)
    places[container.get("terminationMessagePath") or _DEFAULT_TERMINATION_LOG] = termination_log
    variables = build_environment(pod, container, lookup)
    job = (pod["metadata"].get("labels") or {}).get(LABEL_JOB_NAME, "")
    subdomain = pod["spec"].get("subdomain", "")

    def localize(text: str) -> str:
        """Replace the job's host names and the container's paths."""
        return rewrite_paths(rewrite_hosts(text, job, subdomain) if job and subdomain else text, places)

    words = [expand(word, variables) for word in (*(container.get("command") or ()), *(container.get("args") or ()))]
    line = [localize(word) for word in words]
    if line and is_interpreter(line[0]):
        line[0] = find_interpreter(line[0], base)
        base = prepend_path(os.path.dirname(line[0]), base)
    machine = {VISIBLE_DEVICES: ",".join(place.gpus)}
    fixed = {
        **LOOPBACK_VARIABLES,
        constants.ENV_METRICS_PORT: str(place.metrics_port),
        constants.ENV_PORT_FILE: str(port_file),
        constants.ENV_RUNTIME_DIR: str(place.folder / "runtime"),
    }
    if constants.ENV_MEMORY_DIR in variables:
        fixed[constants.ENV_MEMORY_DIR] = str(place.memory or "")
    environment = {**base, **machine, **{name: localize(value) for name, value in variables.items()}, **fixed}
    folder = container.get("workingDir")
    return LocalPodPlan(
        tuple(line), environment, rewrite_paths(folder, places) if folder else None, termination_log, port_file
    )


def rewrite_hosts(text: str, job: str, subdomain: str) -> str:
    """Replace the DNS names of the job's pods in ``text`` by their addresses on this machine."""
    domain = r"(?:\.[a-z0-9-]+\.svc(?:\.[a-z0-9-]+)*)?"
    pattern = rf"(?<![\w.-]){re.escape(job)}-(\d{{1,9}})\.{re.escape(subdomain)}{domain}(?![\w-])"
    return re.sub(pattern, lambda match: loopback_address(int(match[1])), text)


def base_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment that a pod inherits from `ddp run`, without the variables of torchrun and the operator."""
    return {name: value for name, value in environ.items() if not is_reserved_variable(name)}


def prepend_path(folder: str, environ: Mapping[str, str]) -> Mapping[str, str]:
    """Return the environment with a folder first in PATH: `torchrun` comes from there."""
    return {**environ, "PATH": os.pathsep.join((folder, environ.get("PATH", os.defpath)))}


def pending_status(reason: str, message: str, now: datetime) -> Json:
    """Return the status of a pod that waits for GPUs."""
    condition = {"type": "PodScheduled", "status": "False", "reason": reason, "message": message}
    return {"phase": "Pending", "conditions": [condition | {"lastTransitionTime": format_time(now)}]}


def running_status(pod: Object, now: datetime) -> Json:
    """Return the status of a pod whose process was just started."""
    stamp = format_time(now)
    return {
        "phase": "Running",
        "podIP": POD_IP,
        "startTime": stamp,
        "conditions": [
            {"type": kind, "status": "True", "lastTransitionTime": stamp}
            for kind in ("PodScheduled", "Initialized", "ContainersReady", "Ready")
        ],
        "containerStatuses": [_container_status(pod, {"running": {"startedAt": stamp}}, ready=True)],
    }


def finished_status(pod: Object, code: int, reason: str, message: str, now: datetime) -> Json:
    """Return the status of a pod whose process has ended with ``code`` (128 + signal for a death by signal)."""
    stamp = format_time(now)
    old = pod.get("status") or {}
    changed = ("ContainersReady", "Ready")
    conditions = [condition for condition in old.get("conditions") or () if condition["type"] not in changed]
    condition = {
        "status": "False",
        "reason": "PodCompleted" if code == 0 else "PodFailed",
        "lastTransitionTime": stamp,
    }
    conditions += [{"type": kind, **condition} for kind in changed]
    times = {"startedAt": old.get("startTime", stamp), "finishedAt": stamp}
    terminated = {"exitCode": code, "reason": reason, **times} | ({"message": message} if message else {})
    return {
        **old,
        "phase": "Succeeded" if code == 0 else "Failed",
        "conditions": conditions,
        "containerStatuses": [_container_status(pod, {"terminated": terminated}, ready=False)],
    }


def _container_status(pod: Object, state: Json, *, ready: bool) -> Json:
    container = find_trainer(pod)
    return {
        "name": container["name"],
        "image": container.get("image", ""),
        "ready": ready,
        "state": state,
    }


def read_termination_message(pod: Object, file: Path, log: Path, code: int) -> str:
    """Return the termination message as a kubelet reads it: the end of the file, else of the log if the pod allows."""
    message = _tail(file, constants.TERMINATION_MESSAGE_LIMIT)
    policy = find_trainer(pod).get("terminationMessagePolicy")
    if not message and code != 0 and policy == "FallbackToLogsOnError":
        message = _tail(log, _LOG_TAIL_BYTES)
    return message


def _tail(file: Path, size: int) -> str:
    try:
        with file.open("rb") as stream:
            stream.seek(0, os.SEEK_END)
            stream.seek(max(0, stream.tell() - size))
            return stream.read(size).decode("utf-8", "replace")
    except OSError:
        return ""

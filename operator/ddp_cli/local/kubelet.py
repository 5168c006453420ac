"""Run pods: start their processes, end them with their grace period, and write their status to the store."""

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Final

from ddp_cli.local import pods, processes
from ddp_cli.local.container import NODE_NAME, MissingReference
from ddp_cli.local.folder import PID_FILE, RUNTIME_LEFTOVERS, is_out_of_space, remove_temporary_files
from ddp_cli.local.job_controller import completion_index
from ddp_cli.local.machine import GpuPool
from ddp_cli.local.shared_memory import SharedMemory
from ddp_cli.local.store import Store, grace_of
from ddp_operator.api import constants
from ddp_operator.api.cluster import Object
from ddp_operator.api.resources import count_pod_gpus

# The exit code with which container runtimes report a process that did not start.
START_ERROR_CODE: Final = 128


@dataclass(slots=True)
class _Run:
    """A pod with a process."""

    pod: Object
    process: processes.PodProcess
    plan: pods.LocalPodPlan
    log: Path
    watcher: asyncio.Task[None] | None = None
    killer: asyncio.TimerHandle | None = None


@dataclass(slots=True)
class Kubelet:
    """The processes of all pods.

    After a pod has ended and its status is stored, the kubelet calls ``on_end`` with the pod, then ``on_exit``. If an
    internal error prevents this, it calls ``on_error``, and the end of that pod is unknown.
    """

    store: Store
    folder: Path
    claims: Path
    clock: Callable[[], datetime]
    base: Mapping[str, str]
    gpus: Callable[[], GpuPool]
    metrics_base: int | None = None
    on_exit: Callable[[], None] = lambda: None
    on_end: Callable[[Object], None] = lambda pod: None
    on_error: Callable[[BaseException], None] = lambda error: None
    _runs: dict[str, _Run] = field(default_factory=dict)
    _ports: dict[int, int] = field(default_factory=dict)
    _lifeline: processes.Lifeline = field(default_factory=processes.Lifeline)
    _memory: SharedMemory = field(default_factory=SharedMemory)

    def log_of(self, pod: Object) -> Path:
        """Return the log file of a pod; a replacement within an attempt appends to the same file."""
        return self.folder / "logs" / f"{name_file(pod)}.log"

    def start(self, pod: Object) -> None:
        """Start the pod's process. Without enough free GPUs the pod remains Pending, and the caller retries later."""
        uid = pod["metadata"]["uid"]
        requested = count_pod_gpus(pod["spec"])
        gpus = self.gpus().take(uid, requested) if requested else []
        if gpus is None:
            message = f"0/1 nodes are available: 1 Insufficient nvidia.com/gpu (the pod requests {requested})."
            if pod["status"].get("conditions") is None:
                self.store.change(pod, status=pods.pending_status("Unschedulable", message, self.clock()))
            return
        folder = self.folder / "pods" / pod["metadata"]["name"]
        memory = self._memory.create_folder(uid)
        place = pods.PodPlace(folder, self.claims, tuple(gpus), self._port_for(pod), memory)
        namespace = pod["metadata"]["namespace"]
        log = self.log_of(pod)
        try:
            log.parent.mkdir(parents=True, exist_ok=True)
            if log.exists():
                with log.open("a", encoding="utf-8", errors="surrogateescape") as stream:
                    stream.write(f"--- pod {pod['metadata']['name']} ---\n")
            plan = pods.plan_pod(pod, place, lambda kind, name: self.store.get(kind, namespace, name), self.base)
            process = processes.start(
                plan.command, plan.environment, plan.folder, log=log, mark=uid, lifeline=self._lifeline
            )
            (folder / PID_FILE).write_text(str(process.pid), encoding="ascii")
        except (MissingReference, OSError, ValueError) as error:
            self._give_back_gpus(pod)
            message = _explain(error, place.folder)
            status = pods.finished_status(pod, START_ERROR_CODE, "StartError", message, self.clock())
            self.store.change(pod, status=status, spec={**pod["spec"], "nodeName": NODE_NAME})
            return
        run = self._runs[uid] = _Run(pod, process, plan, log)
        self.store.hold(pod)
        status = pods.running_status(pod, self.clock())
        self.store.change(pod, status=status, spec={**pod["spec"], "nodeName": NODE_NAME})
        run.watcher = asyncio.create_task(self._watch(run))
        run.watcher.add_done_callback(self._on_watched)

    def is_running(self, pod: Object) -> bool:
        """Return whether the pod has a running process."""
        return pod["metadata"]["uid"] in self._runs

    @property
    def busy(self) -> bool:
        """Whether any pod has a running process."""
        return bool(self._runs)

    def stop(self, pod: Object) -> None:
        """Send SIGTERM now and SIGKILL after the grace period. Further calls have no effect."""
        run = self._runs.get(pod["metadata"]["uid"])
        if run is None or run.killer is not None:
            return
        grace = pod["metadata"].get("deletionGracePeriodSeconds", grace_of(pod))
        run.killer = asyncio.get_running_loop().call_later(grace, run.process.kill)
        run.process.terminate()

    def kill_all(self) -> None:
        """Send SIGKILL to all processes."""
        for run in self._runs.values():
            run.process.kill()

    def port_of(self, pod: Object) -> int | None:
        """Return the port of the pod's `/metrics`; None: it does not listen yet."""
        run = self._runs.get(pod["metadata"]["uid"])
        if run is None:
            return None
        with suppress(OSError, ValueError):
            port = int(run.plan.port_file.read_text())
            index = completion_index(pod)
            if index is not None:
                self._ports[index] = port
            return port
        return None

    async def close(self) -> None:
        """Kill all processes and wait for their end. No pod can be started afterwards."""
        self.kill_all()
        watchers = [run.watcher for run in self._runs.values() if run.watcher is not None]
        await asyncio.gather(*watchers, return_exceptions=True)  # on_error has received the exceptions
        self._lifeline.close()
        self._memory.close()

    def _port_for(self, pod: Object) -> int:
        """Return the metrics port to request; 0: any free port. A replacement keeps its predecessor's port."""
        index = completion_index(pod)
        if index is None:
            return 0
        return self._ports.get(index, 0) if self.metrics_base is None else self.metrics_base + index

    def _on_watched(self, watcher: asyncio.Task[None]) -> None:
        error = None if watcher.cancelled() else watcher.exception()
        if error is not None:
            self.on_error(error)

    async def _watch(self, run: _Run) -> None:
        uid = run.pod["metadata"]["uid"]
        ooms = _count_oom_kills()
        try:
            code = await run.process.wait()
        finally:
            if run.killer is not None:
                run.killer.cancel()
            del self._runs[uid]
            self._give_back_gpus(run.pod)
            self._memory.remove_folder(uid)
        # A launcher or worker may have been killed during a write, and a reader of its pipe would wait forever. In a
        # cluster, both end with the container.
        remove_temporary_files(Path(run.plan.environment[constants.ENV_RUNTIME_DIR]), *RUNTIME_LEFTOVERS)
        metadata = run.pod["metadata"]
        current = self.store.get("Pod", metadata["namespace"], metadata["name"])
        if current is not None and current["metadata"]["uid"] == uid:
            message = pods.read_termination_message(current, run.plan.termination_log, run.log, code)
            reason = "Completed" if code == 0 else "Error"
            if code == 137 and run.killer is None and _count_oom_kills() > ooms:
                reason = "OOMKilled"
            status = pods.finished_status(current, code, reason, message, self.clock())
            self.store.release(current, status=status)
            self.on_end({**current, "status": status})  # a deleted pod is no longer in the store
        self.on_exit()

    def _give_back_gpus(self, pod: Object) -> None:
        if count_pod_gpus(pod["spec"]):  # else self.gpus() might query the driver, which takes seconds
            self.gpus().give_back(pod["metadata"]["uid"])


def name_file(pod: Object) -> str:
    """Return the name of a pod's files, which belong to its index in its attempt."""
    attempt = (pod["metadata"].get("labels") or {}).get(constants.LABEL_ATTEMPT)
    index = completion_index(pod)
    if attempt is None or index is None:
        return str(pod["metadata"]["name"])
    return f"attempt-{attempt}-pod-{index}"


def _explain(error: Exception, folder: Path) -> str:
    if isinstance(error, FileNotFoundError) and error.filename:
        return f"{error.filename}: no such file or folder on this machine; create it, or change the command"
    if is_out_of_space(error):
        return f"{folder} cannot be written: the disk is full; free some space or choose another --runs-dir"
    return str(error)


def _count_oom_kills() -> int:
    """Return the number of processes that the kernel has killed for memory since boot; 0 if unknown."""
    try:
        with open("/proc/vmstat") as stream:
            return next((int(line.split()[1]) for line in stream if line.startswith("oom_kill ")), 0)
    except OSError:
        return 0

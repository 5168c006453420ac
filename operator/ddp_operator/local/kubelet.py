"""Runs pods: starts their processes, ends them with their grace time, and writes what became of them into the store."""

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Final

from ddp_operator import constants
from ddp_operator.cluster import Object
from ddp_operator.kubeobjects import count_pod_gpus
from ddp_operator.local import pods, processes
from ddp_operator.local.container import MissingReference
from ddp_operator.local.folder import clear_half_written, is_out_of_space
from ddp_operator.local.job_controller import completion_index
from ddp_operator.local.machine import GpuPool
from ddp_operator.local.store import Store, grace_of

# What container runtimes say when a process could not be started at all.
START_ERROR_CODE: Final = 128


@dataclass(slots=True)
class _Run:
    """One pod that has a process."""

    pod: Object
    process: processes.PodProcess
    plan: pods.PodPlan
    log: Path
    watcher: asyncio.Task[None] | None = None
    killer: asyncio.TimerHandle | None = None


@dataclass(slots=True)
class Kubelet:
    """The processes of all pods. ``on_end`` is called with a pod and its last status when that was stored, and then
    ``on_exit``; ``on_error`` with an error of our own that kept it from being stored: nobody will hear of that end."""

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

    def log_of(self, pod: Object) -> Path:
        """Return the log file of a pod; a pod that takes another's place in an attempt goes on in the same file."""
        return self.folder / "logs" / f"{name_file(pod)}.log"

    def start(self, pod: Object) -> None:
        """Start the pod's process. Without enough GPUs the pod stays Pending; try again later."""
        uid = pod["metadata"]["uid"]
        wanted = count_pod_gpus(pod["spec"])
        taken = self.gpus().take(uid, wanted) if wanted else []
        if taken is None:
            words = f"0/1 nodes are available: 1 Insufficient nvidia.com/gpu (the pod requests {wanted})."
            if pod["status"].get("conditions") is None:
                self.store.change(pod, status=pods.pending_status("Unschedulable", words, self.clock()))
            return
        folder = self.folder / "pods" / pod["metadata"]["name"]
        place = pods.PodPlace(folder, self.claims, tuple(taken), self._port_for(pod))
        namespace = pod["metadata"]["namespace"]
        log = self.log_of(pod)
        try:
            log.parent.mkdir(parents=True, exist_ok=True)
            if log.exists():
                with log.open("a") as stream:
                    stream.write(f"--- pod {pod['metadata']['name']} ---\n")
            plan = pods.plan_pod(pod, place, lambda kind, name: self.store.get(kind, namespace, name), self.base)
            process = processes.start(
                plan.command, plan.environment, plan.folder, log=log, mark=uid, lifeline=self._lifeline
            )
        except (MissingReference, OSError, ValueError) as error:
            self._give_back_gpus(pod)
            words = _explain(error, place.folder)
            status = pods.finished_status(pod, START_ERROR_CODE, "StartError", words, self.clock())
            self.store.change(pod, status=status, spec={**pod["spec"], "nodeName": pods.NODE_NAME})
            return
        run = self._runs[uid] = _Run(pod, process, plan, log)
        self.store.hold(pod)
        status = pods.running_status(pod, self.clock())
        self.store.change(pod, status=status, spec={**pod["spec"], "nodeName": pods.NODE_NAME})
        run.watcher = asyncio.create_task(self._watch(run))
        run.watcher.add_done_callback(self._on_watched)

    def is_running(self, pod: Object) -> bool:
        """Say whether the pod has a living process."""
        return pod["metadata"]["uid"] in self._runs

    @property
    def busy(self) -> bool:
        """Whether any pod has a living process."""
        return bool(self._runs)

    def stop(self, pod: Object) -> None:
        """SIGTERM now, SIGKILL after the grace time. Asking again changes nothing."""
        run = self._runs.get(pod["metadata"]["uid"])
        if run is None or run.killer is not None:
            return
        grace = pod["metadata"].get("deletionGracePeriodSeconds", grace_of(pod))
        run.killer = asyncio.get_running_loop().call_later(grace, run.process.kill)
        run.process.terminate()

    def kill_all(self) -> None:
        """SIGKILL everything at once."""
        for run in self._runs.values():
            run.process.kill()

    def port_of(self, pod: Object) -> int | None:
        """Return the port on which the pod's `/metrics` answers, or None while it has none."""
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
        """Kill what still runs and wait for its end. Nothing can be started afterwards."""
        self.kill_all()
        watchers = [run.watcher for run in self._runs.values() if run.watcher is not None]
        await asyncio.gather(*watchers, return_exceptions=True)  # on_error has heard of them
        self._lifeline.close()

    def _port_for(self, pod: Object) -> int:
        """Return the metrics port to ask for; 0 is a free one. A later pod of an index keeps its predecessor's."""
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
        # A launcher or a worker may have been killed while it wrote, and whoever reads a pipe of theirs waits for ever;
        # in a cluster the container takes both along.
        clear_half_written(Path(run.plan.environment[constants.ENV_RUNTIME_DIR]), "**/*.tmp", "output/*")
        metadata = run.pod["metadata"]
        current = self.store.get("Pod", metadata["namespace"], metadata["name"])
        if current is not None and current["metadata"]["uid"] == uid:
            message = pods.read_termination_message(current, run.plan.termination_log, run.log, code)
            reason = "Completed" if code == 0 else "Error"
            if code == 137 and run.killer is None and _count_oom_kills() > ooms:
                reason = "OOMKilled"
            status = pods.finished_status(current, code, reason, message, self.clock())
            self.store.let_go(current, status=status)
            self.on_end({**current, "status": status})  # the store has a deleted pod no more
        self.on_exit()

    def _give_back_gpus(self, pod: Object) -> None:
        if count_pod_gpus(pod["spec"]):  # else nobody has asked the driver, which may take seconds to answer
            self.gpus().give_back(pod["metadata"]["uid"])


def name_file(pod: Object) -> str:
    """Return what the files of a pod are called: they are those of its index in its attempt."""
    attempt, index = (pod["metadata"].get("labels") or {}).get(constants.LABEL_ATTEMPT), completion_index(pod)
    return str(pod["metadata"]["name"]) if attempt is None or index is None else f"attempt-{attempt}-pod-{index}"


def _explain(error: Exception, folder: Path) -> str:
    if isinstance(error, FileNotFoundError) and error.filename:
        return f"{error.filename}: no such file or folder on this machine"
    if is_out_of_space(error):
        return f"{folder} cannot be written: the disk is full; free some space or choose another --runs-dir"
    return str(error)


def _count_oom_kills() -> int:
    """Return how many processes the kernel has killed for memory since it started; 0 where it does not say."""
    try:
        with open("/proc/vmstat") as stream:
            return next((int(line.split()[1]) for line in stream if line.startswith("oom_kill ")), 0)
    except OSError:
        return 0

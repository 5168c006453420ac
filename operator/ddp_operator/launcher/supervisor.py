"""One pod's life: start torchrun's agent, watch it, pass signals on, and see how it ends."""

import dataclasses
import math
import os
import select
import signal
import threading
import time
from typing import Any, Optional

from .agent import END, RESTART, AgentProcess
from .agent_failure import (
    STORE_ERRORS,
    STORE_PROBLEMS,
    UNREACHABLE,
    AgentEnd,
    build_absence_failure,
    build_store_failure,
    examine_agent_exit,
)
from .checkpoints import CheckpointMirror
from .contract import (
    ENV_LIFELINE_FD,
    ENV_PORT_FILE,
    LAUNCHER_PHASES,
    METRIC_LAUNCHER_PHASE,
    METRIC_LAUNCHER_RESTARTS,
    STOPPING_FILE,
)
from .failure_record import Failure, encode_message
from .files import log, try_write_json
from .metrics import MetricsEndpoint
from .output import OutputReader
from .pod import Pod
from .preflight import build_preflight_rows, describe_preflight
from .processes import STOP_SIGNALS, find_family, kill, list_children, process_state
from .rendezvous import count_connections, wait_for_master
from .restarts import Restarts
from .stall import read_board
from .stall_monitor import StallMonitor
from .termination import complete_worker_failure, conclude
from .tracking import build_tracking_rows
from .trainer_status import TrainerStatus
from .worker_failure import find_root_cause

_OUTPUT_FLAGS = ("--tee", "-t", "--redirects", "-r", "--logs-specs")
_ENV_LOG_PREFIX = "DDP_LOG_PREFIX"  # the user's own: 0 leaves the lines of a pod with several ranks as they are
_SECONDS_AFTER_GRACE = 5.0
_SECONDS_WITHOUT_WORKERS = 1.0  # an agent without workers needs no more after a signal
_SECONDS_TO_LEAVE = 5.0  # and in an elastic job so long to leave the rendezvous, or the others wait in vain
_LINGER_SECONDS = 3.0


class Supervisor:
    """What holds a pod's processes together. ``signals``: those that came before there was a supervisor."""

    def __init__(self, pod: Pod, flags: list[str], entry: list[str], signals: list[int], *, warm: bool) -> None:
        self.pod = pod
        self._flags = flags
        self._signals = signals
        self._phase = LAUNCHER_PHASES[0]
        self._end = AgentEnd()
        self._final: list[Failure] = []  # failures that had decided the pod's end before it was asked to stop
        self._preflight: dict[str, Any] = {}
        self._mirror = CheckpointMirror(pod) if pod.checkpoint else None
        self._fit = False  # whether the master is there, so that the agent may go on
        self._agent_waits = False  # for the checkpoints
        self._master: list[tuple[Any, Optional[str]]] = []  # whose wait is over, and the problem
        self._stop_deadline: Optional[float] = None
        self._idle_since: Optional[float] = None  # since when the stopping agent has had no worker
        self._agent = AgentProcess(pod, entry, warm=warm)
        self._store = 0
        self._store_guard: Optional[int] = None
        taken = any(flag.startswith(_OUTPUT_FLAGS) for flag in flags)  # torchrun's own ways to mark lines win
        marked = pod.nproc_per_node > 1 and not taken and os.environ.get(_ENV_LOG_PREFIX) != "0"
        # Rank 0's is read for the progress that it shows.
        wanted = pod.program or pod.node == 0 or pod.elastic
        self._reads_output = bool(pod.log_patterns) or marked or (wanted and not taken)
        self._reader = OutputReader(pod, marked=marked)
        self._trainer_status = TrainerStatus(pod)
        self.metrics = MetricsEndpoint(pod.runtime, self._own_page, self._trainer_status.receive)
        if self._mirror is not None:
            self.metrics.comments = self._mirror.build_comment
        self._restarts = Restarts(pod, self.metrics)
        self._stalls = StallMonitor(pod, self.metrics, is_stopping=lambda: self._stop_deadline is not None)
        self._wake, self._wake_end = os.pipe()
        os.set_blocking(self._wake, False)
        os.set_blocking(self._wake_end, False)
        self._lifeline = int(os.environ.pop(ENV_LIFELINE_FD, None) or -1)
        if self._lifeline >= 0:
            os.set_inheritable(self._lifeline, False)

    def run(self) -> int:
        """Run the pod to its end. Returns the exit code."""
        signal.set_wakeup_fd(self._wake_end, warn_on_full_buffer=False)
        for number in (*STOP_SIGNALS, signal.SIGUSR1):
            signal.signal(number, lambda received, frame: self._signals.append(received))
        signal.signal(signal.SIGCHLD, lambda received, frame: None)
        os.write(self._wake_end, b"\0")  # a signal may have come before
        if self._reads_output:
            self._reader.start()
        if self._mirror is not None:
            self._mirror.ask(**({"claim": True} if self.pod.node == 0 else {}), fetch=None)
        self._start_agent()
        self._serve_metrics()
        threading.Thread(target=self._stalls.run, daemon=True, name="watchdog").start()
        while True:
            self._release_agent()
            while self._agent.status is None:
                self._step()
            self._receive()
            if not self._may_start_again():
                break
            self._start_agent()
        self._linger()
        self._end_processes(keep=self._helpers)
        unsaved = self._finish_uploads()
        self._end_processes(keep={self._reader.pid})
        self._reader.finish(self._reap)
        self._enter("Done")
        return conclude(
            self.pod,
            self._end,
            self._agent.status or 0,
            self._restarts,
            self.metrics,
            stopped=self._stop_deadline is not None,
            final=self._final,
            unsaved=unsaved,
            uploads=self._mirror.values() if self._mirror is not None else {},
        )

    @property
    def _helpers(self) -> set[int]:
        """Processes that outlive an agent."""
        return {self._reader.pid, self._mirror.pid if self._mirror is not None else 0}

    @property
    def _static(self) -> bool:
        return "--rdzv-backend=static" in self._flags

    # -- the agent

    def _may_start_again(self) -> bool:
        """Decide whether a new agent may take the old one's place: the agent was killed, or the store went away."""
        lost = self._end.reason in STORE_ERRORS
        killed = not self._end.result and (self._agent.status or 0) < 0
        if self._static or self._stop_deadline is not None or not (lost or killed):
            return False
        # A restart that is under way is counted already.
        under_way = self._phase == "Rendezvous" and self._restarts.count > 0
        if not under_way and not self._restarts.spend():
            return False
        failure = self._end.failure or examine_agent_exit(self.pod, self._agent.status or 0)
        self._restarts.reason = failure.message
        self._restarts.forget()
        if not under_way:
            self._publish_failure(failure)
        log(f"restarting torchrun's agent, restart {self._restarts.count}: {failure.message}")
        self._end_processes(keep={self._store, self._agent.server, *self._helpers})
        self._end = AgentEnd()
        return True

    def _start_agent(self) -> None:
        guard: Optional[int] = None
        if self.pod.is_multi_node and self.pod.node == 0 and not self._static and not self._store:
            guard, self._store_guard = os.pipe()
        self._agent_waits = False
        flags = [*self._flags, f"--max-restarts={self._restarts.left}"]
        self._agent.start(flags, guard, self._restarts.count)

    def _release_agent(self) -> None:
        """Let the agent meet the others once the master and the checkpoints are there; until then it imports torch."""
        self._fit = not self.pod.is_multi_node
        if self.pod.is_multi_node:
            self._enter("WaitingForMaster")
            wait = threading.Thread(target=self._wait_for_master, args=(self._agent.channel,), daemon=True)
            wait.start()
        self._let_go()

    def _let_go(self) -> None:
        if self._fit and (self._mirror is None or self._mirror.ready):
            self._fit = False
            self._agent.send(b"g")

    def _wait_for_master(self, channel: Any) -> None:
        port = None if self.pod.node == 0 else self.pod.port
        self._master.append((channel, wait_for_master(self.pod.master, port, self.pod.join_timeout_seconds)))
        os.write(self._wake_end, b"\0")

    # -- watching

    def _step(self) -> None:
        watched: list[Any] = [self._wake]
        if self._agent.channel is not None:
            watched.append(self._agent.channel)
        if self._lifeline >= 0:
            watched.append(self._lifeline)
        if self._mirror is not None and self._mirror.channel is not None:
            watched.append(self._mirror.channel)
        timeout = None if self._stop_deadline is None else max(0.0, min(0.2, self._stop_deadline - time.monotonic()))
        if self._mirror is not None and self._mirror.asked is not None:
            timeout = 1.0 if timeout is None else timeout
        ready = select.select(watched, [], [], timeout)[0]
        self._follow_mirror(ready)
        if self._wake in ready:
            os.read(self._wake, 4096)
        if self._agent.channel in ready:
            self._receive()
        if self._lifeline in ready and not os.read(self._lifeline, 1):
            self._agent.kill()
            os._exit(137)
        while self._signals:
            self._on_signal(self._signals.pop(0))
        while self._master:
            channel, problem = self._master.pop()
            if channel is not self._agent.channel:
                continue
            if problem is None:
                self._fit = True
                self._let_go()
            else:
                self._end = AgentEnd("error", build_absence_failure(self.pod, problem))
                self._agent.kill()
        if self._stop_deadline is not None and time.monotonic() >= self._stop_deadline:
            log("grace period is over: killing the workers")
            self._stop_deadline = math.inf
            self._agent.kill()
        elif self._stop_deadline is not None and self._has_no_workers():
            self._agent.kill()  # it waits for the other pods, deaf to signals
        self._reap()

    def _has_no_workers(self) -> bool:
        """Tell whether the agent has had no living worker for a while."""
        now = time.monotonic()
        others = {self._agent.pid, self._agent.rank_server, self._store}
        if any(process_state(pid) for pid in find_family(self._agent.pid) if pid not in others):
            self._idle_since = None
        elif self._idle_since is None:
            self._idle_since = now
        limit = _SECONDS_TO_LEAVE if self.pod.regroups else _SECONDS_WITHOUT_WORKERS
        return self._idle_since is not None and now - self._idle_since > limit

    def _on_signal(self, number: int) -> None:
        if number == signal.SIGUSR1:
            threading.Thread(target=self._stalls.show_stacks, daemon=True).start()
            return
        if self._stop_deadline is not None:
            if number == signal.SIGINT:
                self._stop_deadline = time.monotonic()
            return
        self._final = self._restarts.read_final_failures(running=self._phase == "Running")
        log(f"{signal.Signals(number).name}: stopping; the workers have {self.pod.grace:g} s to save and exit")
        self._enter("Stopping")
        try_write_json(os.path.join(self.pod.runtime, STOPPING_FILE), number)
        self._stop_deadline = time.monotonic() + self.pod.grace + _SECONDS_AFTER_GRACE
        self._agent.kill(signal.SIGTERM)

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            self._receive()  # an agent that has ended may just have reported its pid
            self._agent.note_end(pid, status)
            if pid == self._store:
                self._store = 0
            if pid == self._reader.pid:
                self._reader.pid = 0
            if self._mirror is not None:
                self._mirror.note_end(pid)

    def _receive(self) -> None:
        for event in self._agent.receive():
            self._on_event(event)

    def _on_event(self, event: dict[str, Any]) -> None:
        if "phase" in event:
            self._enter(event["phase"])
        if "preflight" in event:
            self._preflight = event["preflight"]
            log(describe_preflight(self._preflight))
        if "store" in event:
            self._store = event["store"]
        if "snapshot" in event and self._mirror is not None:
            self._agent_waits = True
            if self.pod.node == 0:
                self._mirror.ask(flush=True)
            elif event["snapshot"] != self._mirror.snapshot:
                self._mirror.ask(fetch=event["snapshot"])
            self._follow_mirror([])
        if "board" in event:
            self._stalls.board = read_board(event["board"])
        if "failures" in event:
            failures = [Failure.from_json(failure) for failure in event["failures"]]
            restarts = self._restarts.observe(failures, free=bool(event.get("free")), run_step=event.get("step"))
            self._agent.send(RESTART if restarts else END)
        if "count" in event:
            self._restarts.count = max(self._restarts.count, event["count"])
        if event.get("restart"):
            self._on_restart()
        if "result" in event and not self._end.result:
            failure = event.get("failure")
            self._end = AgentEnd(event["result"], Failure.from_json(failure) if failure else None)

    def _on_restart(self) -> None:
        """Count a restart of the workers by torchrun, and publish the failure that it follows."""
        self._restarts.count_in_place(self._stalls.root_cause)
        log(f"restarting the workers in the same pods, restart {self._restarts.count}: {self._restarts.reason}")
        if self._restarts.failures:
            root_cause = find_root_cause(self._restarts.failures)
            self._publish_failure(complete_worker_failure(root_cause, self._restarts, self.metrics, progress={}))
        self._restarts.forget()

    def _publish_failure(self, failure: Failure) -> None:
        """Publish the failure that the last restart followed on the pod's page."""
        failure = dataclasses.replace(failure, restarts=self._restarts.count)
        self._restarts.last_failure = failure
        self.metrics.last_failure = encode_message(failure.to_json())

    def _enter(self, phase: str) -> None:
        if phase == "Running":
            self._restarts.began = time.monotonic()
        if self._stop_deadline is None or phase == "Done":
            self._phase = phase

    # -- metrics

    def _serve_metrics(self) -> None:
        path, wanted = os.environ.get(ENV_PORT_FILE), self.pod.metrics_port
        host = "127.0.0.1" if self.pod.local else ""
        try:
            try:
                port = self.metrics.serve(wanted, host)
            except OSError as error:
                if not path or not wanted:
                    raise
                # Who reads the file learns of another one; the port of an ended pod is anybody's on a shared machine.
                port = self.metrics.serve(0, host)
                log(f"metrics are on port {port}: cannot listen on {wanted}: {error.strerror}")
        except OSError as error:
            log(f"no metrics: cannot listen on port {wanted}: {error.strerror}")
            return
        self._trainer_status.offer(port)
        if path:
            try_write_json(path, port)

    def _own_page(self) -> str:
        rows = [f"# HELP {METRIC_LAUNCHER_PHASE} What this pod's launcher is doing; one of its series is 1."]
        rows.append(f"# TYPE {METRIC_LAUNCHER_PHASE} gauge")
        rows += [f'{METRIC_LAUNCHER_PHASE}{{phase="{name}"}} {int(name == self._phase)}' for name in LAUNCHER_PHASES]
        rows.append(f"# HELP {METRIC_LAUNCHER_RESTARTS} How often torchrun restarted the workers in this pod.")
        rows += [f"# TYPE {METRIC_LAUNCHER_RESTARTS} counter", f"{METRIC_LAUNCHER_RESTARTS} {self._restarts.count}"]
        rows += build_preflight_rows(self._preflight) + build_tracking_rows(self.pod.runtime)
        rows += self._mirror.build_rows() if self._mirror is not None else []
        return "\n".join([*rows, *self._stalls.build_rows()])

    # -- checkpoints in a store

    def _follow_mirror(self, ready: list[Any]) -> None:
        """Take in what the process that fetches and uploads reports, and how long it takes."""
        mirror = self._mirror
        if mirror is None:
            return
        for event in mirror.receive() if mirror.channel is not None and mirror.channel in ready else ():
            if "end" in event:
                self._give_up(event["end"], event["message"])
        if mirror.asked is None:
            self._let_go()
            if self._agent_waits:
                self._agent_waits = False
                self._agent.send(mirror.snapshot.encode() + b"\n")
        elif time.monotonic() - mirror.asked_at > self.pod.join_timeout_seconds and self._agent.status is None:
            why = mirror.problem or "it takes longer than spec.rendezvous.joinTimeoutSeconds"
            self._give_up(UNREACHABLE, f"the checkpoints and {mirror.url} could not be made alike: {why}")

    def _give_up(self, kind: str, message: str) -> None:
        """End the workers: without the store they would train on what nobody keeps, or on different states."""
        self._end = AgentEnd("error", build_store_failure(self.pod, kind, message))
        log(message)
        if self._agent.status is None:
            self._agent.kill()

    # -- ending

    def _finish_uploads(self) -> str:
        """Upload what the workers have saved last. Returns what is missing in the store, empty where nothing is.

        A pod that was asked to stop, or has failed, has the workers' grace time for it; one that has succeeded, as
        long as a save may take.
        """
        mirror = self._mirror
        if mirror is None or self.pod.node != 0 or not mirror.ready or self._end.reason in STORE_PROBLEMS:
            return ""
        began = time.monotonic()
        well = self._end.result == "ok"
        patience = self.pod.watchdog.checkpoint_seconds if well and self.pod.watchdog is not None else self.pod.grace
        mirror.ask(flush=True)
        while mirror.asked is not None and self._end.reason not in STORE_PROBLEMS:
            while self._signals:
                if self._signals.pop(0) in STOP_SIGNALS and self._stop_deadline is None:
                    self._stop_deadline = time.monotonic() + self.pod.grace + _SECONDS_AFTER_GRACE
            limit = began + patience if self._stop_deadline is None else self._stop_deadline
            if mirror.channel is None or time.monotonic() >= min(limit, began + max(patience, _SECONDS_AFTER_GRACE)):
                mirror.close()
                log(mirror.describe_unsaved())
                return mirror.describe_unsaved()
            watched: list[Any] = [self._wake, mirror.channel]
            ready = select.select(watched, [], [], 0.2)[0]
            if self._wake in ready:
                os.read(self._wake, 4096)
            self._follow_mirror(ready)
            self._reap()
        mirror.close()
        return ""

    def _linger(self) -> None:
        """Keep the store until the other agents have let go of it, so that none of them ends in a connection error."""
        failed = self._agent.status != 0 and self._stop_deadline is None
        deadline = time.monotonic() + _LINGER_SECONDS / (3 if failed else 1)
        while self._store and time.monotonic() < deadline and count_connections(self.pod.port) > 1:
            time.sleep(0.02)  # one connection is the store's own

    def _end_processes(self, keep: set[int]) -> None:
        """End the store, unless it is to be kept, and every orphan that came here."""
        if self._store_guard is not None and (not self._store or self._store not in keep):
            os.close(self._store_guard)
            self._store_guard = None
        deadline = time.monotonic() + 5
        while time.monotonic() < deadline:
            self._reap()
            children = list_children() - keep  # none where this is no Linux: torchrun has ended its workers
            if not children:
                return
            for pid in children:
                kill(pid, signal.SIGKILL)
            time.sleep(0.005)

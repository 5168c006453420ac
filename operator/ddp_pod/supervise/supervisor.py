"""Supervise one pod: start torchrun's agent, watch it, forward signals, and report how it ended."""

import dataclasses
import math
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..base.files import log, try_write_json
from ..base.pod import Pod
from ..base.runtime_files import STOPPING_FILE
from ..base.service import Answer, Ending, Service
from ..contract.failure_record import Failure
from ..contract.names import ENV_LIFELINE_FD, ENV_PORT_FILE, LAUNCHER_PHASES, TERMINATION_MESSAGE_LIMIT
from ..contract.processes import STOP_SIGNALS, find_family, kill, list_children, process_state
from ..contract.progress import RankProgress
from ..contract.report import PodReport
from ..failures.agent_failure import RUN_OVER, STORE_ERRORS, AgentEnd, build_absence_failure, examine_agent_exit
from ..failures.rank_ends import describe_ended_ranks, find_remaining_processes
from ..failures.restarts import InPlaceRestarts
from ..failures.termination import complete_worker_failure, conclude, shorten_failure
from ..failures.worker_failure import find_root_cause
from ..network.master import count_connections
from ..progress.keeper import ProgressKeeper
from ..progress.metrics import MetricsEndpoint
from ..progress.output import CopyOutput, OutputReader, read_step_hint
from ..progress.rank_progress import RankReader, create_counters
from ..torchrun.channel import (
    EndsNeeded,
    PhaseEntered,
    RanksFailed,
    RanksFinished,
    Release,
    Request,
    Restarting,
    RoundJoined,
    StoreStarted,
    Verdict,
)
from .agent_process import AgentProcess, ForkServer
from .release import AgentRelease
from .services import Services
from .stop import StopDeadlines

CreateServices = Callable[[Pod, RankReader], Sequence[Service]]

_ENV_LOG_PREFIX = "DDP_LOG_PREFIX"  # set by the user: 0 writes lines without the rank as prefix
_SECONDS_WITHOUT_WORKERS = 1.0  # after which a stopping agent is killed
_SECONDS_TO_LEAVE = 5.0  # the same in an elastic job, whose agent first leaves the rendezvous
_LINGER_SECONDS = 3.0
_LINGER_SECONDS_AFTER_FAILURE = 1.0
_SECONDS_TO_END_PROCESSES = 5.0
_SECONDS_BETWEEN_CHECKS = 0.2  # of deadlines


class Supervisor:
    """Holds a pod's processes together. ``signals``: those received so far, extended by its signal handlers.

    ``server``: a fork server that runs already; ``copy_output``: what the log reader does; ``features``: what creates
    the services of features, in the order in which they finish. It is the ``Control`` of the services.
    """

    def __init__(
        self,
        pod: Pod,
        entry: list[str],
        signals: list[int],
        *,
        warm: bool,
        server: ForkServer | None = None,
        copy_output: CopyOutput,
        features: Sequence[CreateServices] = (),
    ) -> None:
        self.pod = pod
        self._signals = signals
        self._phase = LAUNCHER_PHASES[0]
        self._end = AgentEnd()
        self._has_finished = False  # whether all ranks of this pod have exited with 0, and wait for those of other pods
        self._final: list[Failure] = []  # failures that had decided the pod's end before it was asked to stop
        self._resumed = 0  # the last restart during which the agent was killed
        self._stop = StopDeadlines(pod.grace)
        self._idle_since: float | None = None  # since when the stopping agent has had no worker
        self._agent = AgentProcess(pod, entry, warm=warm, server=server)
        self._store = 0
        self._store_guard: int | None = None
        counters = create_counters(pod)
        marked = pod.nproc_per_node > 1 and not _uses_torchrun_logs(pod) and os.environ.get(_ENV_LOG_PREFIX) != "0"
        self._reader = OutputReader(pod, copy_output, marked=marked, counters=counters)
        self._ranks = RankReader(pod.runtime, counters)
        self._restarts = InPlaceRestarts(pod, self._ranks)
        keeper = ProgressKeeper(pod, self._ranks, self._observe_progress)
        self._services = Services([keeper, *(service for create in features for service in create(pod, self._ranks))])
        self.metrics = MetricsEndpoint(self._ranks, self._build_report, self._services.read_page)
        self._wake, self._wake_end = os.pipe()
        os.set_blocking(self._wake, False)
        os.set_blocking(self._wake_end, False)
        self._release = AgentRelease(pod, self._services.note, self.wake)
        self._lifeline = int(os.environ.pop(ENV_LIFELINE_FD, None) or -1)
        if self._lifeline >= 0:
            os.set_inheritable(self._lifeline, False)

    def run(self) -> int:
        """Run the pod to its end. Returns the exit code."""
        # The pipe before the handlers, so that no signal is only in the list while select waits. One that arrived
        # before is in the list already: the byte ends the first wait for it.
        signal.set_wakeup_fd(self._wake_end, warn_on_full_buffer=False)
        for number in (*STOP_SIGNALS, signal.SIGUSR1):
            signal.signal(number, self._receive_signal)
        signal.signal(signal.SIGCHLD, lambda received, frame: None)
        self.wake()
        if _reads_output(self.pod):
            self._reader.start()
        # Before the agent: checkpoints are downloaded while it imports PyTorch.
        self._services.start(self)
        self._start_agent()
        self._serve_metrics()
        while True:
            self._release_agent()
            while self._agent.status is None:
                self._step()
            # The last events of an agent are still in the channel when its end is known.
            self._receive()
            if not self._may_start_again():
                break
            self._start_agent()
        self._linger()
        helpers = self._helpers
        own = {self._store, self._agent.server, self._agent.rank_server, *helpers}
        remaining = find_remaining_processes(list_children() - own)
        # No rank may write to the checkpoint folder any more when the services save and upload it.
        self._end_processes(keep=helpers)
        self._finish_services()
        self._end_processes(keep={self._reader.pid})
        self._reader.finish(self._reap)
        self._enter("Done")
        return conclude(
            self.pod,
            self._end,
            self._agent.status or 0,
            self._restarts,
            self._ranks,
            self._services.conclude(),
            stopped=self.is_stopping,
            final=self._final,
            remaining=remaining,
            finished=self._has_finished,
            awaited=self._services.find_awaited(),
        )

    @property
    def _helpers(self) -> set[int]:
        """Processes that outlive an agent."""
        return {self._reader.pid, *self._services.list_processes()}

    # -- what services use

    @property
    def is_stopping(self) -> bool:
        """Whether the pod was asked to stop."""
        return self._stop.of_workers is not None

    @property
    def has_agent(self) -> bool:
        """Whether an agent runs."""
        return self._agent.status is None

    @property
    def finish_by(self) -> float | None:
        """When the pod's own work must be done; None: the pod was not asked to stop."""
        return self._stop.of_pod

    def wake(self) -> None:
        """Wake the main thread for changes."""
        try:
            os.write(self._wake_end, b"\0")
        except BlockingIOError:
            pass  # the pipe is full: it wakes anyway

    def reply(self, reply: object) -> None:
        """Reply to the agent's request."""
        self._agent.reply(reply)

    def restart_agent(self, failure: Failure) -> None:
        """Start another agent in place of one that has lost the rendezvous store by this failure."""
        if self.has_agent and not self.is_stopping:
            self._end = AgentEnd("error", failure)
            self._agent.kill()

    def abort(self, failure: Failure) -> None:
        """End the workers, and the pod with this failure."""
        self._end = AgentEnd("error", failure)
        log(failure.message)
        if self.has_agent:
            self._agent.kill()

    # -- the agent

    def _may_start_again(self) -> bool:
        """Decide whether to start another agent: this one was killed, or lost its store. Counts the restart."""
        lost = self._end.reason in STORE_ERRORS
        killed = not self._end.result and (self._agent.status or 0) < 0
        if self.is_stopping or not (lost or killed):
            return False
        # A restart of the workers that was interrupted is counted already, unless it is interrupted again.
        under_way = self._phase == "Rendezvous" and self._restarts.count > self._resumed
        failure = self._end.failure or examine_agent_exit(self.pod, self._agent.status or 0)
        if not under_way and not self._restarts.spend(failure):
            return False
        self._resumed = self._restarts.count
        self._release.earliest = time.monotonic() + self._restarts.delay
        self._restarts.reason = failure.message
        self._restarts.forget()
        self._services.forget()
        if not under_way:
            self._publish_failure(failure)
        log(f"restarting torchrun's agent, restart {self._restarts.count}: {failure.message}")
        self._end_processes(keep={self._store, self._agent.server, *self._helpers})
        self._end = AgentEnd()
        return True

    def _start_agent(self) -> None:
        guard: int | None = None
        if self.pod.is_multi_node and self.pod.node == 0 and not self._store:
            guard, self._store_guard = os.pipe()
        self._has_finished = False
        self._agent.start(guard, restarts=self._restarts.count, restarts_left=self._restarts.left)

    def _release_agent(self) -> None:
        """Release the agent when the master is reachable and the services are ready; meanwhile it imports torch."""
        if self.pod.is_multi_node:
            self._enter("WaitingForMaster")
        self._release.begin(self._agent.channel)
        self._release_if_ready()

    def _release_if_ready(self) -> None:
        if self._release.is_due and self._services.are_ready():
            self._release.end()
            self._agent.reply(Release())

    # -- watching

    def _step(self) -> None:
        """Wait for the next event of any kind and handle it.

        The order counts: reports of the agent before signals, so that a stop finds the failures that preceded it, and
        its end last, after all that it has reported.
        """
        watched = self._list_watched()
        ready = select.select(watched, [], [], self._find_timeout())[0]
        self._services.follow(ready)
        if self._wake in ready:
            os.read(self._wake, 4096)
        if self._agent.channel in ready:
            self._receive()
        if self._lifeline in ready and not os.read(self._lifeline, 1):
            self._agent.kill()
            os._exit(137)
        while self._signals:
            self._on_signal(self._signals.pop(0))
        problem = self._release.take_problem()
        if problem is not None:
            self._end = AgentEnd("error", build_absence_failure(self.pod, problem))
            self._agent.kill()
        self._release_if_ready()
        self._enforce_stop()
        self._reap()

    def _list_watched(self) -> list[Any]:
        """Return the descriptors and sockets to wait for."""
        watched: list[Any] = [self._wake]
        if self._agent.channel is not None:
            watched.append(self._agent.channel)
        if self._lifeline >= 0:
            watched.append(self._lifeline)
        return watched + self._services.list_watched()

    def _find_timeout(self) -> float | None:
        """Return after how many seconds to check deadlines; None if there is no deadline."""
        if self._stop.of_workers is not None:
            return max(0.0, min(_SECONDS_BETWEEN_CHECKS, self._stop.of_workers - time.monotonic()))
        timeout = self._services.find_timeout()
        seconds = min(self._release.seconds_left, math.inf if timeout is None else timeout)
        return seconds if seconds < math.inf else None

    def _enforce_stop(self) -> None:
        """Kill a stopping agent when the grace period is over, or when it has no worker any more."""
        if self._stop.of_workers is None:
            return
        if time.monotonic() >= self._stop.of_workers:
            log("grace period is over: killing the workers")
            self._stop.of_workers = math.inf
            self._agent.kill()
        elif self._has_no_workers():
            self._agent.kill()  # it waits for the other pods and does not react to signals

    def _has_no_workers(self) -> bool:
        """Return whether the agent has had no running worker for a while."""
        now = time.monotonic()
        helpers = {self._agent.pid, self._agent.rank_server, self._store}
        if any(process_state(pid) for pid in find_family(self._agent.pid) if pid not in helpers):
            self._idle_since = None
        elif self._idle_since is None:
            self._idle_since = now
        limit = _SECONDS_TO_LEAVE if self.pod.regroups else _SECONDS_WITHOUT_WORKERS
        return self._idle_since is not None and now - self._idle_since > limit

    def _receive_signal(self, number: int, frame: Any) -> None:
        """Keep a signal for the main loop. This may run between any two instructions, so it does nothing else."""
        self._signals.append(number)
        if number in STOP_SIGNALS:
            self._stop.note_signal()

    def _on_signal(self, number: int) -> None:
        if number == signal.SIGUSR1:
            threading.Thread(target=self._services.log_state, daemon=True).start()
            return
        if self.is_stopping:
            if number == signal.SIGINT:
                self._stop.of_workers = time.monotonic()
            return
        self._final = self._restarts.read_final_failures(running=self._phase == "Running")
        log(f"{signal.Signals(number).name}: stopping; the workers have {self.pod.grace:g} s to save and exit")
        self._enter("Stopping")
        # Before the signal: the agent that it reaches looks for this file to distinguish a stop from a restart.
        try_write_json(os.path.join(self.pod.runtime, STOPPING_FILE), number)
        self._stop.begin()
        self._agent.kill(signal.SIGTERM)

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            # First the events: an agent that has ended may have reported its pid just before. No test ends it there.
            self._receive()
            self._agent.note_end(pid, status)
            if pid == self._store:
                self._store = 0
            if pid == self._reader.pid:
                self._reader.pid = 0
            self._services.note_end(pid)

    def _receive(self) -> None:
        for event in self._agent.receive():
            match event:
                case Request(asked):
                    self._on_request(asked)
                case _:
                    self._on_report(event)

    def _on_report(self, event: Any) -> None:
        """Record what the agent reports."""
        match event:
            case PhaseEntered(phase):
                self._enter(phase)
            case StoreStarted(pid):
                self._store = pid
            case RanksFinished():
                self._has_finished = True
            case AgentEnd():
                self._on_agent_end(event)
            case _:
                self._services.note(event)

    def _on_request(self, request: Any) -> None:
        """Reply to a request of the agent, which waits for the reply."""
        match request:
            case EndsNeeded(local_ranks):
                self._agent.reply(describe_ended_ranks(self.pod, self._ranks, local_ranks))
            case RanksFailed():
                self._agent.reply(self._judge_failures(request))
            case RoundJoined(restarts, explained):
                self._restarts.note_round(restarts, explained=explained)
                self._agent.reply(not self._restarts.is_over)
            case Restarting():
                self._agent.reply(self._count_restart(request))
            case _:
                reply = self._services.answer(request)
                if reply is not Answer.LATER:
                    self._agent.reply(reply)

    def _judge_failures(self, event: RanksFailed) -> Verdict:
        """Record failures of workers, and decide whether they restart."""
        failures = [self._services.explain(failure) for failure in event.failures]
        restarts = self._restarts.observe(
            failures,
            self._services.find_awaited(),
            stopping=self.is_stopping,
            interrupted=event.interrupted,
            run_step=event.step,
            peers=event.peers,
        )
        # Pods that have ended join no further round: it would only time out.
        return Verdict(restarts and not event.has_ended_peers, self._restarts.knows_cause)

    def _count_restart(self, event: Restarting) -> float:
        """Count a restart of the workers, and publish the failure that it follows. Returns the seconds before it."""
        failures = self._restarts.failures
        if not failures and not event.has_cause:
            self._services.log_state()  # not in a thread: after the reply the agent stops the ranks
        self._restarts.count_in_place(has_cause=event.has_cause, run_step=event.step)
        delay = self._restarts.delay
        wait = f" in {delay:g} s" if delay else ""
        log(f"restarting the workers in the same pods{wait}, restart {self._restarts.count}: {self._restarts.reason}")
        if failures:
            root_cause = find_root_cause(failures)
            self._publish_failure(complete_worker_failure(root_cause, self._restarts, self._ranks))
        self._has_finished = False
        self._restarts.forget()
        self._services.forget()
        return delay

    def _on_agent_end(self, end: AgentEnd) -> None:
        if not self._end.result:
            self._end = end
            if end.reason in RUN_OVER:
                self._restarts.count = self._restarts.completed

    def _publish_failure(self, failure: Failure) -> None:
        """Publish the failure that caused the last restart in the pod's report."""
        self._restarts.last_failure = dataclasses.replace(failure, restarts=self._restarts.count)

    def _enter(self, phase: str) -> None:
        if phase == "Running":
            self._restarts.began = time.monotonic()
            self._restarts.completed = self._restarts.count
        if not self.is_stopping or phase == "Done":
            self._phase = phase

    def _observe_progress(self, ranks: Mapping[int, RankProgress]) -> None:
        self._services.observe(ranks)

    # -- metrics

    def _serve_metrics(self) -> None:
        is_private = self.pod.local or self.pod.dev is not None  # the holder of a pod of `ddp dev` passes it on
        host = "127.0.0.1" if is_private else ""
        own_port = self.pod.metrics_port if self.pod.dev is None else 0  # that of the pod is the holder's
        self.metrics.serve_pod(own_port, host, os.environ.get(ENV_PORT_FILE))

    def _build_report(self, ranks: Sequence[RankProgress]) -> PodReport:
        """Return the pod's report with the progress of its ranks. The threads of the endpoint call this."""
        failure = self._restarts.last_failure
        report = PodReport(
            phase=self._phase,
            restarts=self._restarts.count,
            restart_step=self._restarts.last_step,
            ranks=tuple(self._services.complete(ranks)),
            step_hint="" if self._ranks.list_ranks() else read_step_hint(self.pod.runtime),
            last_failure=None if failure is None else shorten_failure(failure, TERMINATION_MESSAGE_LIMIT),
        )
        fragments = self._services.report()
        return dataclasses.replace(report, **fragments, faults=self._services.faults)

    # -- the end

    def _finish_services(self) -> None:
        """Call the services for their last work: copies in memory are saved, and checkpoints uploaded."""
        progress = self._ranks.progress()
        step = None if progress is None else progress.checkpoint_step
        self._services.finish(Ending(self._end.result == "ok", step))
        while not self._services.are_finished():
            self._note_stop_signals()
            watched = [self._wake, *self._services.list_watched()]
            ready = select.select(watched, [], [], _SECONDS_BETWEEN_CHECKS)[0]
            if self._wake in ready:
                os.read(self._wake, 4096)
            self._services.follow(ready)
            self._reap()

    def _note_stop_signals(self) -> None:
        """Set the deadline for signals that arrive after the end of the agent."""
        while self._signals:
            if self._signals.pop(0) in STOP_SIGNALS and not self.is_stopping:
                self._stop.begin()

    def _linger(self) -> None:
        """Keep the store until the other pods' agents have closed their connections, which would fail otherwise."""
        failed = self._agent.status != 0 and not self.is_stopping
        deadline = time.monotonic() + (_LINGER_SECONDS_AFTER_FAILURE if failed else _LINGER_SECONDS)
        own = self.pod.address if self.pod.local else ""
        while self._store and time.monotonic() < deadline and count_connections(self.pod.port, own) > 1:
            time.sleep(0.02)  # one connection is the store's own

    def _end_processes(self, keep: set[int]) -> None:
        """End all children, among them adopted orphans and the store, except those in ``keep``."""
        if self._store_guard is not None and (not self._store or self._store not in keep):
            os.close(self._store_guard)
            self._store_guard = None
        deadline = time.monotonic() + _SECONDS_TO_END_PROCESSES
        while time.monotonic() < deadline:
            self._reap()
            children = list_children() - keep  # empty on systems other than Linux, where torchrun ends its workers
            if not children:
                return
            for pid in children:
                kill(pid, signal.SIGKILL)
            time.sleep(0.005)


def _reads_output(pod: Pod) -> bool:
    """Return whether the log may show the progress, or its last lines the cause of a failure without an exception."""
    return bool(pod.log_patterns) or not _uses_torchrun_logs(pod)


def _uses_torchrun_logs(pod: Pod) -> bool:
    """Return whether torchrun's own flags write the output, which overrides the reader's prefix."""
    return bool(pod.torchrun.list_output_flags())

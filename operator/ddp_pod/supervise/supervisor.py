"""Supervise one pod: start torchrun's agent, watch it, forward signals, and report how it ended."""

import dataclasses
import math
import os
import select
import signal
import threading
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from ..base.files import log, try_write_json
from ..base.pod import Pod
from ..contract.failure_record import Failure, shorten_failure
from ..contract.group_facts import GroupFacts
from ..contract.names import (
    ENV_CHECKPOINT_DIR,
    ENV_LIFELINE_FD,
    ENV_PORT_FILE,
    LAUNCHER_PHASES,
    STOPPING_FILE,
    TERMINATION_MESSAGE_LIMIT,
)
from ..contract.processes import STOP_SIGNALS, find_family, kill, list_children, process_state
from ..contract.progress import RankProgress
from ..contract.records import read_record
from ..contract.report import PodReport
from ..failures.agent_failure import (
    RUN_OVER,
    STORE_ERRORS,
    STORE_PROBLEMS,
    UNREACHABLE,
    AgentEnd,
    build_absence_failure,
    build_store_failure,
    examine_agent_exit,
)
from ..failures.rank_ends import find_remaining_processes
from ..failures.restarts import InPlaceRestarts
from ..failures.termination import complete_worker_failure, conclude
from ..failures.worker_failure import find_root_cause
from ..network.preflight import PreflightReport, describe_preflight, summarize_preflight
from ..network.unreachable import UnreachablePeers, count_connections, wait_for_master
from ..progress.metrics import MetricsEndpoint
from ..progress.output import OutputReader
from ..progress.rank_progress import RankReader, create_counters
from ..progress.step_hints import read_step_hint
from ..rank.tracking import list_tracked_runs
from ..torchrun.channel import (
    GroupFindings,
    JobStalled,
    PeersLost,
    PhaseEntered,
    PreflightDone,
    RanksFailed,
    RanksFinished,
    Release,
    Restarting,
    RoundJoined,
    SnapshotNeeded,
    StoreStarted,
    Verdict,
)
from ..transfer.checkpoints import NEWEST, CheckpointMirror
from ..transfer.memory import find_memory_folder, remove_memory, save_copies, summarize_copies
from ..transfer.shards import has_shards, wait_for_shards
from ..watchdog.groups import GroupMonitor
from ..watchdog.monitor import StallMonitor
from ..watchdog.stall import JobStall
from .agent_process import AgentProcess, ForkServer

_ENV_LOG_PREFIX = "DDP_LOG_PREFIX"  # set by the user: 0 writes lines without the rank as prefix
_SECONDS_AFTER_GRACE = 30.0  # by which the pod's grace period is longer than the workers', or a quarter of the whole
_SECONDS_WITHOUT_WORKERS = 1.0  # after which a stopping agent is killed
_SECONDS_TO_LEAVE = 5.0  # the same in an elastic job, whose agent first leaves the rendezvous
_LINGER_SECONDS = 3.0
_LINGER_SECONDS_AFTER_FAILURE = 1.0
_SECONDS_TO_END_PROCESSES = 5.0


class _MasterCheck(NamedTuple):
    """The end of a wait for the master. ``channel``: of the agent that waits; ``problem``: None if it is reachable."""

    channel: Any
    problem: str | None


class Supervisor:
    """Holds a pod's processes together. ``signals``: those received so far, extended by its signal handlers.

    ``server``: a fork server that runs already.
    """

    def __init__(
        self, pod: Pod, entry: list[str], signals: list[int], *, warm: bool, server: ForkServer | None = None
    ) -> None:
        self.pod = pod
        self._signals = signals
        self._phase = LAUNCHER_PHASES[0]
        self._end = AgentEnd()
        self._has_finished = False  # whether all ranks of this pod have exited with 0, and wait for those of other pods
        self._final: list[Failure] = []  # failures that had decided the pod's end before it was asked to stop
        self._preflight: PreflightReport | None = None
        self._mirror = CheckpointMirror(pod) if pod.checkpoint else None
        self._has_master = False  # whether the agent waits only for the checkpoints
        self._agent_waits = False  # for a snapshot
        self._release_at = 0.0  # the earliest time, after restarts in a row
        self._resumed = 0  # the last restart during which the agent was killed
        self._master_checks: list[_MasterCheck] = []  # finished and not handled yet
        self._finds_shards = False  # whether a pod other than pod 0 has shards, which it must upload
        self._signalled_at: float | None = None  # the first stop signal
        self._stop_deadline: float | None = None  # for the workers
        self._finish_by: float | None = None  # before the kubelet kills the pod
        self._idle_since: float | None = None  # since when the stopping agent has had no worker
        self._agent = AgentProcess(pod, entry, warm=warm, server=server)
        self._store = 0
        self._store_guard: int | None = None
        uses_torchrun_logs = bool(pod.torchrun.list_output_flags())  # they override the reader's prefix
        marked = pod.nproc_per_node > 1 and not uses_torchrun_logs and os.environ.get(_ENV_LOG_PREFIX) != "0"
        # The log may show the progress, and its last lines the cause of a failure without an exception.
        self._reads_output = bool(pod.log_patterns) or not uses_torchrun_logs
        self._counters = create_counters(pod)
        self._reader = OutputReader(pod, marked=marked, counters=self._counters)
        self._ranks = RankReader(pod.runtime, self._counters)
        self.metrics = MetricsEndpoint(self._ranks, self._build_report)
        self._unreachable = UnreachablePeers(pod)
        self._restarts = InPlaceRestarts(pod, self._ranks)
        self._stalls = StallMonitor(pod, self._ranks, is_stopping=lambda: self._stop_deadline is not None)
        self._groups = GroupMonitor(pod, self._ranks)
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
            signal.signal(number, self._receive_signal)
        signal.signal(signal.SIGCHLD, lambda received, frame: None)
        os.write(self._wake_end, b"\0")  # handle signals received before
        if self._reads_output:
            self._reader.start()
        if self._mirror is not None:
            self._mirror.request(claim=self.pod.node == 0, fetch=NEWEST)
        self._start_agent()
        self._serve_metrics()
        threading.Thread(target=self._stalls.run, daemon=True, name="watchdog").start()
        threading.Thread(target=self._groups.run, daemon=True, name="process groups").start()
        self._unreachable.start()
        if self._mirror is not None and self.pod.node != 0:
            threading.Thread(target=self._wait_for_shards, daemon=True, name="shards").start()
        while True:
            self._release_agent()
            while self._agent.status is None:
                self._step()
            self._receive()
            if not self._may_start_again():
                break
            self._start_agent()
        self._linger()
        own = {self._store, self._agent.server, self._agent.rank_server, *self._helpers}
        remaining = find_remaining_processes(list_children() - own)
        self._end_processes(keep=self._helpers)
        self._save_memory()
        unsaved = self._finish_uploads()
        self._end_processes(keep={self._reader.pid})
        self._reader.finish(self._reap)
        self._enter("Done")
        return conclude(
            self.pod,
            self._end,
            self._agent.status or 0,
            self._restarts,
            self._ranks,
            stopped=self._stop_deadline is not None,
            final=self._final,
            unsaved=unsaved,
            uploads=self._mirror.summarize() if self._mirror is not None else None,
            remaining=remaining,
            finished=self._has_finished,
            groups=self._groups.finish(),
            awaited=self._stalls.build_awaited(),
        )

    @property
    def _helpers(self) -> set[int]:
        """Processes that outlive an agent."""
        return {self._reader.pid, self._mirror.pid if self._mirror is not None else 0}

    # -- the agent

    def _may_start_again(self) -> bool:
        """Decide whether to start another agent: this one was killed, or lost its store. Counts the restart."""
        lost = self._end.reason in STORE_ERRORS
        killed = not self._end.result and (self._agent.status or 0) < 0
        if self._stop_deadline is not None or not (lost or killed):
            return False
        # A restart of the workers that was interrupted is counted already, unless it is interrupted again.
        under_way = self._phase == "Rendezvous" and self._restarts.count > self._resumed
        failure = self._end.failure or examine_agent_exit(self.pod, self._agent.status or 0)
        if not under_way and not self._restarts.spend(failure):
            return False
        self._resumed = self._restarts.count
        self._release_at = time.monotonic() + self._restarts.delay
        self._restarts.reason = failure.message
        self._restarts.forget()
        self._groups.forget()
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
        self._agent_waits = False
        self._has_finished = False
        self._agent.start(guard, restarts=self._restarts.count, restarts_left=self._restarts.left)

    def _release_agent(self) -> None:
        """Release the agent when the master is reachable and the checkpoints are ready; meanwhile it imports torch."""
        self._has_master = not self.pod.is_multi_node
        if self.pod.is_multi_node:
            self._enter("WaitingForMaster")
            wait = threading.Thread(target=self._wait_for_master, args=(self._agent.channel,), daemon=True)
            wait.start()
        self._release_if_ready()

    def _release_if_ready(self) -> None:
        is_early = time.monotonic() < self._release_at
        if self._has_master and not is_early and (self._mirror is None or self._mirror.ready):
            self._has_master = False  # release it once
            self._agent.reply(Release())

    def _wait_for_master(self, channel: Any) -> None:
        port = None if self.pod.node == 0 else self.pod.port
        timeout = self.pod.join_timeout_seconds
        problem = wait_for_master(self.pod.master, port, timeout, self._unreachable.record_master)
        self._master_checks.append(_MasterCheck(channel, problem))
        os.write(self._wake_end, b"\0")

    # -- watching

    def _step(self) -> None:
        """Wait for the next event of any kind and handle it."""
        ready = select.select(self._list_watched(), [], [], self._find_timeout())[0]
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
        while self._master_checks:
            self._on_master_check(self._master_checks.pop())
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
        if self._mirror is not None and self._mirror.channel is not None:
            watched.append(self._mirror.channel)
        return watched

    def _find_timeout(self) -> float | None:
        """Return after how many seconds to check deadlines; None if there is no deadline."""
        if self._stop_deadline is not None:
            return max(0.0, min(0.2, self._stop_deadline - time.monotonic()))
        seconds_to_release = self._release_at - time.monotonic()
        if self._has_master and seconds_to_release > 0:
            return seconds_to_release
        if self._mirror is not None and self._mirror.is_busy:
            return 1.0
        return None

    def _on_master_check(self, check: _MasterCheck) -> None:
        if check.channel is not self._agent.channel:
            return  # of a former agent
        if check.problem is None:
            self._has_master = True
            self._release_if_ready()
        else:
            self._end = AgentEnd("error", build_absence_failure(self.pod, check.problem))
            self._agent.kill()

    def _enforce_stop(self) -> None:
        """Kill a stopping agent when the grace period is over, or when it has no worker any more."""
        if self._stop_deadline is None:
            return
        if time.monotonic() >= self._stop_deadline:
            log("grace period is over: killing the workers")
            self._stop_deadline = math.inf
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
        self._signals.append(number)
        if number in STOP_SIGNALS and self._signalled_at is None:
            self._signalled_at = time.monotonic()

    def _set_deadlines(self) -> None:
        """Set the ends of the workers and of the pod's own work within the pod's grace period, from the signal on."""
        began = time.monotonic() if self._signalled_at is None else self._signalled_at
        reserve = min(_SECONDS_AFTER_GRACE, max(0.0, self.pod.grace / 3 - 1))
        self._stop_deadline = began + self.pod.grace + reserve / 6
        self._finish_by = began + self.pod.grace + reserve / 2

    def _on_signal(self, number: int) -> None:
        if number == signal.SIGUSR1:
            threading.Thread(target=self._stalls.log_stacks, daemon=True).start()
            return
        if self._stop_deadline is not None:
            if number == signal.SIGINT:
                self._stop_deadline = time.monotonic()
            return
        self._final = self._restarts.read_final_failures(running=self._phase == "Running")
        log(f"{signal.Signals(number).name}: stopping; the workers have {self.pod.grace:g} s to save and exit")
        self._enter("Stopping")
        try_write_json(os.path.join(self.pod.runtime, STOPPING_FILE), number)
        self._set_deadlines()
        self._agent.kill(signal.SIGTERM)

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            self._receive()  # an agent that has ended may have reported its pid just before
            self._agent.note_end(pid, status)
            if pid == self._store:
                self._store = 0
            if pid == self._reader.pid:
                self._reader.pid = 0
            if self._mirror is not None:
                self._mirror.note_end(pid)

    def _receive(self) -> None:
        for event in self._agent.receive():
            self._on_report(event)
            self._on_request(event)

    def _on_report(self, event: Any) -> None:
        """Record what the agent reports."""
        match event:
            case PhaseEntered(phase):
                self._enter(phase)
            case PreflightDone(report):
                self._preflight = report
                log(describe_preflight(report))
            case StoreStarted(pid):
                self._store = pid
            case JobStalled(stall):
                self._stalls.job_stall = read_record(JobStall, stall)
            case GroupFindings(facts):
                self._groups.note_job(None if facts is None else read_record(GroupFacts, facts))
            case RanksFinished():
                self._has_finished = True
            case AgentEnd():
                self._on_agent_end(event)

    def _on_request(self, event: Any) -> None:
        """Reply to a request of the agent."""
        match event:
            case SnapshotNeeded(known):
                self._on_snapshot_needed(known)
            case RanksFailed():
                self._agent.reply(self._judge_failures(event))
            case PeersLost():
                # The agent then reports the hang as this pod's failure, before other pods' request to restart.
                self._stalls.record_hang()
                self._agent.reply(None)
            case RoundJoined(restarts, explained):
                self._restarts.note_round(restarts, explained=explained)
                self._agent.reply(not self._restarts.is_over)
            case Restarting():
                self._agent.reply(self._count_restart(event))

    def _on_snapshot_needed(self, snapshot: str | None) -> None:
        """Make the checkpoint folder equal the snapshot with which the pods start a round; they upload it before.

        The reply follows when the mirror has done that.
        """
        if self._mirror is None:
            return
        self._agent_waits = True
        if self.pod.node == 0:
            self._mirror.request(flush=True, align=True)
        elif snapshot is None:
            if has_shards(self._checkpoint_folder):
                self._mirror.request(claim=True, flush=True)
        elif self._mirror.is_uploading:
            self._mirror.request(fetch=snapshot or None, align=True)
        elif snapshot != self._mirror.snapshot:
            self._mirror.request(fetch=snapshot)
        self._follow_mirror([])

    def _judge_failures(self, event: RanksFailed) -> Verdict:
        """Record failures of workers, and decide whether they restart."""
        failures = [self._groups.explain(failure) for failure in event.failures]
        stopping = self._stop_deadline is not None
        awaited = self._stalls.build_awaited()
        restarts = self._restarts.observe(
            failures, awaited, stopping=stopping, interrupted=event.interrupted, run_step=event.step
        )
        # Pods that have ended join no further round: it would only time out.
        return Verdict(restarts and not event.has_ended_peers, self._restarts.knows_cause)

    def _count_restart(self, event: Restarting) -> float:
        """Count a restart of the workers, and publish the failure that it follows. Returns the seconds before it."""
        failures = self._restarts.failures
        if not failures and not event.has_cause:
            self._stalls.log_stacks()
        self._restarts.count_in_place(has_cause=event.has_cause, run_step=event.step)
        delay = self._restarts.delay
        wait = f" in {delay:g} s" if delay else ""
        log(f"restarting the workers in the same pods{wait}, restart {self._restarts.count}: {self._restarts.reason}")
        if failures:
            root_cause = find_root_cause(failures)
            self._publish_failure(complete_worker_failure(root_cause, self._restarts, self._ranks))
        self._has_finished = False
        self._restarts.forget()
        self._groups.forget()
        self._stalls.forget()
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
        if self._stop_deadline is None or phase == "Done":
            self._phase = phase

    # -- metrics

    def _serve_metrics(self) -> None:
        is_private = self.pod.local or self.pod.dev is not None  # the holder of a pod of `ddp dev` passes it on
        host = "127.0.0.1" if is_private else ""
        own_port = self.pod.metrics_port if self.pod.dev is None else 0  # that of the pod is the holder's
        self.metrics.serve_pod(own_port, host, os.environ.get(ENV_PORT_FILE))

    def _build_report(self, ranks: Sequence[RankProgress]) -> PodReport:
        """Return the pod's report with the progress of its ranks."""
        failure = self._restarts.last_failure
        hint = "" if self._ranks.list_ranks() else read_step_hint(self.pod.runtime)
        return PodReport(
            phase=self._phase,
            restarts=self._restarts.count,
            restart_step=self._restarts.last_step,
            ranks=tuple(ranks),
            stall=self._stalls.describe(),
            preflight=summarize_preflight(self._preflight),
            uploads=self._mirror.summarize() if self._mirror is not None else None,
            memory=summarize_copies(find_memory_folder(self.pod.node, os.environ)),
            runs=list_tracked_runs(self.pod.runtime),
            unreachable=self._unreachable.problem,
            step_hint=hint,
            groups=self._groups.facts,
            last_failure=None if failure is None else shorten_failure(failure, TERMINATION_MESSAGE_LIMIT),
        )

    # -- checkpoints in a store

    def _follow_mirror(self, ready: Sequence[Any]) -> None:
        """Handle the events of the mirror process, and the end of its last request."""
        mirror = self._mirror
        if mirror is None:
            return
        if mirror.channel is not None and mirror.channel in ready:
            for event in mirror.receive():
                if event.end:
                    self._abort(event.end, event.message)
        if not mirror.is_busy and self._finds_shards and not mirror.is_uploading:
            mirror.request(claim=True)
        if not mirror.is_busy:
            self._release_if_ready()
            if self._agent_waits:
                self._agent_waits = False
                self._agent.reply(mirror.snapshot)
            return
        has_timed_out = time.monotonic() - mirror.requested_at > self.pod.join_timeout_seconds
        if has_timed_out and self._agent.status is None:
            reason = mirror.problem or "it takes longer than spec.rendezvous.joinTimeoutSeconds"
            self._abort(UNREACHABLE, f"cannot synchronize the checkpoint folder with {mirror.url}: {reason}")

    @property
    def _checkpoint_folder(self) -> str:
        return os.environ.get(ENV_CHECKPOINT_DIR, "")

    def _wait_for_shards(self) -> None:
        wait_for_shards(self._checkpoint_folder)
        self._finds_shards = True
        os.write(self._wake_end, b"\0")

    def _abort(self, kind: str, message: str) -> None:
        """End the workers: without the store their progress would be lost, or their states would differ."""
        self._end = AgentEnd("error", build_store_failure(self.pod, kind, message))
        log(message)
        if self._agent.status is None:
            self._agent.kill()

    # -- the end

    def _save_memory(self) -> None:
        """Save the copies in memory for the next attempt, and delete them."""
        succeeded = self._end.result == "ok"
        if not succeeded:
            progress = self._ranks.progress()
            step = -1.0 if progress is None or progress.checkpoint_step is None else progress.checkpoint_step
            deadline = time.monotonic() + self.pod.grace if self._finish_by is None else self._finish_by
            save_copies(self.pod.node, os.environ, checkpoint_step=step, deadline=deadline)
        remove_memory(self.pod.node, os.environ, succeeded=succeeded)

    def _finish_uploads(self) -> str:
        """Upload the workers' last checkpoint. Returns the missing part of the store; empty if it is complete.

        The limit is the workers' grace period for a pod that was stopped or has failed, and the watchdog's time for a
        checkpoint for one that succeeded.
        """
        mirror = self._mirror
        if mirror is None or not mirror.ready or self._has_store_problem:
            return ""
        if self.pod.node != 0 and not has_shards(self._checkpoint_folder):
            return ""
        start = time.monotonic()
        succeeded = self._end.result == "ok"
        limit = self.pod.grace
        if succeeded and self.pod.watchdog is not None:
            limit = self.pod.watchdog.checkpoint_seconds
        mirror.request(claim=self.pod.node != 0, flush=True)
        while mirror.is_busy and not self._has_store_problem:
            self._note_stop_signals()
            deadline = start + limit if self._finish_by is None else self._finish_by
            if mirror.channel is None or time.monotonic() >= deadline:
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

    @property
    def _has_store_problem(self) -> bool:
        return self._end.reason in STORE_PROBLEMS

    def _note_stop_signals(self) -> None:
        """Set the deadline for signals that arrive after the end of the agent."""
        while self._signals:
            if self._signals.pop(0) in STOP_SIGNALS and self._stop_deadline is None:
                self._set_deadlines()

    def _linger(self) -> None:
        """Keep the store until the other pods' agents have closed their connections, which would fail otherwise."""
        failed = self._agent.status != 0 and self._stop_deadline is None
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

"""The thread that detects stalls of this pod's ranks, logs their activity, and kills them if necessary."""

import dataclasses
import math
import os
import re
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from ...base.awake_clock import AwakeClock
from ...base.files import log, read_json, try_write_json
from ...base.pod import Pod, WorkerRecord, list_workers
from ...base.runtime_files import ENDING
from ...base.service import Answer, Control, Service
from ...contract.failure_record import Failure
from ...contract.failure_table import HANG
from ...contract.names import STALLED_STATES
from ...contract.plan import WatchdogConfig
from ...contract.processes import STOPPED_STATES, count_cpu_seconds, find_family, kill, process_state
from ...contract.progress import RankProgress
from ...contract.records import read_record, to_json
from ...contract.run_report import Stall, StalledRank
from ...failures.rank_ends import PrintedTraceback
from ...failures.worker_failure import examine_error, list_error_files
from ...progress.keeper import LONGEST_INTERVAL, find_interval
from ...progress.output_ends import read_last_lines
from ...progress.rank_progress import PAGE_TIMEOUT, RankReader
from ...torchrun.feature_messages import FeatureSummary, PeersLost
from .activity import describe_activity
from .collectives import Collective, CollectivesRequest, RankCollectives
from .helpers import explain_wait, find_helper
from .remedies import DDP_FORWARD_REMEDY, ONE_WAY_REMEDY, PAIR_REMEDY, advise_on_line
from .stacks import ChildStack, Stack, add_awaited, collect_stacks
from .stall import (
    ACTIVITY_LIMIT,
    FEATURE,
    STALL_REPORT_FILE,
    STALLED_RANKS_SHOWN,
    HeartbeatWatchdog,
    Idleness,
    JobStall,
    RankActivity,
    RankStall,
    RankWait,
    StallReport,
    StepMark,
    StepPulse,
    describe_stall,
    describe_waits,
    group_waits,
    report_stall,
    should_kill_workers,
    stall_grace_seconds,
    sum_up_pod,
)
from .standstill import Standstill
from .wait_channels import identify_wait, measure_sleep, sleeps_by_clock

RankMap = Mapping[int, RankProgress]
_SECONDS_OF_SILENCE = 5.0  # without a step, after which the ranks are examined, as their peers may give up
_SILENCE_FACTOR = 1.3  # by which the silence is longer when they are examined again
_SECONDS_OF_ORPHAN = 15.0  # of silence, after which a rank that may wait for a dead helper is named
_SECONDS_OF_STANDSTILL = 60.0  # without data that a rank moves, after which no first step is expected
_KILLED = 128 + signal.SIGKILL
_LINE = re.compile(r":\d+(?=\)$)")  # of a place in the script
_ONE_WAY = {"send", "recv"}
_MISMATCH = "CollectiveMismatch"  # the type of its error, beside that of a hang


class StalledWorker(NamedTuple):
    """A worker of a stalled pod, its activity, its main thread's stack, and its collectives.

    ``dead_helper``: the exception that ended a thread or a child of it, while its main thread waits for one;
    ``child``: a living child for which it may wait; ``remedy``: by the state of such a child; ``sleeps_by_clock``:
    whether it is outside of collectives and only waits for a time to pass; ``is_final``: whether nobody else could end
    its wait; ``io``: of a rank in I/O for what the kernel lets it wait; ``is_orphan``: whether a thread or a child for
    which it may wait has ended.
    """

    worker: WorkerRecord
    activity: RankActivity
    stack: Stack
    collectives: RankCollectives
    dead_helper: PrintedTraceback | None = None
    child: ChildStack | None = None
    remedy: str = ""
    sleeps_by_clock: bool = False
    is_final: bool = False
    io: str = ""
    is_orphan: bool = False

    @property
    def is_at_rest(self) -> bool:
        """Whether its main thread waits for a time to pass, or for what cannot come, rather than for a service."""
        return self.sleeps_by_clock or self.is_final

    @property
    def position(self) -> tuple[str, str, Collective | None]:
        """What it does, without what other processes do, which may change while it waits for them."""
        return self.activity.state, self.stack.place, self.collectives.pending

    @property
    def is_known(self) -> bool:
        """Whether it is known where the rank is."""
        return self.activity.state == "Stopped" or bool(self.stack.frames)

    @property
    def wait(self) -> RankWait | None:
        """The collective, or the call of torch.distributed without one, in which it waits; None if that is unknown.

        ``new_group`` and others wait through the store for all ranks: peers in a collective never come.
        """
        if self.activity.state != "Waiting":
            return None
        pending = self.collectives.pending
        call = "" if pending is None else pending.text
        if self.collectives.are_over and self.stack.is_in_torch:
            last = self.collectives.last if self.stack.waits_for_result else None  # its end is not recorded as such
            call = self.stack.library_call if last is None else last.text
        elif not self.collectives.groups and self.stack.library_call in _ONE_WAY:
            call = self.stack.library_call  # groups do not count calls between two ranks
        return RankWait(self.worker.rank, call, self.stack.script_place) if call else None


class _EndingRank(NamedTuple):
    """A rank whose program has been over for some seconds, while its process lives."""

    stalled: StalledRank
    seconds: float


@dataclasses.dataclass
class _OpenStall:
    """A stall whose stacks are in the log. Times are of the monitor's clock.

    ``remote_cause``: a rank of another pod, which kills its workers first; ``is_killed``: whether this pod's workers
    are; ``peers_wait``: whether the log has that other pods wait for a rank of this one.
    """

    stall: RankStall
    give_up_at: float
    kill_at: float = math.inf
    examine_at: float = math.inf  # when a rank in I/O is examined again
    remote_cause: RankActivity | None = None
    is_killed: bool = False
    peers_wait: bool = False


class StallMonitor(Service):
    """Detects stalls of this pod's ranks. ``job_stall``: all pods' reports of the stall."""

    name = FEATURE

    def __init__(self, pod: Pod, reader: RankReader) -> None:
        self._pod = pod
        self._reader = reader
        self._control: Control | None = None
        self.job_stall: JobStall | None = None
        self._hangs = 0
        self._open: _OpenStall | None = None  # the current stall
        self._silence: RankStall | None = None  # the same, or missing steps for less time than that of a stall
        self._examined_silence = 0.0  # seconds
        self._stalled: list[StalledWorker] = []  # when the stacks were collected
        self._steps_known = False  # whether some pod has seen steps: only then does the ranks' inactivity count
        self._interval = find_interval(pod.watchdog)
        # Between two checks are a pause and the wait for pages of ranks that do not respond.
        self._clock = AwakeClock(self._interval + 2 * PAGE_TIMEOUT, time.monotonic())
        self._idleness = Idleness()
        self._standstill = Standstill()
        self._readers: dict[int, Standstill] = {}  # of ranks in I/O, by process
        self._pulse = StepPulse(self._clock.read(time.monotonic()))
        self._watchdog = HeartbeatWatchdog(pod.watchdog) if pod.watchdog else None

    def start(self, control: Control) -> None:
        """Start, with what tells whether the pod stops."""
        self._control = control

    def note(self, event: object) -> None:
        """Note the sum of the pods' reports."""
        if isinstance(event, FeatureSummary) and event.feature == FEATURE:
            self.job_stall = read_record(JobStall, event.summary)

    def answer(self, request: object) -> object:
        """Record a hang of this pod's ranks.

        The agent waits, so that it reports the hang as this pod's failure before other pods' request to restart.
        """
        if not isinstance(request, PeersLost):
            return Answer.NOT_MINE
        error = self._describe_awaited() or self._describe_mismatch()
        if error is not None and not error["secondary"]:
            self._record(error)
        return None

    def find_awaited(self) -> Failure | None:
        """Return the failure of the rank that explains why others have timed out: outside of their collective."""
        error = self._describe_awaited() or self._describe_mismatch()
        return None if error is None else examine_error(self._pod, error)

    def forget(self) -> None:
        """Forget what ranks did that restart, or that make steps again."""
        self._silence = None
        self._readers = {}
        self._stalled = []
        if self._open is None:
            self._withdraw_report()

    def _withdraw_report(self) -> None:
        """Take back the report to the other pods."""
        self.job_stall = None
        with suppress(OSError):  # there is none, or the disk was full at the write
            os.unlink(self._path(STALL_REPORT_FILE))

    def _find_awaited(self) -> StalledWorker | None:
        """Return a rank of this pod that is outside of collectives, a computing one last; None if there is none.

        A rank that has shown no stack may be anywhere, so it explains nothing.
        """
        outside = [stalled for stalled in self._stalled if stalled.activity.state != "Waiting" and stalled.is_known]
        return min(outside, key=lambda stalled: STALLED_STATES.index(stalled.activity.state), default=None)

    def _describe_awaited(self) -> dict[str, Any] | None:
        """Return the error of that rank. One that computes is a root cause only if other pods have stalled too."""
        awaited = self._find_awaited()
        if self._silence is None or awaited is None:
            return None
        error = self._build_error(self._silence, awaited, is_root_cause=True)
        return {**error, "secondary": not (awaited.activity.behind or self._blocks_peers)}

    def _describe_mismatch(self) -> dict[str, Any] | None:
        """Return the error of a rank of this pod that waits in another collective than its peers, which all wait too.

        None if nothing shows that, or if a rank of another pod is the odd one out.
        """
        job = self._sum_up_job()
        if job is None or not job.has_mismatch:
            return None
        odd = next((found for found in self._stalled if found.wait is not None and job.is_odd(found.wait)), None)
        return None if odd is None else self._build_mismatch(odd, job.waits)

    def _sum_up_job(self) -> JobStall | None:
        """Return the reports of all pods; None if they are unknown, or the only pod makes steps."""
        if self._pod.is_multi_node:
            return self.job_stall
        if self._silence is None:
            return None
        awaited = self._find_awaited()
        summary = sum_up_pod(self._report(self._silence))
        return dataclasses.replace(summary, awaited="" if awaited is None else awaited.activity.what)

    def _build_mismatch(self, odd: StalledWorker, waits: Sequence[RankWait]) -> dict[str, Any]:
        """Return the content of the error file of a rank whose collective is not that of its peers."""
        return {
            **_identify(odd),
            "type": _MISMATCH,
            "message": f"mismatch between collectives: {describe_waits(waits)}",
            "secondary": False,
            "remedy": DDP_FORWARD_REMEDY if odd.stack.is_in_forward else _advise_on_pairs(waits),
        }

    @property
    def _blocks_peers(self) -> bool:
        """Whether other pods report that they only wait; in the only pod, whether other ranks do."""
        if self._pod.is_multi_node:
            return self.job_stall is not None and self.job_stall.stuck > 0
        return any(stalled.activity.state == "Waiting" for stalled in self._stalled)

    def observe(self, ranks: RankMap) -> None:
        """Act on stalls."""
        now = self._clock.tick(time.monotonic())
        plan = self._pod.watchdog
        is_stopping = self._control is not None and self._control.is_stopping
        if plan is not None and self._watchdog is not None and not is_stopping:
            self._check(plan, self._watchdog, ranks, now)
            self._clock.tick(time.monotonic())

    def log_state(self) -> None:
        """Write the stacks of all ranks to the log."""
        collect_stacks(self._pod, self._reader, list_workers(self._pod))

    def report(self) -> Mapping[str, object]:
        """Return the hangs and missing steps for the report."""
        return {"stall": self.describe()}

    def describe(self) -> Stall:
        """Return what the pod reports about hangs and missing steps."""
        now = self._clock.read(time.monotonic())
        age = self._watchdog.age(now) if self._watchdog else None
        if age is None:
            age = self._pulse.measure_silence(now)
        current = self._open
        if current is None:
            ending = self._list_ending()
            seconds = max((rank.seconds for rank in ending), default=None)
            ranks_shown = tuple(rank.stalled for rank in ending[:STALLED_RANKS_SHOWN])
            return Stall(self._hangs, age, seconds, ranks_shown, self._describe_pause())
        ranks = [*self._activities, *filter(None, [current.remote_cause])]
        stall = describe_stall(current.stall, ranks, now)
        return dataclasses.replace(stall, hangs=self._hangs, heartbeat_age=age)

    def _describe_pause(self) -> str:
        """Return what a rank does for which its peers wait, or in which collectives all wait; empty if unknown."""
        job = self._sum_up_job()
        if self._silence is None or job is None or not (job.waits and (job.awaited or job.has_mismatch)):
            return ""
        return f"{job.awaited}; {describe_waits(job.waits[:1])}" if job.awaited else describe_waits(job.waits)

    @property
    def _activities(self) -> list[RankActivity]:
        return [stalled.activity for stalled in self._stalled]

    @property
    def _waits(self) -> list[RankWait]:
        """The collectives in which this pod's ranks wait."""
        waits = [stalled.wait for stalled in self._stalled]
        return [wait for wait in waits if wait is not None]

    def _report(self, stall: RankStall) -> StallReport:
        return report_stall(stall, self._activities, self._waits)

    def _path(self, *names: str) -> str:
        return os.path.join(self._pod.runtime, *names)

    # -- detection

    def _check(self, plan: WatchdogConfig, watchdog: HeartbeatWatchdog, ranks: RankMap, now: float) -> None:
        """Check once: log a new stall, and kill the workers when its grace period is over."""
        workers = self._list_training_workers()
        if not workers and self._stalled:
            return  # they have failed: what they did before explains it, until they start again
        stopped = {worker.local_rank for worker in workers if process_state(worker.pid) in STOPPED_STATES}
        idle = self._observe(watchdog, workers, stopped, ranks, now)
        stall = self._find_stall(plan, watchdog, workers, idle, now)
        if stall is None:
            self._clear_stall()
            self._examine_silence(watchdog, workers, now)
            return

        current = self._open
        if current is None or stall.evidence != current.stall.evidence:
            self._steps_known = stall.known or bool(stopped & stall.idle)
            current = self._open_stall(stall, workers, now)
        elif self.job_stall is not None and self.job_stall.known and not self._steps_known:
            self._steps_known = True
            current = self._open_stall(stall, workers, now)  # idleness before the job had stalled does not count
        elif now >= current.examine_at:
            current = self._open_stall(stall, workers, now)
        current.stall = stall
        self._silence = stall
        self._examined_silence = now - stall.since
        self._log_waiting_peers(current)

        is_early = now - stall.since < plan.stall_seconds and not stall.certain
        if is_early or not self._should_kill(current, now) or plan.action == "Report" or current.is_killed:
            return
        if stall.certain or self._is_unchanged(stall, workers):
            self._kill_hung_workers(current)
        else:
            self._open_stall(stall, workers, now)

    def _list_training_workers(self) -> list[WorkerRecord]:
        """Return the running workers whose program has not ended, nor their exporter, as it does after the training."""
        workers = [worker for worker in list_workers(self._pod) if process_state(worker.pid)]
        return [
            worker
            for worker in workers
            if not os.path.exists(self._path("metrics", f"{worker.local_rank}.prom"))
            and not os.path.exists(self._path("output", f"{worker.local_rank}.{ENDING}"))
        ]

    def _list_ending(self) -> list[_EndingRank]:
        """Return the ranks whose program is over, and what keeps their processes alive."""
        ending = []
        for worker in list_workers(self._pod):
            known = read_json(self._path("output", f"{worker.local_rank}.{ENDING}"))
            keeper = known.get("keeper")
            since = known.get("since")
            if isinstance(keeper, str) and isinstance(since, float) and process_state(worker.pid):
                what = f"the program of rank {worker.rank} is over, but {keeper}"
                stalled = StalledRank(worker.rank, "Behind", what[:ACTIVITY_LIMIT])
                ending.append(_EndingRank(stalled, max(0.0, time.time() - since)))
        return ending

    def _observe(
        self,
        watchdog: HeartbeatWatchdog,
        workers: Sequence[WorkerRecord],
        stopped: set[int],
        ranks: RankMap,
        now: float,
    ) -> dict[int, float]:
        """Pass progress, steps and CPU time to their detectors. Returns for how long each local rank has been idle."""
        live = {rank: found for rank, found in ranks.items() if os.path.exists(self._path("metrics", f"{rank}.port"))}
        watchdog.observe({worker.local_rank: worker.pid for worker in workers}, live, now)

        self._pulse.observe({} if watchdog.known else self._read_marks(workers, ranks), now)

        # Ranks with heartbeats are only checked for idleness if they are stopped.
        watched = [worker for worker in workers if worker.local_rank in stopped or not watchdog.known]
        return self._idleness.observe({worker.local_rank: count_cpu_seconds([worker.pid]) for worker in watched}, now)

    def _read_marks(self, workers: Sequence[WorkerRecord], ranks: RankMap) -> dict[int, StepMark]:
        """Return the steps of each worker by local rank: its own count, or the matches of patterns in its log."""
        marks = {}
        for worker in workers:
            counters = self._reader.read_counters(worker.local_rank)
            count = ranks.get(worker.local_rank, RankProgress()).steps if self._pod.log_patterns else None
            if counters is not None and counters.shows_steps and counters.pid == worker.pid:
                marks[worker.local_rank] = StepMark(worker.pid, float(counters.steps), counters.longest_step)
            elif count:
                marks[worker.local_rank] = StepMark(worker.pid, count)
        return marks

    def _find_stall(
        self,
        plan: WatchdogConfig,
        watchdog: HeartbeatWatchdog,
        workers: Sequence[WorkerRecord],
        idle: Mapping[int, float],
        now: float,
    ) -> RankStall | None:
        """Return the current stall: heartbeats or steps that have stopped, or workers without CPU use."""
        stall = watchdog.find_stall(now)
        if stall is not None:
            return stall
        orphaned = self._find_orphaned(workers)
        if orphaned is not None:
            return orphaned
        silence = None if watchdog.known else self._pulse.measure_silence(now, plan.stall_seconds)
        # Steps may use less CPU than the threshold: a pod that makes steps is not idle.
        quiet = math.inf if watchdog.known else self._pulse.age(now)
        limit = max(plan.stall_seconds, 1.0)
        inactive = {rank: seconds for rank, seconds in idle.items() if min(seconds, quiet) >= limit}
        if silence is not None:
            message = f"no step for {silence:.0f} s, longer than any pause before"
            return RankStall(now - silence, message, certain=False, known=True, idle=frozenset(inactive))
        if not inactive:
            return None
        ranks = [str(worker.rank) for worker in workers if worker.local_rank in inactive]
        subject = "the workers have" if len(ranks) == len(workers) else f"rank {', '.join(ranks)} has"
        seconds = min(inactive.values())
        message = f"{subject} used no CPU for {seconds:.0f} s"
        is_proven = len(ranks) == len(workers) and self._is_proven(plan, workers, seconds, now)
        return RankStall(now - seconds, message, certain=False, known=is_proven, idle=frozenset(inactive))

    def _is_proven(self, plan: WatchdogConfig, workers: Sequence[WorkerRecord], idle: float, now: float) -> bool:
        """Return whether no step will come: all ranks wait in collectives that do not match, and no data moves.

        Before the first step also if they wait in one collective for a rank that only waits, too. ``idle``: seconds
        without CPU use. Ranks that have worked for longer than a start takes may train, and no step of theirs is
        visible.
        """
        still = self._standstill.observe(frozenset(worker.pid for worker in workers), now)
        if still < _SECONDS_OF_STANDSTILL:
            return False
        job = self._sum_up_job()
        if job is not None and job.has_mismatch and not job.awaited:
            return True
        age = time.time() - min(worker.started for worker in workers)
        if self._pulse.age(now) != math.inf or age - idle > plan.start_seconds:
            return False
        awaited = [stalled for stalled in self._stalled if stalled.activity.state != "Waiting"]
        is_at_rest = bool(awaited) and all(stalled.is_at_rest for stalled in awaited)
        has_peers = len(group_waits(self._list_waits())) == 1
        return is_at_rest and has_peers and idle >= plan.start_seconds

    def _find_orphaned(self, workers: Sequence[WorkerRecord]) -> RankStall | None:
        """Return the stall of a rank that waits for a thread or a child where one has ended by a fault.

        It is named early. The watchdog's time decides when it ends, as for any other stall.
        """
        present = {worker.pid for worker in workers}
        orphans = [stalled.worker for stalled in self._stalled if stalled.is_orphan]
        orphans = [worker for worker in orphans if worker.pid in present]
        silence = self._silence
        if silence is None or not orphans or self._examined_silence < _SECONDS_OF_ORPHAN:
            return None
        asleep = frozenset(worker.local_rank for worker in orphans if measure_sleep(worker.pid) > 0.5)
        if not asleep:
            return None
        message = f"no step for {self._examined_silence:.0f} s"
        return RankStall(silence.since, message, certain=False, idle=asleep)

    def _examine_silence(self, watchdog: HeartbeatWatchdog, workers: Sequence[WorkerRecord], now: float) -> None:
        """Examine ranks early, and again at growing intervals: the collectives of their peers may time out first.

        What ranks did that have ended remains known: it may explain the end of their peers.
        """
        if not workers:
            return
        age = watchdog.age(now)
        seconds = self._pulse.age(now) if age is None else age
        message = "no step for {:.0f} s"
        if seconds == math.inf:
            seconds = time.time() - max(worker.started for worker in workers)
            message = "no step since the start for {:.0f} s"
        if seconds < _SECONDS_OF_SILENCE or seconds <= self._pulse.longest:
            self.forget()
        elif self._silence is None or seconds >= _SILENCE_FACTOR * self._examined_silence:
            self._examined_silence = seconds
            asleep = frozenset(worker.local_rank for worker in workers if measure_sleep(worker.pid) > 0.5)
            self._silence = RankStall(now - seconds, message.format(seconds), certain=False, idle=asleep)
            self._stalled = self._examine(self._silence, workers, quiet=True)
            # Only the waits: a pause is no stall, but the collectives may time out before it is one.
            awaited = self._find_awaited()
            report = StallReport(
                stuck=self._report(self._silence).stuck,
                waits=group_waits(self._waits),
                awaited="" if awaited is None else awaited.activity.what,
            )
            try_write_json(self._path(STALL_REPORT_FILE), to_json(report))

    # -- the current stall

    def _open_stall(self, stall: RankStall, workers: Sequence[WorkerRecord], now: float) -> _OpenStall:
        """Log the stacks, and report the ranks' activity to the operator and the other pods."""
        self._hangs += stall.certain and self._open is None
        kind = "hang" if stall.known else "idle"
        steps = "no step was" if self._pulse.age(now) == math.inf else "too few steps were"
        note = "" if stall.known else f"; no process is killed, because {steps} counted (docs/your-script.md)"
        log(f"{kind}: {stall.message}{note}; the stacks of this pod's ranks follow")
        self._stalled = self._examine(stall, workers, quiet=False)
        log("\n".join(activity.what for activity in self._activities))
        if not list_error_files(self._pod):  # else the sum of before explains why a rank has failed meanwhile
            self.job_stall = None
        current = _OpenStall(stall, give_up_at=now + self._grace_seconds(has_cause=False))
        if self._pod.watchdog is not None and any(activity.state == "IO" for activity in self._activities):
            seconds = self._pod.watchdog.checkpoint_seconds
            pause = max(LONGEST_INTERVAL, self._pod.watchdog.stall_seconds)
            current.examine_at = min(stall.since + seconds, now + pause)
            log(f"it may be in I/O: the limit is {seconds:g} s (spec.watchdog.checkpointSeconds)")
        self._open = current
        report = self._report(stall)
        if not self._steps_known:
            is_waiting = all(stalled.wait is not None for stalled in self._stalled)
            report = StallReport(stuck=is_waiting, waits=report.waits)
        try_write_json(self._path(STALL_REPORT_FILE), to_json(report))
        return current

    def _log_waiting_peers(self, current: _OpenStall) -> None:
        """Log once per stall that other pods wait for a rank of this one."""
        is_new = self._pod.is_multi_node and self._blocks_peers and not current.peers_wait
        awaited = self._find_awaited() if is_new else None
        if awaited is not None:
            current.peers_wait = True
            log(f"hang: other pods wait for rank {awaited.worker.rank}")

    def _clear_stall(self) -> None:
        """Forget a stall that is over."""
        if self._open is None:
            return
        self._open = None
        self._withdraw_report()

    def _is_unchanged(self, stall: RankStall, workers: Sequence[WorkerRecord]) -> bool:
        """Return whether the ranks do the same as when the stall was detected."""
        before = [stalled.position for stalled in self._stalled]
        return [stalled.position for stalled in self._examine(stall, workers, quiet=True)] == before

    def _grace_seconds(self, *, has_cause: bool) -> float:
        return stall_grace_seconds(self._pod.nodes, self._interval, has_cause=has_cause)

    def _should_kill(self, current: _OpenStall, now: float) -> bool:
        """Return whether this pod's workers are to be killed now, by the reports of all pods."""
        certain = current.stall.certain
        report = self._report(current.stall)
        job_stall = self.job_stall if self._pod.is_multi_node else sum_up_pod(report)
        if current.kill_at == math.inf and should_kill_workers(report, job_stall, certain=certain):
            current.kill_at = now + self._grace_seconds(has_cause=True)

        cause = job_stall.cause if job_stall is not None and not report.cause else None
        if cause != current.remote_cause:
            current.remote_cause = cause
            current.give_up_at = now + self._grace_seconds(has_cause=False)
            log(f"hang: in another pod, {cause.what if cause else 'no rank blocks its peers any more'}")
        is_job_stuck = job_stall is not None and job_stall.is_stuck
        if any(activity is not None and activity.behind and not activity.hangs for activity in (report.cause, cause)):
            return False  # a rank in I/O, for which its peers wait
        given_up = certain or (cause is not None and report.stuck and is_job_stuck)
        return now >= current.kill_at or (given_up and now >= current.give_up_at)

    def _examine(self, stall: RankStall, workers: Sequence[WorkerRecord], *, quiet: bool) -> list[StalledWorker]:
        """Return what each worker does instead of a step. The log has the stacks unless ``quiet``.

        A rank with an error file is ending. What it did before explains more than what it does then.
        """
        failed = list_error_files(self._pod)
        workers = [worker for worker in workers if worker.local_rank not in failed]
        request = CollectivesRequest(self._pod, workers)
        stacks = collect_stacks(self._pod, self._reader, workers, quiet=quiet)
        # A rank that does not respond this time still waits where it did, or its stack shows that it does not.
        known = {stalled.worker.local_rank: stalled.collectives for stalled in self._stalled if quiet}
        reports = {**known, **request.read()}
        in_io = {stalled.worker.pid: stalled for stalled in self._stalled if stalled.activity.state == "IO"}
        examined = {worker.local_rank for worker in workers}
        stalled = [known for known in self._stalled if known.worker.local_rank not in examined]  # they have ended
        for worker in workers:
            stack = stacks.get(worker.local_rank)
            if worker.pid in in_io and not (stack and stack.frames):
                stalled.append(in_io[worker.pid])  # it may respond next time
                continue
            collectives = reports.get(worker.local_rank, RankCollectives())
            stack = add_awaited(stack, collectives.awaited) if stack else None
            activity = describe_activity(stall, worker, stack, collectives, process_state(worker.pid))
            helper = find_helper(self._pod, worker, stack)
            if not helper.note and activity.state == "Behind" and stack:
                helper = explain_wait(worker, stack, collectives)
            if helper.note:
                activity = dataclasses.replace(activity, what=f"{activity.what}; {helper.note}"[:ACTIVITY_LIMIT])
            if helper.has_ended and (helper.dead is None or helper.dead.is_last):
                activity = dataclasses.replace(activity, state="Behind")
            elif activity.state == "Behind" and not helper.is_final and stack and self._is_in_io(stall, worker, stack):
                activity = dataclasses.replace(activity, state="IO")
            stack = stack or Stack([], "")
            if activity.state == "IO":
                self._measure_standstill(worker)
            sleeps = activity.state in ("IO", "Behind") and sleeps_by_clock(worker.pid)
            stalled.append(
                StalledWorker(
                    worker,
                    activity,
                    stack,
                    collectives,
                    helper.dead,
                    helper.child,
                    helper.remedy,
                    sleeps,
                    helper.is_final,
                    identify_wait(worker.pid) if activity.state == "IO" else "",
                    helper.has_ended,
                )
            )
        return stalled

    def _measure_standstill(self, worker: WorkerRecord) -> float:
        """Return for how many seconds a rank in I/O has moved no data, at most since it was first found there."""
        reader = self._readers.setdefault(worker.pid, Standstill())
        return reader.observe(frozenset({worker.pid}), self._clock.read(time.monotonic()))

    def _is_in_io(self, stall: RankStall, worker: WorkerRecord, stack: Stack) -> bool:
        """Return whether a rank outside of collectives sleeps at times, without a lock, for less than a checkpoint."""
        plan = self._pod.watchdog
        if plan is None or stack.waits_for_lock or not measure_sleep(worker.pid):
            return False
        return self._clock.read(time.monotonic()) - stall.since < plan.checkpoint_seconds

    # -- the end of the workers

    def _kill_hung_workers(self, current: _OpenStall) -> None:
        """Kill the workers; torchrun then restarts them or gives up, as for any other failure."""
        current.is_killed = True
        self._hangs += not current.stall.certain
        has_cause = any(activity.behind for activity in self._activities)
        is_deadlock = not has_cause and not current.remote_cause and current.kill_at < math.inf
        mismatch = self._describe_mismatch() if is_deadlock else None
        if mismatch is not None:
            self._record(mismatch)
        job = self._sum_up_job()
        is_explained = job is not None and job.has_mismatch  # by the odd rank, of whatever pod
        for stalled in self._stalled:
            if mismatch is not None and stalled.worker.local_rank == mismatch["localRank"]:
                continue
            is_root_cause = stalled.activity.behind or (is_deadlock and not is_explained)
            error = self._build_error(current.stall, stalled, is_root_cause=is_root_cause, is_deadlock=is_deadlock)
            self._record(error)
        log("killing the workers because of the hang")
        for stalled in self._stalled:
            for pid in find_family(stalled.worker.pid):
                kill(pid, signal.SIGKILL)

    def _build_error(
        self, stall: RankStall, stalled: StalledWorker, *, is_root_cause: bool, is_deadlock: bool = False
    ) -> dict[str, Any]:
        """Return the content of the error file of a rank that hangs."""
        has_cause = is_deadlock or any(activity.behind for activity in self._activities)
        secondary = not is_root_cause and (has_cause or self._pod.nodes > 1)
        remote_cause = self._open.remote_cause if self._open is not None else None
        message = f"{stall.message}: {stalled.activity.what}"
        if secondary and remote_cause is not None:
            message += f"; in another pod, {remote_cause.what}"
        elif is_root_cause:
            message += self._describe_peers(stalled, is_deadlock=is_deadlock)
        place = ""
        if stalled.activity.state == "Behind" or is_deadlock or stalled.sleeps_by_clock:
            place = stalled.stack.script_place
        elif stalled.io and self._measure_standstill(stalled.worker) >= _SECONDS_OF_SILENCE:
            place = f"{stalled.stack.script_place}: {stalled.io}"  # no data: another retry after it would be in vain
        elif stalled.activity.state == "Busy":
            place = _LINE.sub("", stalled.stack.script_place)  # the line changes with each examination
        elif stalled.activity.state == "Stopped":
            place = "a stopped process"
        error = {**_identify(stalled), "type": HANG.name, "message": message, "secondary": secondary, "place": place}
        is_outside = stalled.activity.state in ("Behind", "IO", "Busy")
        error["remedy"] = stalled.remedy or (advise_on_line(stalled.stack.script_line) if is_outside else "")
        one_way = self._find_one_way_call() if is_deadlock else ""
        if one_way:
            wait = f"rank {stalled.worker.rank} waits at {stalled.stack.script_place} in {one_way}"
            text = f"{wait}, as all ranks do whose call is known"
            error |= {"type": _MISMATCH, "message": f"mismatch between collectives: {text}", "remedy": ONE_WAY_REMEDY}
        # If the script has gone on after it, another exception may be the reason.
        if stalled.dead_helper is None or not stalled.dead_helper.is_last:
            return error
        return {**error, **self._explain_by_helper(stalled, stalled.dead_helper, stall)}

    def _explain_by_helper(self, stalled: StalledWorker, helper: PrintedTraceback, stall: RankStall) -> dict[str, Any]:
        """Return the members of an error file that attribute a hang to the exception which ended a helper."""
        place = f"; rank {stalled.worker.rank} waits for it in {stalled.stack.place}: {stall.message}"
        return {
            "type": helper.exception_type,
            "message": f"{helper.message} (in {helper.origin}{place})",
            "traceback": read_last_lines(self._pod, stalled.worker.local_rank) or stalled.stack.text,
            "secondary": False,
            "remedy": stalled.remedy,
        }

    def _record(self, error: Mapping[str, Any]) -> None:
        """Write a rank's error file."""
        try_write_json(self._path("errors", f"{error['localRank']}.json"), error)

    def _describe_peers(self, cause: StalledWorker, *, is_deadlock: bool) -> str:
        """Return in which collectives the other ranks of the job wait, or what one of this pod does instead.

        ``is_deadlock``: all ranks wait.
        """
        own = cause.wait.collective if cause.wait is not None else ""
        if not is_deadlock:
            waits = describe_waits([wait for wait in self._list_waits() if wait.collective != own])
            others = [stalled.activity for stalled in self._stalled if stalled is not cause]
            waits = waits or next((activity.what for activity in others if activity.behind), "")
            return f"; {waits}" if waits else ""
        return "; all ranks of the job wait: do they call the same collectives in the same order?"

    def _list_waits(self) -> Sequence[RankWait]:
        """Return in which collectives ranks of this pod, and as far as it is known those of others, wait."""
        shared = self.job_stall.waits if self.job_stall is not None else ()
        return (*self._waits, *shared)

    def _find_one_way_call(self) -> str:
        """Return the call between two ranks, without its opposite, in which all ranks wait; empty if there is none."""
        calls = {wait.collective.partition(" ")[0] for wait in self._list_waits()}
        return calls.pop() if len(calls) == 1 and calls <= _ONE_WAY else ""


def _advise_on_pairs(waits: Sequence[RankWait]) -> str:
    """Return the remedy for ranks that all wait in calls between two ranks; empty if some wait elsewhere."""
    return PAIR_REMEDY if {wait.collective for wait in waits} <= _ONE_WAY else ""


def _identify(stalled: StalledWorker) -> dict[str, Any]:
    """Return the members that all error files of stalled ranks have."""
    return {
        "rank": stalled.worker.rank,
        "localRank": stalled.worker.local_rank,
        "traceback": stalled.stack.text if stalled.child is None else stalled.child.stack.text,
        "exitCode": _KILLED,
        "time": time.time(),
    }

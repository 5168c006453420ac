"""The thread that checks for stalls of this pod's ranks, shows what they do, and ends them when it is time to."""

import math
import os
import signal
import time
from contextlib import suppress
from typing import Any, Callable, Optional

from .contract import METRIC_HANGS, METRIC_HEARTBEAT_AGE, RUN_STEP_FILE, STALL_REPORT_FILE
from .failure_table import HANG
from .files import log, try_write_json
from .metrics import PAGE_TIMEOUT, MetricsEndpoint, read_step
from .pod import Pod, WatchdogConfig, list_workers
from .processes import STOPPED_STATES, count_cpu_seconds, find_family, kill, process_state
from .rendezvous import AwakeClock
from .stacks import Stack, collect_stacks
from .stall import (
    WHAT_LIMIT,
    HeartbeatWatchdog,
    Idleness,
    LogSteps,
    RankActivity,
    RankStall,
    StallReport,
    are_all_stuck,
    build_stall_rows,
    count_steps,
    report_stall,
    should_kill_workers,
    stall_grace_seconds,
)


class StallMonitor:
    """What this pod knows of a stall of its ranks. ``board`` is what all pods know of it, set by who receives it."""

    def __init__(self, pod: Pod, metrics: MetricsEndpoint, *, is_stopping: Callable[[], bool]) -> None:
        self._pod = pod
        self._metrics = metrics
        self._is_stopping = is_stopping
        self.board: dict[str, Any] = {}
        self._hangs = 0
        self._stall: Optional[RankStall] = None  # the one that is under way, as it was found
        self._stalled: list[tuple[dict[str, Any], RankActivity]] = []  # its workers, and what they do
        self._remote_cause: dict[str, Any] = {}  # a rank of another pod, which ends its own workers first
        self._killed = False
        self._steps_known = False  # whether some pod has seen steps, so that what the ranks do now counts
        self._kill_at = self._give_up_at = math.inf
        plan = pod.watchdog
        self._interval = 5.0 if plan is None else max(0.1, min(5.0, plan.start_seconds / 4, plan.stall_seconds / 4))
        # Between two checks are a pause and the wait for pages that do not come.
        self._clock = AwakeClock(self._interval + 2 * PAGE_TIMEOUT, time.monotonic())
        self._idleness = Idleness()
        self._log_steps = LogSteps()
        self._watchdog = HeartbeatWatchdog(plan) if plan else None

    @property
    def root_cause(self) -> Optional[str]:
        """What the rank does that keeps the others waiting, if there is one, here or in another pod."""
        behind = [one.what for _, one in self._stalled if one.behind]
        return behind[0] if behind else self._remote_cause.get("what")

    def run(self) -> None:
        """Keep the ranks' last pages fresh, and act on a stall. Never returns."""
        plan = self._pod.watchdog
        while True:
            time.sleep(self._interval)
            pages = self._metrics.collect()
            if self._pod.node == 0 and self._pod.is_multi_node:
                steps = [step for step in map(read_step, pages.values()) if step is not None]
                try_write_json(self._path(RUN_STEP_FILE), {"step": max(steps)} if steps else {})
            now = self._clock.tick(time.monotonic())
            if plan is not None and self._watchdog is not None and not self._is_stopping():
                self._check(plan, self._watchdog, pages, now)
                self._clock.tick(time.monotonic())

    def show_stacks(self) -> None:
        """Write the stacks of all ranks to the log."""
        collect_stacks(self._pod, self._metrics, list_workers(self._pod))

    def build_rows(self) -> list[str]:
        """Return the series about hangs."""
        now = self._clock.read(time.monotonic())
        rows = [f"# HELP {METRIC_HANGS} How often the watchdog found that no rank of this pod makes progress."]
        rows += [f"# TYPE {METRIC_HANGS} counter", f"{METRIC_HANGS} {self._hangs}"]
        age = self._watchdog.age(now) if self._watchdog else None
        stall = self._stall
        if stall is not None:
            if age is None and stall.known:
                age = now - stall.since
            ranks = [one for _, one in self._stalled]
            ranks += [RankActivity(**self._remote_cause)] if self._remote_cause else []
            rows += build_stall_rows(stall, ranks, now)
        if age is not None:
            rows.append(f"# HELP {METRIC_HEARTBEAT_AGE} Time since a rank of this pod last made progress.")
            rows += [f"# TYPE {METRIC_HEARTBEAT_AGE} gauge", f"{METRIC_HEARTBEAT_AGE} {age:.3f}"]
        return rows

    def _path(self, *names: str) -> str:
        return os.path.join(self._pod.runtime, *names)

    def _check(self, plan: WatchdogConfig, watchdog: HeartbeatWatchdog, pages: dict[int, str], now: float) -> None:
        """Check once: log a stall, and kill the workers when it is time to."""
        workers = [one for one in list_workers(self._pod) if process_state(one["pid"])]
        # A rank that has left its last page is done with training.
        workers = [one for one in workers if not os.path.exists(self._path("metrics", f"{one['localRank']}.prom"))]
        beating = {rank: page for rank, page in pages.items() if os.path.exists(self._path("metrics", f"{rank}.port"))}
        watchdog.observe({one["localRank"]: one["pid"] for one in workers}, beating, now)
        counts = {rank: count_steps(page) for rank, page in pages.items() if workers and not watchdog.known}
        self._log_steps.observe({rank: steps for rank, steps in counts.items() if steps is not None}, now)
        stopped = {one["localRank"] for one in workers if process_state(one["pid"]) in STOPPED_STATES}
        # A rank that reports its steps is only watched this way where it is stopped: nothing else of it is odd.
        watched = [one for one in workers if one["localRank"] in stopped or not watchdog.known]
        idle = self._idleness.observe({one["localRank"]: count_cpu_seconds([one["pid"]]) for one in watched}, now)
        stall = self._find_stall(plan, watchdog, workers, idle, now)
        if stall is None:
            self._clear_stall()
            return
        if self._stall is None or stall[2:] != self._stall[2:]:
            self._steps_known = stall.known or bool(stopped & stall.idle)
            self._open_stall(stall, workers, now)
        elif self.board.get("known") and not self._steps_known:
            self._steps_known = True
            self._open_stall(stall, workers, now)  # what idle ranks did before the job had stalled does not count
        self._stall = stall
        if not self._should_kill(stall, now) or plan.action == "Report" or self._killed:
            return
        if stall.certain or self._is_as_it_was(stall, workers):
            self._kill_hung_workers(stall)
        else:
            self._open_stall(stall, workers, now)

    def _find_stall(
        self,
        plan: WatchdogConfig,
        watchdog: HeartbeatWatchdog,
        workers: list[dict[str, Any]],
        idle: dict[int, float],
        now: float,
    ) -> Optional[RankStall]:
        """Return the stall, if there is one now: heartbeats or a log that have stopped, or workers that do nothing."""
        found = watchdog.find_stall(now)
        if found is not None:
            return found
        # Nobody but metrics.logPatterns promises that steps show in the log.
        promised = self._pod.log_patterns and not watchdog.known
        silence = self._log_steps.silence(plan.stall_seconds, now) if promised else None
        # Steps may need less CPU than counts as any, so a pod whose log shows them is not idle.
        quiet = math.inf if watchdog.known else self._log_steps.age(now)
        still = {rank: seconds for rank, seconds in idle.items() if min(seconds, quiet) >= max(plan.stall_seconds, 1.0)}
        if silence is not None:
            text = f"the log has shown no step for {silence:.0f} s, longer than ever before"
            return RankStall(now - silence, text, False, True, frozenset(still))
        if not still:
            return None
        ranks = [str(one["rank"]) for one in workers if one["localRank"] in still]
        who = "the workers have" if len(ranks) == len(workers) else f"rank {', '.join(ranks)} has"
        seconds = min(still.values())
        return RankStall(now - seconds, f"{who} used no CPU for {seconds:.0f} s", False, False, frozenset(still))

    def _open_stall(self, stall: RankStall, workers: list[dict[str, Any]], now: float) -> None:
        """Write the stacks to the log, and let the operator and the other pods know what the ranks do."""
        self._hangs += stall.certain
        known = "" if stall.known else "; that alone ends nothing, as no step is known to be overdue"
        log(f"{'hang' if stall.known else 'idle'}: {stall.message}{known}; the stacks of this pod's ranks follow")
        self._stalled = self._examine(stall, workers, collect_stacks(self._pod, self._metrics, workers))
        ranks = [one for _, one in self._stalled]
        log("\n".join(one.what for one in ranks))
        self.board, self._remote_cause, self._killed = {}, {}, False
        self._kill_at = math.inf
        self._give_up_at = now + stall_grace_seconds(self._pod.nodes, self._interval, has_cause=False)
        report = report_stall(stall, ranks) if self._steps_known else StallReport(False, False, False, None)
        try_write_json(self._path(STALL_REPORT_FILE), report._asdict())

    def _is_as_it_was(self, stall: RankStall, workers: list[dict[str, Any]]) -> bool:
        """Tell whether the ranks still stand where they stood when the stall was found."""
        found = self._examine(stall, workers, collect_stacks(self._pod, self._metrics, workers, quiet=True))
        return [one for _, one in found] == [one for _, one in self._stalled]

    def _clear_stall(self) -> None:
        """Forget a stall that is over."""
        if self._stall is not None:
            self._stall, self._stalled, self.board, self._remote_cause = None, [], {}, {}
            with suppress(OSError):
                os.unlink(self._path(STALL_REPORT_FILE))

    def _should_kill(self, stall: RankStall, now: float) -> bool:
        """Tell whether this pod's workers are to be ended now, by what all pods have found."""
        report = report_stall(stall, [one for _, one in self._stalled])
        board = self.board
        if not self._pod.is_multi_node:
            board = {"known": int(report.known), "stuck": int(report.stuck), "idle": int(report.idle), "pods": 1}
        if self._kill_at == math.inf and should_kill_workers(report, board, certain=stall.certain):
            self._kill_at = now + stall_grace_seconds(self._pod.nodes, self._interval, has_cause=True)
        cause = {} if report.cause else board.get("cause") or {}
        if cause != self._remote_cause:
            self._remote_cause = cause
            self._give_up_at = now + stall_grace_seconds(self._pod.nodes, self._interval, has_cause=False)
            log(f"hang: in another pod, {cause['what'] if cause else 'no rank blocks the others any more'}")
        given_up = stall.certain or (bool(cause) and report.stuck and are_all_stuck(board))
        return now >= self._kill_at or (given_up and now >= self._give_up_at)

    def _describe_hung(self, stall: RankStall, worker: dict[str, Any], about: RankActivity) -> dict[str, Any]:
        """Return a rank's error file."""
        error = {key: worker[key] for key in ("rank", "localRank", "restart", "pid")}
        error.update(type=HANG.name, traceback=worker.get("stack", ""), exitCode=128 + signal.SIGKILL)
        error["message"] = f"{stall.message}: {about.what}"
        has_cause = any(one.behind for _, one in self._stalled)
        deadlock = not has_cause and not self._remote_cause and self._kill_at < math.inf
        error["secondary"] = not (about.behind or deadlock) and (has_cause or self._pod.nodes > 1)
        if error["secondary"] and self._remote_cause:
            error["message"] += f"; in another pod, {self._remote_cause['what']}"
        elif deadlock:
            error["message"] += "; all ranks of the job wait: do they call the same collectives in the same order?"
        return error

    def _examine(
        self, stall: RankStall, workers: list[dict[str, Any]], stacks: dict[int, Stack]
    ) -> list[tuple[dict[str, Any], RankActivity]]:
        """Return what each rank does instead of a step."""
        found = []
        for worker in workers:
            rank, local_rank = worker["rank"], worker["localRank"]
            stack = stacks.get(local_rank)
            worker["stack"] = stack.text if stack else ""
            if process_state(worker["pid"]) in STOPPED_STATES:
                state, what = "Stopped", f"the process of rank {rank} is stopped (SIGSTOP)"
            elif stack is None or not stack.frames:
                state = "Waiting" if stall.certain or local_rank in stall.idle else "Busy"
                what = f"rank {rank} {'uses no CPU' if local_rank in stall.idle else 'shows no Python stack'}"
            elif stack.waits_for_peers:
                state, what = "Waiting", f"rank {rank} waits for other ranks in {stack.place}"
            else:
                behind = stall.certain or (local_rank in stall.idle and not stack.saves)
                state, what = "Behind" if behind else "Busy", f"rank {rank} is in {stack.place}"
            found.append((worker, RankActivity(rank, local_rank, state, what[:WHAT_LIMIT])))
        return found

    def _kill_hung_workers(self, stall: RankStall) -> None:
        """End the workers; torchrun then starts them again or gives up, as for any other failure."""
        self._killed = True
        self._hangs += not stall.certain
        for worker, about in self._stalled:
            error = {**self._describe_hung(stall, worker, about), "time": time.time()}
            try_write_json(self._path("errors", f"{worker['localRank']}.json"), error)
        log("ending the workers because of the hang")
        for worker, _ in self._stalled:
            for pid in find_family(worker["pid"]):
                kill(pid, signal.SIGKILL)

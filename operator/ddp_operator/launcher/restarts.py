"""Restarts of a pod's workers in the same pod: how many there were, why, and whether another one would help."""

import signal
import time
from typing import Any, Optional

from .contract import EXIT_PREEMPTED, EXIT_USER_ERROR
from .failure import build_signature, describe_failure, find_root_cause, read_errors
from .failure_table import CUDA, OOM, SIGNIFICANT_SECONDS
from .metrics import MetricsEndpoint
from .pod import Pod

_SECONDS_TO_SETTLE = 0.2
_SAME_TIME = 0.1  # of two runs that ended after the same time, how much of it they may differ by
_FINAL = (EXIT_USER_ERROR, EXIT_PREEMPTED)
_PEERS_MOVE = "other pods join or leave"


class Recurrence:
    """Whether a failure repeats an earlier one of this pod without progress in between.

    ``without_progress``: how many failures in a row there were without a step beyond the farthest one.
    """

    def __init__(self) -> None:
        self.without_progress = 0
        self._seen: dict[str, float] = {}  # how long the workers had run
        self._farthest = 0.0

    def observe(self, signature: str, step: Optional[float], lasted: float) -> bool:
        """Take in a failure; ``lasted``: seconds since its workers were started. Returns whether it is a repetition.

        Progress is a step beyond the farthest one; where none is reported, workers that ran for minutes made some,
        unless they failed alike after the same time: so does a mistake of the script, in the same step of each run.
        """
        before = self._seen.get(signature)
        as_late = before is not None and abs(lasted - before) <= _SAME_TIME * before
        self.without_progress += 1
        if step > self._farthest if step else lasted >= SIGNIFICANT_SECONDS and not as_late:
            self._seen.clear()
            self.without_progress = 0
        self._farthest = max(self._farthest, step or 0.0)
        repeated = signature in self._seen
        if signature:
            self._seen[signature] = lasted
        return repeated


class Restarts:
    """What failed in this pod, and how often its workers were restarted in the same pods."""

    def __init__(self, pod: Pod, metrics: MetricsEndpoint) -> None:
        self._pod = pod
        self._budget = pod.in_place_restarts
        self._metrics = metrics
        self.count = 0
        self._spent = 0  # of the budget: restarts after failures
        self.reason = ""  # of the last restart
        self.failures: list[dict[str, Any]] = []
        self._free = False  # whether the restart after them does not count
        self._ends = False  # whether they get new pods
        self.repeated = False  # whether the last failure repeats an earlier one
        self.failed_step: Optional[float] = None  # how far the run was then
        self.began = time.monotonic()  # when the workers were last started
        self._recurrence = Recurrence()

    @property
    def left(self) -> int:
        """How many restarts the budget still has."""
        return self._budget - self._spent

    def observe(self, failures: list[dict[str, Any]], *, free: bool, run_step: Optional[float] = None) -> bool:
        """Take in failures of workers. Returns whether a restart in the same pod may help, and is in the budget.

        ``free``: by what others do. Where only secondary failures are seen, the pod whose rank failed first decides,
        and pod 0 where there is none: it knows best how far the run is. ``run_step``: what it has last told of that,
        for a pod whose own ranks report nothing.
        """
        self.failures, self._free = failures, free
        root = find_root_cause(failures)
        if self._metrics.reads_log:
            time.sleep(_SECONDS_TO_SETTLE)  # what a rank wrote last is still on its way to its page
        self.failed_step = self._metrics.step(root["localRank"])
        step = run_step if self.failed_step is None else self.failed_step
        self.repeated = self._recurrence.observe(build_signature(root), step, time.monotonic() - self.began)
        if free and self._pod.elastic:
            self._recurrence.without_progress = 0
            return True
        self._ends = (self.left <= 0 and not free) or self._is_pod_suspect(root)
        final = self.repeated or any(one["outcome"].exit_code in _FINAL for one in failures)
        return not self._ends and (free or not final)

    def _is_pod_suspect(self, root: dict[str, Any]) -> bool:
        """Tell whether the pod itself may be the cause: its memory, its GPU, or whatever lets no step be made."""
        most, outcome = self._pod.restarts_without_progress, root["outcome"]
        if most is None:
            return False
        killed_for_memory = outcome.category == OOM.name and root["exitCode"] in (-signal.SIGKILL, 128 + signal.SIGKILL)
        decides = self._pod.node == 0 or not outcome.secondary
        stands_still = decides and self._recurrence.without_progress > most
        return stands_still or killed_for_memory or outcome.category == CUDA.name

    def count_in_place(self, stalled: Optional[str]) -> None:
        """Count a restart by torchrun; ``stalled`` is what a stalled rank did, where that is known."""
        self.count += 1
        self._spent += bool(self.failures) and not self._free
        self.reason = describe_failure(find_root_cause(self.failures)) if self.failures else stalled or _PEERS_MOVE

    def spend(self) -> bool:
        """Count a restart of the agent, if the budget has one left. Returns whether it had."""
        if self._spent >= self._budget:
            return False
        self._spent += 1
        self.count += 1
        return True

    def forget(self) -> None:
        """Forget the failures that the last restart has answered."""
        self.failures, self.repeated, self.failed_step, self._ends = [], False, None, False

    def read_final_errors(self, *, running: bool) -> list[dict[str, Any]]:
        """Return the failures of workers that no restart follows; the agent may still be ending the other workers."""
        # After a restart the files are of the workers before, until the new ones run; without one they are of these,
        # also where the agent has had no time to say that it has started them.
        failures = read_errors(self._pod) if running or not self.count else []
        fatal = any(one["outcome"].exit_code == EXIT_USER_ERROR for one in failures)
        return failures if fatal or self.repeated or self._ends or self.left <= 0 else []

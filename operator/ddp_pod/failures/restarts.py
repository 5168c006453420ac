"""Restarts of a pod's workers in the same pod: their number and reason, and whether another one would help."""

import signal
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from ..base.pod import Pod
from ..contract.failure_record import EVIDENCE_STOPPED, EVIDENCE_TIMEOUT, Failure
from ..contract.failure_table import CUDA, HANG, KILLED, NODE_FAULT, OOM, SIGNIFICANT_SECONDS
from ..contract.names import EXIT_PREEMPTED, EXIT_USER_ERROR
from ..progress.rank_progress import RankReader
from .collective_places import RankPlace, add_places
from .worker_failure import HELPER_ENDED, add_last_lines, find_root_cause, is_unexplained, read_recorded_failures

UNCOUNTED_RESTARTS: Final = 100
"""Restarts of a pod after failures of other pods that are not counted; more are no coincidence."""
UNEXPLAINED_RESTARTS: Final = 1
"""Restarts in a row without progress for which no pod knows a cause, and no pod joins, leaves or is replaced."""
PROMPT_RESTARTS: Final = 3
"""Restarts in a row without progress, of any kind, before the next one is delayed."""
LONGEST_DELAY: Final = 30.0
"""Seconds. The first delay is a second, and it doubles."""
_SECONDS_TO_SETTLE: Final = 0.2
_LINE_LIMIT: Final = 300  # characters of another rank's error in a message
_SAME_TIME: Final = 0.1  # two runs that ended after the same time differ by at most this share of it
_SAME_STEPS: Final = 2  # steps; two failures at the same place of a script differ by less
_PREFETCHED: Final = 16  # steps by which the workers of a DataLoader are ahead of their rank, at most usually
_KILLED: Final = 128 + signal.SIGKILL
_PEERS_CHANGE: Final = "other pods join or leave, or their ranks have failed"
_PEERS_LOST: Final = "ranks of other pods have lost a peer, and no pod has reported why"


class Recurrence:
    """Whether a failure repeats an earlier one of this pod without progress in between.

    ``without_progress``: number of consecutive failures without a step beyond the farthest one.
    ``has_progress``: whether the workers that ended last have made progress.
    """

    def __init__(self) -> None:
        self.without_progress = 0
        self.has_progress = False
        self._seen: dict[str, float] = {}  # seconds that the workers had run, by signature
        self._counts: dict[str, int] = {}  # steps that the failed rank had made since its start, by signature
        self._farthest = 0.0
        self._hangs: set[str] = set()  # of workers that had begun at the first step, minutes before

    def observe(self, signature: str, step: float | None, lasted: float, counted: int | None = None) -> bool:
        """Record a failure ``lasted`` seconds after the start of its workers. Returns whether it is a repetition."""
        self.note_end(signature, step, lasted, counted)
        if not self.has_progress:
            self.without_progress += 1
        # What makes ranks wait for each other at a line may come at any step. A run that resumes has made progress.
        is_anew = counted is not None and (step or 0.0) <= counted and lasted < SIGNIFICANT_SECONDS
        hang = signature if is_anew and signature.startswith(HANG.name) else ""
        repeated = signature in self._seen or hang in self._hangs
        if signature:
            self._seen[signature] = lasted
        self._hangs |= {hang} - {""}
        return repeated

    def note_end(self, signature: str, step: float | None, lasted: float, counted: int | None) -> None:
        """Record how far workers came that have ended, for whatever reason.

        Progress is a step beyond the farthest one. If the step of the run is unknown, it is any other number of steps
        since the start of the process (``counted``) than before the same failure: a mistake in the script fails at the
        same step. Without a counter it is a run of minutes that did not end after the same time before.
        """
        self.has_progress = self._is_progress(signature, step, lasted, counted)
        if counted is not None:
            self._counts[signature] = counted
        if self.has_progress:
            self._seen.clear()
            self.without_progress = 0
        self._farthest = max(self._farthest, step or 0.0)

    def _is_progress(self, signature: str, step: float | None, lasted: float, counted: int | None) -> bool:
        ahead = _PREFETCHED if signature in self._seen and signature == HELPER_ENDED else 0
        if step:
            return step > self._farthest + ahead
        if counted is not None:
            return counted > 0 and abs(counted - self._counts.get(signature, -_SAME_STEPS)) >= _SAME_STEPS + ahead
        before = self._seen.get(signature)
        as_late = before is not None and abs(lasted - before) <= _SAME_TIME * before
        return lasted >= SIGNIFICANT_SECONDS and not as_late


class InPlaceRestarts:
    """The failures of this pod's workers, and the restarts in the same pod that followed."""

    def __init__(self, pod: Pod, reader: RankReader) -> None:
        self._pod = pod
        self._budget = pod.in_place_restarts
        self._reader = reader
        self.count = 0
        self.completed = 0  # restarts after which the workers have started
        self._spent = 0  # restarts after failures, which count against the budget
        self._uncounted = 0  # restarts after failures of other pods
        self._unexplained = 0  # restarts of any pods without a known cause, since the last progress
        self._in_a_row = 0  # restarts of any kind since the last progress
        self.reason = ""  # of the last restart
        self.last_step: float | None = None  # of the run, at the last restart; only pod 0 records it
        self.last_failure: Failure | None = None  # before the last restart
        self.failures: Sequence[Failure] = ()
        self._caused_by_peers = False  # then the restart after them does not count
        self._interrupted = False  # by a stop request or a change of the group, which a pod has announced
        self._needs_new_pods = False
        self.repeated = False  # whether the last failure repeats an earlier one
        self.failed_step: float | None = None  # step at that failure
        self.began = time.monotonic()  # last start of the workers
        self._recurrence = Recurrence()

    @property
    def left(self) -> int:
        """Restarts left in the budget."""
        return self._budget - self._spent

    @property
    def delay(self) -> float:
        """Seconds before the workers start again."""
        excess = self._in_a_row - PROMPT_RESTARTS
        return 0.0 if excess <= 0 else min(LONGEST_DELAY, 2.0 ** min(excess - 1, 10))

    @property
    def knows_cause(self) -> bool:
        """Whether a failure of this pod explains those of other pods, or an announced interruption does."""
        if self._interrupted:
            return True
        if not self.failures:
            return False
        root_cause = find_root_cause(self.failures)
        return not root_cause.secondary and root_cause.container_exit_code != EXIT_PREEMPTED

    def observe(
        self,
        failures: Sequence[Failure],
        awaited: Failure | None = None,
        *,
        stopping: bool = False,
        interrupted: bool = False,
        run_step: float | None = None,
        peers: Sequence[RankPlace] = (),
    ) -> bool:
        """Record failures of workers. Returns whether a restart in the same pod may help and is within the budget.

        If other pods caused all of them, the restart is not counted, and the pod of the rank that failed first decides;
        without such a pod, ``is_over`` does. ``awaited``: the failure of a rank that is outside of collectives, which
        counts if the others have only timed out; ``run_step``: the last step that pod 0 has shared, for a pod whose own
        ranks report none; ``peers``: where ranks of other pods have lost a peer; ``interrupted``: a stop request or a
        change of the group has ended the ranks of all pods.
        Each such restart has a cause outside of the job, so their number is not limited.
        """
        self._interrupted = interrupted
        if interrupted:
            return self._observe_interruption(failures, stopping=stopping, run_step=run_step)

        if any(is_unexplained(self._pod, failure) for failure in failures):
            time.sleep(_SECONDS_TO_SETTLE)  # the ranks' last lines may not have arrived
            failures = add_places(list(map(self._explain, failures)), peers)
        if awaited is not None and _explains(awaited, failures):
            failures = [*failures, _add_timeout(awaited, failures)]
        self.failures = failures
        root_cause = find_root_cause(failures)
        if self._reader.reads_log:
            time.sleep(_SECONDS_TO_SETTLE)  # a rank's last lines may not have reached its page
        self.failed_step = self._reader.step(root_cause.local_rank or 0)
        counted = self._reader.count_steps(root_cause.local_rank or 0)
        is_killed = root_cause.category == KILLED.name and root_cause.exit_code == _KILLED
        if is_killed and counted and root_cause.evidence != EVIDENCE_STOPPED:
            # A node short of memory does not kill twice after the same step.
            signed = replace(root_cause, signature=f"SIGKILL after {counted} steps")
            self.failures = [signed if failure is root_cause else failure for failure in failures]
            root_cause = signed
        step = self.failed_step
        if step is None and run_step is not None:
            step = max(run_step, counted or 0.0)  # pod 0 shares its step now and then, so it may be an older one
        lasted = time.monotonic() - self.began
        self.repeated = self._recurrence.observe(root_cause.signature, step, lasted, counted)
        self._note_progress()
        self._caused_by_peers = not stopping and self._are_caused_by_peers(failures)
        if self._caused_by_peers:
            self._uncounted += 1
            if self._pod.elastic:
                self._recurrence.without_progress = 0
            return True

        self._needs_new_pods = self.left <= 0 or self._is_pod_suspect(root_cause)
        is_watched = self._pod.dev is not None  # by a user, who wants to see the failure and runs again
        is_preempted = any(failure.container_exit_code == EXIT_PREEMPTED for failure in failures)
        is_final = self.repeated or is_watched or is_preempted or root_cause.container_exit_code == EXIT_USER_ERROR
        return not self._needs_new_pods and not is_final

    def _explain(self, failure: Failure) -> Failure:
        return add_last_lines(self._pod, failure) if is_unexplained(self._pod, failure) else failure

    def _observe_interruption(self, failures: Sequence[Failure], *, stopping: bool, run_step: float | None) -> bool:
        """Record the end of ranks that were not at fault. Returns whether they restart and wait for the other pods."""
        self.failures = failures
        self.failed_step = self._reader.step(find_root_cause(failures).local_rank or 0)
        self._observe_end(run_step)
        self._caused_by_peers = self._pod.awaits_peers and not stopping
        return self._caused_by_peers

    def _are_caused_by_peers(self, failures: Sequence[Failure]) -> bool:
        """Return whether the failures are not this pod's, apart from the ranks that the agent stopped after them."""
        own = [failure for failure in failures if failure.evidence != EVIDENCE_STOPPED]
        not_counted = all(failure.secondary or failure.container_exit_code == EXIT_PREEMPTED for failure in own)
        has_left = self._uncounted < UNCOUNTED_RESTARTS
        return bool(own) and not_counted and self._pod.awaits_peers and has_left

    def _note_progress(self) -> None:
        if self._recurrence.has_progress:
            self._unexplained = 0
            self._in_a_row = 0

    def _is_pod_suspect(self, root_cause: Failure) -> bool:
        """Return whether the pod or its node may be the cause: memory, GPU, disk, CPU, or a fault before any step."""
        limit = self._pod.restarts_without_progress
        if limit is None:
            return False

        killed_for_memory = root_cause.category == OOM.name and root_cause.exit_code == _KILLED
        decides = self._pod.node == 0 or not root_cause.secondary
        is_without_progress = decides and self._recurrence.without_progress > limit
        return is_without_progress or killed_for_memory or root_cause.category in (CUDA.name, NODE_FAULT.name)

    def count_in_place(self, *, has_cause: bool, run_step: float | None = None) -> None:
        """Count a restart by torchrun. ``has_cause``: whether a pod knows why; ``run_step``: see ``observe``."""
        self.count += 1
        if not self.failures:
            self._observe_end(run_step)
        if self._pod.node == 0:
            self.last_step = self.failed_step if self.failures else self._reader.step(0)
        if self.failures and not self._caused_by_peers:
            self._spent += 1
        self._in_a_row += 1
        unknown = _PEERS_CHANGE if has_cause else _PEERS_LOST
        self.reason = find_root_cause(self.failures).message if self.failures else unknown

    def note_round(self, count: int, *, explained: bool) -> None:
        """Note a round of the rendezvous. ``explained``: see ``Round``."""
        self.count = max(self.count, count)
        self._unexplained = 0 if explained else self._unexplained + 1

    @property
    def is_over(self) -> bool:
        """Whether the workers must not start: in vain, they have started again without a known cause."""
        return self._pod.awaits_peers and self._unexplained > UNEXPLAINED_RESTARTS

    def _observe_end(self, run_step: float | None = None) -> None:
        """Record the end of workers that have not failed."""
        step = self._reader.step(0)
        lasted = time.monotonic() - self.began
        counted = self._reader.count_steps(0)
        self._recurrence.note_end("", run_step if step is None else step, lasted, counted)
        self._note_progress()

    def spend(self, failure: Failure) -> bool:
        """Count a restart of the agent if the budget has one left. Returns whether it had.

        ``failure``: of the agent. The loss of pod 0 and its store is not counted, like other lost peers.
        """
        if failure.secondary and self._pod.awaits_peers and self._uncounted < UNCOUNTED_RESTARTS:
            self._uncounted += 1
        elif self._spent >= self._budget:
            return False
        else:
            self._spent += 1
        self._observe_end()
        self._in_a_row += 1
        self.count += 1
        return True

    def forget(self) -> None:
        """Forget the failures that the last restart has handled."""
        self.failures = ()
        self.repeated = False
        self.failed_step = None
        self._interrupted = False
        self._needs_new_pods = False

    def read_final_failures(self, *, running: bool) -> list[Failure]:
        """Return the failures of workers that no restart follows; the agent may still be ending the other workers."""
        # After a restart the error files belong to the former workers until the new ones run. Without a restart they
        # belong to the current workers, even before the agent reports that it has started them.
        failures = read_recorded_failures(self._pod) if running or not self.count else []
        is_fatal = bool(failures) and find_root_cause(failures).container_exit_code == EXIT_USER_ERROR
        return failures if is_fatal or self.repeated or self._needs_new_pods or self.left <= 0 else []


def _explains(awaited: Failure, failures: Sequence[Failure]) -> bool:
    """Return whether a rank for which others have waited is the cause of their failures.

    A rank outside of collectives is it only if they gave up the wait: a lost connection has another cause. Ranks in
    collectives that do not match never continue, however the wait ends.
    """
    if awaited.secondary:
        return False
    if awaited.category == HANG.name:
        return _have_timed_out(failures)
    return all(failure.secondary or failure.evidence == EVIDENCE_STOPPED for failure in failures)


def _add_timeout(awaited: Failure, failures: Sequence[Failure]) -> Failure:
    """Return the hang of a rank with the error of the first peer that gave up to wait for it."""
    timed_out = [failure for failure in failures if failure.evidence == EVIDENCE_TIMEOUT]
    if awaited.category != HANG.name or not timed_out:
        return awaited
    first = min(timed_out, key=lambda failure: failure.time or 0.0)
    line = first.message.partition("\n")[0][:_LINE_LIMIT]
    return replace(awaited, message=f"{awaited.message}; rank {first.rank} gave up: {line}")


def _have_timed_out(failures: Sequence[Failure]) -> bool:
    """Return whether ranks have only given up a collective, rather than lost a connection as with a deleted pod."""
    own = [failure for failure in failures if failure.evidence != EVIDENCE_STOPPED]
    return all(failure.secondary for failure in own) and any(failure.evidence == EVIDENCE_TIMEOUT for failure in own)

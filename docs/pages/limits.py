"""The limits that can end a job or an attempt: a table of docs/api.md."""

from __future__ import annotations

from typing import Final

from ddp_operator.api.job import CRASH_LOOP_FAILURES, SILENT_POD_SECONDS, SILENT_START_SECONDS
from ddp_operator.api.schema import Limit
from ddp_operator.api.spec import Recovery, Rendezvous, Watchdog
from ddp_operator.decide.attempts import PROMPT_DISRUPTIONS
from ddp_operator.features import SCHEMA
from ddp_pod.contract.failure_table import SIGNIFICANT_SECONDS
from ddp_pod.failures.restarts import LONGEST_DELAY, PROMPT_RESTARTS

_RECOVERY: Final = "spec.recovery"
_WATCHDOG: Final = "spec.watchdog"
LIMITS: Final = (
    Limit(
        "restarts after failures of both kinds, since a checkpoint last advanced by spec.recovery.resetAfterSteps",
        Recovery().max_restarts,
        "RestartBudgetExhausted",
        f"{_RECOVERY}.maxRestarts",
    ),
    Limit("failures in a row without progress", CRASH_LOOP_FAILURES, "CrashLoop"),
    Limit(
        "occurrences of the same failure of the script without progress in between",
        2,
        "RepeatedFailure",
        "fixed; exit code 82 is exempt",
    ),
    Limit(
        "seconds of running that count as progress if the workers report no steps",
        f"{SIGNIFICANT_SECONDS:g}",
        "the two limits above do not apply",
    ),
    Limit(
        "exit codes of the script without a restart",
        ", ".join(map(str, Recovery().non_retryable_exit_codes)),
        "UserError",
        f"{_RECOVERY}.nonRetryableExitCodes",
    ),
    Limit(
        "restarts in the same pods in an attempt (0 with the static rendezvous)",
        "the rest of maxRestarts",
        "the next failure gets new pods",
        f"{_RECOVERY}.inPlaceRestarts, which is then a separate limit",
    ),
    Limit(
        "failures in a row without progress that lead to a restart in the same pods",
        CRASH_LOOP_FAILURES - 2,
        "the next failure gets new pods",
        f"no limit if {_RECOVERY}.inPlaceRestarts is set",
    ),
    Limit(
        "restarts in the same pods in a row without progress, of any kind, at once",
        PROMPT_RESTARTS,
        f"a delay of 1 s before the next one, which doubles up to {LONGEST_DELAY:g} s",
    ),
    Limit(
        "restarts of all pods after disruptions, lost nodes, a change of spec.nodes or a resumption",
        "no limit",
        "",
        f"{_RECOVERY}.countDisruptions: the first two count towards maxRestarts",
    ),
    Limit(
        "disruptions in a row, each less than 300 s after the restart before it and without a step",
        PROMPT_DISRUPTIONS,
        "a delay of 10 s before the next attempt, which doubles up to 6 minutes",
    ),
    Limit(
        "seconds for all pods to join the rendezvous",
        Rendezvous().join_timeout_seconds,
        "a failure (Network)",
        "spec.rendezvous.joinTimeoutSeconds",
    ),
    Limit("seconds until the first step", Watchdog().start_seconds, "a failure (Hang)", f"{_WATCHDOG}.startSeconds"),
    Limit("seconds without a step", Watchdog().stall_seconds, "a failure (Hang)", f"{_WATCHDOG}.stallSeconds"),
    Limit(
        "seconds without a step while a checkpoint is saved, or the ranks wait for one that is in I/O",
        Watchdog().checkpoint_seconds,
        "a failure (Hang)",
        f"{_WATCHDOG}.checkpointSeconds",
    ),
    Limit(
        "seconds to wait for a terminating pod on a lost node",
        Recovery().force_delete_after_seconds,
        "a restart with new pods, not counted",
        f"{_RECOVERY}.forceDeleteAfterSeconds",
    ),
    Limit(
        "seconds to wait for the root cause while pods report only secondary failures and one pod reports nothing",
        f"{SILENT_POD_SECONDS} ({SILENT_START_SECONDS} for a pod that has not run yet)",
        "the failure counts as reported",
    ),
    Limit(
        "seconds that `ddp dev` holds pods without a run", "1800", "end as the last run ended", "spec.dev.holdSeconds"
    ),
    Limit("seconds that the job may be active", "no limit", "DeadlineExceeded", "spec.activeDeadlineSeconds"),
    Limit(
        "seconds that an attempt may wait for all its pods to run",
        "no limit",
        "PendingDeadlineExceeded",
        "spec.pendingDeadlineSeconds",
    ),
    *(limit for part in SCHEMA.owned for limit in part.limits),
)

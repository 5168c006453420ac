"""The limits that can end a job, or an attempt of it: the rows of a table of docs/api.md."""

from __future__ import annotations

from typing import Final, NamedTuple

from ddp_operator.api.job import CRASH_LOOP_FAILURES, SILENT_POD_SECONDS, SILENT_START_SECONDS
from ddp_operator.api.spec import Recovery, Rendezvous, Watchdog
from ddp_operator.contract.failure_table import SIGNIFICANT_SECONDS
from ddp_operator.launcher.torchrun.rendezvous import FREE_RESTARTS


class Limit(NamedTuple):
    """A row: ``reason`` is that of the condition Failed, else what follows; ``change``: where."""

    what: str
    value: object
    reason: str
    change: str = "fixed"


_RECOVERY, _WATCHDOG = "spec.recovery", "spec.watchdog"
LIMITS: Final = (
    Limit(
        "restarts after failures, on either level, since checkpoints last advanced by spec.recovery.resetAfterSteps",
        Recovery().max_restarts,
        "RestartBudgetExhausted",
        f"{_RECOVERY}.maxRestarts",
    ),
    Limit("failures in a row without a step beyond the farthest one", CRASH_LOOP_FAILURES, "CrashLoop"),
    Limit(
        "the same failure of the script without a step in between",
        2,
        "RepeatedFailure",
        "fixed; a script that exits with 82 is tried again",
    ),
    Limit(
        "seconds after which workers that report no steps count as having made progress",
        f"{SIGNIFICANT_SECONDS:g}",
        "the two rows above do not apply",
    ),
    Limit(
        "exit codes of the script after which no restart is tried",
        ", ".join(map(str, Recovery().non_retryable_exit_codes)),
        "UserError",
        f"{_RECOVERY}.nonRetryableExitCodes",
    ),
    Limit(
        "of these, restarts in the same pods, in an attempt (0 with the static rendezvous)",
        "all that are left",
        "the next failure gets new pods",
        f"{_RECOVERY}.inPlaceRestarts, which is then a budget of its own",
    ),
    Limit(
        "failures in a row without a step beyond the farthest one that are answered in the same pods",
        CRASH_LOOP_FAILURES - 2,
        "the next one gets new pods",
        f"any number where {_RECOVERY}.inPlaceRestarts is set",
    ),
    Limit(
        "restarts in the same pods of an elastic job, in an attempt, because pods came, left or lost a peer",
        FREE_RESTARTS,
        "further ones use up the row above",
    ),
    Limit(
        "restarts of all pods after disruptions, lost nodes, a change of spec.nodes or a resumption",
        "no limit",
        "",
        f"{_RECOVERY}.countDisruptions counts the first two as failures",
    ),
    Limit(
        "seconds in which all pods must join the rendezvous",
        Rendezvous().join_timeout_seconds,
        "a failure (Network)",
        "spec.rendezvous.joinTimeoutSeconds",
    ),
    Limit("seconds until the first step", Watchdog().start_seconds, "a failure (Hang)", f"{_WATCHDOG}.startSeconds"),
    Limit("seconds without a step", Watchdog().stall_seconds, "a failure (Hang)", f"{_WATCHDOG}.stallSeconds"),
    Limit(
        "seconds without a step while a checkpoint is saved",
        Watchdog().checkpoint_seconds,
        "a failure (Hang)",
        f"{_WATCHDOG}.checkpointSeconds",
    ),
    Limit(
        "seconds that a pod on a lost node may hold up the job",
        Recovery().force_delete_after_seconds,
        "a restart of all pods that is not counted",
        f"{_RECOVERY}.forceDeleteAfterSeconds",
    ),
    Limit(
        "seconds to wait for the root cause where only secondary failures are reported and a pod is silent",
        f"{SILENT_POD_SECONDS} ({SILENT_START_SECONDS} for a pod that has not run yet)",
        "the failure counts as it was reported",
    ),
    Limit("minutes that GPUs may be held without a step", "no limit", "Idle, or suspended", "spec.idle"),
    Limit("seconds that the job may be active", "no limit", "DeadlineExceeded", "spec.activeDeadlineSeconds"),
    Limit(
        "seconds that an attempt may wait for all of its pods to run",
        "no limit",
        "PendingDeadlineExceeded",
        "spec.pendingDeadlineSeconds",
    ),
)

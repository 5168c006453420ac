"""The limits that can end a job or an attempt: a table of docs/api.md, without those that a field alone describes."""

from __future__ import annotations

from typing import Final

from ddp_operator.api.job import CRASH_LOOP_FAILURES, SILENT_POD_SECONDS, SILENT_START_SECONDS
from ddp_operator.api.schema import Limit
from ddp_operator.api.spec import Recovery
from ddp_operator.decide.attempts import PROMPT_DISRUPTIONS
from ddp_operator.features import SCHEMA
from ddp_pod.failures.restarts import LONGEST_DELAY, PROMPT_RESTARTS

_RECOVERY: Final = "spec.recovery"
LIMITS: Final = (
    Limit(
        "restarts after failures, since a checkpoint last advanced by spec.recovery.resetAfterSteps",
        Recovery().max_restarts,
        "RestartBudgetExhausted",
        f"{_RECOVERY}.maxRestarts",
    ),
    Limit("failures in a row without progress", CRASH_LOOP_FAILURES, "CrashLoop"),
    Limit(
        "occurrences of the same failure of the script without progress",
        2,
        "RepeatedFailure",
        "fixed; exit code 82 is exempt",
    ),
    Limit(
        "restarts of an attempt in the same pods",
        "the rest of maxRestarts",
        "the next failure gets new pods",
        f"{_RECOVERY}.inPlaceRestarts, which is then a separate limit",
    ),
    Limit(
        "the same, in a row without progress",
        CRASH_LOOP_FAILURES - 2,
        "the next failure gets new pods",
        f"no limit if {_RECOVERY}.inPlaceRestarts is set",
    ),
    Limit(
        "the same, of any kind, before a delay",
        PROMPT_RESTARTS,
        f"the next one after 1 s, which doubles up to {LONGEST_DELAY:g} s",
    ),
    Limit(
        "restarts after disruptions, lost nodes, a change of spec.nodes or a resumption",
        "no limit",
        "",
        f"{_RECOVERY}.countDisruptions: the first two count towards maxRestarts",
    ),
    Limit(
        "disruptions in a row without a step, each less than 300 s after a restart",
        PROMPT_DISRUPTIONS,
        "the next attempt after 10 s, which doubles up to 6 minutes",
    ),
    Limit(
        "seconds to wait for a silent pod while the others report only secondary failures",
        f"{SILENT_POD_SECONDS} ({SILENT_START_SECONDS} for a pod that has not run yet)",
        "the failure counts as reported",
    ),
    *(limit for part in SCHEMA.owned for limit in part.limits),
)

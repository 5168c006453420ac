"""``spec.watchdog``: its rules, and the plan of what the pods do about a hang."""

from dataclasses import replace
from typing import Annotated, Final, Literal

from msgspec import Meta, field

from ddp_operator.api.job import DDPTrainingJob
from ddp_operator.api.rule_builders import YEAR, require_between
from ddp_operator.api.schema import OwnFields
from ddp_operator.api.spec import SpecFields
from ddp_pod.contract.plan import PodPlan, WatchdogConfig


class Watchdog(SpecFields, frozen=True, kw_only=True):
    """Detection of hangs. A step or heartbeat() is progress."""

    start_seconds: Annotated[int, Meta(description="Maximum seconds from the workers' start to their first step.")] = (
        900
    )
    stall_seconds: Annotated[
        int,
        Meta(
            description="Maximum seconds without a step or heartbeat of any rank of a pod; without either, "
            "without CPU use."
        ),
    ] = 300
    checkpoint_seconds: Annotated[
        int,
        Meta(
            description="As stallSeconds, while a rank saves a checkpoint, or its peers wait for its I/O (upload, "
            "download, file, subprocess)."
        ),
    ] = 1800
    action: Annotated[
        Literal["Restart", "Fail", "Report"],
        Meta(
            description="Restart: restart the workers, as after any failure. Fail: fail the job. Report: only "
            "report, as before the first visible step unless a rank at rest prevents it."
        ),
    ] = "Restart"


class WatchdogFields(SpecFields, frozen=True, kw_only=True):
    """The part of this feature in the spec."""

    watchdog: Watchdog = field(default_factory=Watchdog)


def _plan(job: DDPTrainingJob, plan: PodPlan) -> PodPlan:
    own = FIELDS.read(job.spec).watchdog
    config = WatchdogConfig(own.start_seconds, own.stall_seconds, own.checkpoint_seconds, own.action)
    return replace(plan, watchdog=config)


FIELDS: Final = OwnFields(
    "stalls",
    WatchdogFields,
    rules=tuple(
        require_between(f"spec.watchdog.{name}", 1, YEAR, "to only report hangs, set action: Report")
        for name in ("startSeconds", "stallSeconds", "checkpointSeconds")
    ),
    fixed_once="run",
    plan=_plan,
)

"""``spec.dev``: its rules, and the plan of pods that are held between runs."""

from dataclasses import replace
from typing import Annotated, Final

from msgspec import Meta

from ddp_operator.api.job import DDPTrainingJob
from ddp_operator.api.rule_builders import require_between
from ddp_operator.api.schema import OwnFields
from ddp_operator.api.spec import SpecFields
from ddp_pod.contract.plan import DevConfig, PodPlan


class Dev(SpecFields, frozen=True, kw_only=True):
    """The pods stay when their ranks end, for `ddp rerun` (docs/dev.md). processGroupPolicy and
    recovery.replicaMismatch only report."""

    hold_seconds: Annotated[
        int,
        Meta(
            description="Seconds without a run, 60 to 86400, until the pods are released and the job ends as its "
            "last run did."
        ),
    ] = 1800


class DevFields(SpecFields, frozen=True, kw_only=True):
    """The part of this feature in the spec."""

    dev: Dev | None = None


def _plan(job: DDPTrainingJob, plan: PodPlan) -> PodPlan:
    """Return the plan of pods that are held, and number their runs after those whose code is lost."""
    dev = FIELDS.read(job.spec).dev
    if dev is None:
        return plan
    return replace(plan, dev=DevConfig(dev.hold_seconds, job.status.dev.lost_runs if job.status.dev else 0))


FIELDS: Final = OwnFields(
    "dev",
    DevFields,
    rules=(require_between("spec.dev.holdSeconds", 60, 24 * 3600, "`ddp release` ends the job earlier"),),
    fixed_once="run",
    plan=_plan,
    holds=True,
)

"""The pace in the status: rates between reports, the remaining time, and those of a process that has ended."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from ddp_operator.api.status import Progress
from ddp_operator.decide.hooks import Hooks
from ddp_operator.features import pace
from tests.support.builders import child_job, child_pod, last_words, page
from tests.support.decisions import RUNNING, STARTED, present, run_pass
from tests.support.fake_cluster import ReconcilerHarness

HOOKS = Hooks((pace.FEATURE,))


def report(step: int, **more: Any) -> bytes:
    return page(phase="Running", step=step, steps=step, total_steps=100, **more)


async def train_with_pace(hooks: Hooks = HOOKS) -> ReconcilerHarness:
    """Return a job that makes two steps a second."""
    harness = await ReconcilerHarness(hooks=hooks).train(report(10))
    harness.cluster.page = report(30)
    harness.clock.advance(10)
    await harness.settle()
    return harness


async def test_rates_are_measured_between_two_reports() -> None:
    harness = await train_with_pace()
    progress = present(harness.status.progress)
    assert (progress.throughput, progress.eta) == ("2 steps/s", "35s")


async def test_rates_of_ended_job_are_those_of_its_whole_process() -> None:
    harness = await train_with_pace()
    end = last_words(progress={"step": 100.0, "steps": 100.0, "totalSteps": 100.0, "stepSeconds": 25.0})
    for index in range(2):
        harness.end_pod(index, 0, end)
    await harness.settle()
    progress = present(harness.status.progress)
    assert harness.status.phase == "Succeeded"
    assert (progress.step, progress.throughput, progress.eta) == (100, "4 steps/s", None)


def test_job_without_steps_has_no_remaining_time() -> None:
    status = run_pass(*RUNNING, text=report(5, step_seconds=5), hooks=HOOKS).status
    assert present(status.progress).eta is not None
    suspended = run_pass(status=status, jobs=[child_job(suspend=True)], hooks=HOOKS, suspend=True).status
    restarting = run_pass(child_pod(0), child_pod(1, "Failed", code=82), status=status, hooks=HOOKS).status
    for phase, quiet in (("Suspended", suspended), ("Restarting", restarting)):
        progress = present(quiet.progress)
        assert (quiet.phase, progress.step, progress.eta) == (phase, 5, None)


async def test_job_without_this_feature_has_progress_and_no_pace() -> None:
    progress = present((await train_with_pace(Hooks())).status.progress)
    assert (progress.step, progress.percent, progress.throughput, progress.eta) == (30, "30.0%", None, None)


class TestTimeLeft:
    @pytest.mark.parametrize(
        ("pods", "jobs"),
        [
            ((child_pod(0), child_pod(1, "Pending")), [child_job()]),
            ((), [child_job(conditions={"Complete": ""})]),
            ((child_pod(0, "Failed", code=86, message=last_words("NCCL", secondary=True)), child_pod(1)), [
                child_job(conditions={"FailureTarget": "why"})
            ]),
        ],
        ids=["waits", "ended", "waits for the cause"],
    )  # fmt: skip
    def test_remaining_time_is_absent_without_training(self, pods: Any, jobs: Any) -> None:
        status = replace(STARTED, progress=Progress(step=7, eta="1m03s"))
        progress = present(run_pass(*pods, status=status, jobs=jobs, hooks=HOOKS).status.progress)
        assert (progress.step, progress.eta) == (7, None)

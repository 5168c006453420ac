"""The cost of restarts: values with formulas, bounded for every page."""

import dataclasses
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from msgspec.structs import replace

from ddp_operator.api import constants
from ddp_operator.api.status import CheckpointStatus, Progress, Status
from ddp_operator.decide.state import Decision
from ddp_pod.contract.progress import RankProgress
from tests.support.builders import NOW, child_job, child_pod, decode, last_words, page
from tests.support.decisions import RUNNING, STARTED, present, run_pass
from tests.support.fake_cluster import ReconcilerHarness


def run(text: str, *, status: Status = STARTED, seconds: float = 1, pods: Any = RUNNING, **spec: Any) -> Decision:
    jobs = [child_job(), child_job(2)] if status.attempt == 2 else [child_job()]
    return run_pass(*pods, status=status, jobs=jobs, text=text, seconds=seconds, **spec)


class TestCostOfARestart:
    @pytest.mark.parametrize(
        ("checkpoint", "first", "made", "estimate", "lost"),
        [
            (None, 1, 1, None, 57),  # from the start
            (None, 58, 1, None, 0),  # it has saved at SIGTERM, or each step, without reporting it
            (None, 60, 20, None, 17),  # 20 steps when its page is first read
            (50, 58, 1, 7, 0),  # saved after the last page was read
            (50, 51, 1, 7, 7),
            (None, 60, None, None, None),  # its page does not contain its first step
            (50, 60, None, 7, 7),
        ],
    )
    def test_lost_steps_are_corrected_by_first_step(
        self, checkpoint: int | None, first: int, made: int | None, estimate: int | None, lost: int | None
    ) -> None:
        saved = {} if checkpoint is None else {"checkpoint_step": checkpoint}
        failed = child_pod(1, "Failed", code=82, message=last_words("CUDAError"))
        trained = run(page(phase="Running", step=57, **saved)).status
        begun = run("", status=trained, pods=(child_pod(0), failed), seconds=3).status
        assert (present(begun.last_restart).step, present(begun.last_restart).steps_lost) == (57, estimate)
        pods = [child_pod(n, attempt=2) for n in (0, 1)]
        status = begun
        for more in (0, 30):
            counted = {} if made is None else {"steps": made + more}
            seen = page(phase="Running", step=first + more, **counted)
            status = run(seen, status=status, pods=pods, seconds=20 + more).status
            assert present(status.last_restart).steps_lost == lost

    @pytest.mark.parametrize("time", [NOW.timestamp() + 3000, NOW.timestamp() - 3000])
    def test_wrong_pod_clock_does_not_change_restart_time(self, time: float) -> None:
        failed = child_pod(1, "Failed", code=82, message=last_words("CUDAError", time=time))
        begun = run(page(step=5), pods=(child_pod(0), failed), seconds=3).status
        assert present(begun.last_restart).time == NOW + timedelta(seconds=3)


class TestProgressAcrossARestart:
    """Displayed values are never older than those that the run has reported."""

    BEFORE = replace(STARTED, progress=Progress(step=30, loss="1"), checkpoint=CheckpointStatus(step=30))
    SAVED = last_words("Preempted", progress={"step": 37.0, "checkpointStep": 36.0, "loss": 0.5})

    def test_late_termination_message_counts(self) -> None:
        going = child_pod(0, deleting=True, disrupted=True, grace=60)
        begun = run("", status=self.BEFORE, pods=(going, child_pod(1))).status
        assert (begun.attempt, self.shown(begun)) == (2, (30, "1", 30, 0))
        gone = child_pod(0, "Failed", code=constants.EXIT_PREEMPTED, message=self.SAVED, deleting=True)
        later = run("", status=begun, pods=(gone,)).status
        assert self.shown(later) == (37, "0.5", 36, 1)
        assert later.counts == begun.counts
        assert run("", status=later, pods=(gone,), seconds=9).status == later
        # From the first pod of the new attempt on, its own values are shown.
        own = run(page(phase="Running", step=36), status=later, pods=(gone, child_pod(0, attempt=2))).status
        assert own.progress is not None
        assert own.progress.step == 36
        assert run("", status=own, pods=(gone, child_pod(0, attempt=2))).status.progress == own.progress

    def shown(self, status: Status) -> tuple[int | None, str | None, int, int | None]:
        lost = status.last_restart.steps_lost if status.last_restart else None
        return present(status.progress).step, present(status.progress).loss, present(status.checkpoint).step, lost


def hostile_pages() -> Iterator[tuple[str, str]]:
    numbers = {item.name: 1e308 for item in dataclasses.fields(RankProgress) if item.default is None}
    yield "huge numbers", page(phase="Running", **numbers)
    yield "negative numbers", page(phase="Running", heartbeat_age=-1e9, **dict.fromkeys(numbers, -1e308))
    yield "a million ranks", page(phase="Running", ranks=[{"rank": n, "step": 1} for n in range(10_000)])
    yield "one endless text", page(phase="Running", step=3, stepHint="9" * 200_000)
    yield "nested lists", '{"version": 2, "phase": "Running", "ranks": ' + "[" * 9000
    yield "no report", 'ddp_step{rank="0"} 3'


class TestHostilePods:
    @pytest.mark.parametrize(("name", "text"), list(hostile_pages()), ids=[name for name, _ in hostile_pages()])
    async def test_hostile_page_gives_storable_status(self, name: str, text: str) -> None:
        harness = await ReconcilerHarness().train(text)
        for _ in range(8):
            harness.clock.advance(20)
            await harness.settle()
        assert len(decode(text).ranks) <= 256
        assert harness.raw is not None
        assert len(str(harness.raw["status"])) < 10_000
        assert harness.status.phase == "Running"

    async def test_termination_message_of_ten_megabytes_is_cut(self) -> None:
        harness = await ReconcilerHarness().train(page(phase="Running", step=3))
        harness.end_pod(1, constants.EXIT_RETRYABLE, "x" * 10_000_000)
        await harness.settle()
        failure = present(harness.status.last_failure)
        assert len(failure.message) <= 2048
        assert harness.status.attempt == 2

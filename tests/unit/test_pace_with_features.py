"""The pace of a job, with other features."""

from __future__ import annotations

from ddp_operator.decide import conditions as c
from ddp_operator.decide.hooks import Hooks
from ddp_operator.features import pace, stalls
from tests.support.decisions import present
from tests.unit.ddp_operator.features.pace.test_pace import report, train_with_pace


async def test_stall_leaves_rate_and_no_throughput() -> None:
    harness = await train_with_pace(Hooks((pace.FEATURE, stalls.FEATURE)))
    harness.cluster.page = report(30, heartbeat_age=5000)
    harness.clock.advance(60)
    await harness.settle()
    assert present(harness.status.condition(c.PROGRESSING)).reason == c.STALLED
    progress = present(harness.status.progress)
    assert (progress.throughput, progress.eta, progress.steps_per_second) == (None, None, "2")

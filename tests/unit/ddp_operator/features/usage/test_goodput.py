"""Goodput: its formula, from reports and from the last termination message."""

import dataclasses
import math
from typing import Any

import pytest

from ddp_operator.api.kubeobjects import parse_time
from ddp_operator.decide.hooks import Hooks
from ddp_operator.features.usage import FEATURE
from ddp_operator.features.usage.goodput import compute_goodput
from ddp_pod.contract.progress import RankProgress
from tests.support.builders import last_words, page
from tests.support.decisions import present
from tests.support.fake_cluster import ReconcilerHarness


class TestGoodput:
    VALUES = RankProgress(step=100.0, steps=50.0, step_seconds=100.0)

    def test_is_kept_steps_at_their_mean_time_over_wall_time(self) -> None:
        assert compute_goodput(self.VALUES, 400.0) == "0.50"

    def test_goodput_is_at_most_one(self) -> None:
        assert compute_goodput(self.VALUES, 10.0) == "1.00"

    @pytest.mark.parametrize(
        "values",
        [
            RankProgress(),
            dataclasses.replace(VALUES, steps=0.0),
            dataclasses.replace(VALUES, step_seconds=None),
            dataclasses.replace(VALUES, step=-1.0),
            dataclasses.replace(VALUES, step=math.nan),
            dataclasses.replace(VALUES, step_seconds=math.inf),
        ],
    )
    def test_unknown_goodput_is_omitted(self, values: Any) -> None:
        assert compute_goodput(values, 100.0) is None
        assert compute_goodput(self.VALUES, 0.0) is None


async def test_goodput_of_ended_job_is_that_of_its_termination_message() -> None:
    began = page(step=2, steps=2, step_seconds=1.0, total_steps=100, phase="Running")
    harness = await ReconcilerHarness(hooks=Hooks((FEATURE,))).train(began)
    assert present(harness.status.goodput) != "0.25"
    created = present(parse_time(present(harness.raw)["metadata"]["creationTimestamp"]))
    harness.clock.advance(100 - (harness.clock.now - created).total_seconds())
    end = last_words(progress={"step": 100.0, "steps": 100.0, "stepSeconds": 25.0})
    for index in range(2):
        harness.end_pod(index, 0, end)
    await harness.settle()
    assert (harness.status.phase, harness.status.goodput) == ("Succeeded", "0.25")


async def test_steps_before_the_first_start_count_for_nothing() -> None:
    resumed = page(step=90, steps=2, step_seconds=1.0, total_steps=100, phase="Running")
    harness = await ReconcilerHarness(hooks=Hooks((FEATURE,))).train(resumed)
    assert harness.status.operator_state.start_step == 88
    harness.cluster.page = page(step=96, steps=1, step_seconds=1.0, total_steps=100, phase="Running")
    harness.clock.advance(60)
    await harness.settle()
    assert present(harness.status.progress).step == 96
    assert harness.status.operator_state.start_step == 88

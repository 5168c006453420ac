"""A status that the API server refuses is shortened, otherwise reported, and not written repeatedly."""

from typing import Any

import pytest
from msgspec.structs import replace

from ddp_operator.api.cluster_errors import Refused
from ddp_operator.api.status import LastFailure, RestartCounts, Status
from ddp_operator.decide.hooks import Feature, Hooks
from ddp_operator.decide.refusals import shorten_status
from tests.support.builders import page
from tests.support.decisions import present
from tests.support.fake_cluster import ReconcilerHarness

TRAINING = page(step=7, total_steps=10, loss=0.5, phase="Running")


class Refusing:
    """Makes a cluster refuse statuses, and records those that were sent."""

    def __init__(self, harness: ReconcilerHarness, refused: Any) -> None:
        self.refused = refused
        self.sent: list[Any] = []
        inner = harness.cluster.patch_status

        async def patch_status(key: Any, status: Any, *, resource_version: str) -> None:
            self.sent.append(status)
            if self.refused(status):
                raise Refused("status.reason: Too long", reason="Invalid")
            await inner(key, status, resource_version=resource_version)

        harness.cluster.patch_status = patch_status  # type: ignore[method-assign]


async def train(harness: ReconcilerHarness, seconds: int) -> None:
    for _ in range(seconds // 10):
        harness.clock.advance(10)
        await harness.settle()


async def test_status_is_shortened_where_that_is_taken() -> None:
    points = ("a", "1")
    feature = Feature("rows", "stable", "x.md", extend=lambda status, _: replace(status, points=points))
    harness = await ReconcilerHarness(hooks=Hooks((feature,))).train(TRAINING)
    assert harness.status.points
    refusing = Refusing(harness, lambda status: "points" in status)
    harness.cluster.page = TRAINING.replace(" 7", " 8")
    await train(harness, 60)
    assert present(harness.status.progress).step == 8
    assert harness.status.points == ()
    assert sum("points" in status for status in refusing.sent) == 1
    assert harness.events.count("StatusRefused") == 0


async def test_refused_status_is_reported_in_stored_status_and_once_in_event_and_retried_each_minute() -> None:
    harness = await ReconcilerHarness().train(TRAINING)
    before = harness.status
    refusing = Refusing(harness, lambda status: (status.get("progress") or {}).get("step") != 7)
    harness.cluster.page = TRAINING.replace(" 7", " 8")
    await train(harness, 300)
    assert harness.state("Accepted") == ("False", "StatusRefused")
    assert "status.reason: Too long" in harness.condition("Accepted").message
    assert harness.status.attempt == before.attempt
    assert harness.events.count("StatusRefused") == 1
    assert len(refusing.sent) <= 3 * 5 + 3
    refusing.refused = lambda status: False
    await train(harness, 120)
    assert harness.state("Accepted")[0] == "True"
    assert present(harness.status.progress).step == 8


@pytest.mark.parametrize("phase", ["new", "running"])
async def test_status_that_is_refused_in_any_form_is_reported_by_event(phase: str) -> None:
    harness = ReconcilerHarness()
    if phase == "running":
        await harness.train(TRAINING)
    refusing = Refusing(harness, lambda status: True)
    harness.cluster.page = TRAINING.replace(" 7", " 8")
    await train(harness, 300)
    assert harness.events.count("StatusRefused") == 1
    assert len(refusing.sent) <= 3 * 5 + 3


def test_shortened_status_keeps_fields_of_decision() -> None:
    failure = LastFailure(attempt=1, category="UserError", message="m" * 2000, traceback="t" * 2000, signature="s")
    status = Status(attempt=3, last_failure=failure, points=("a", "1"))
    status = status.remember(restarts=RestartCounts(total=2, counted=2, used=1))
    short = shorten_status(status)
    assert (short.attempt, short.points, short.operator_state) == (3, (), status.operator_state)
    assert short.last_failure is not None
    assert (len(short.last_failure.message), short.last_failure.traceback) == (256, "")
    assert (short.last_failure.category, short.last_failure.signature) == ("UserError", "s")
    assert shorten_status(short) == short

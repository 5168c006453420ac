"""The pace of a job, with other features."""

from __future__ import annotations

import pytest

from ddp_operator.api.kubeobjects import format_time
from ddp_operator.decide import conditions as c
from ddp_operator.decide import other_reasons
from ddp_operator.decide.hooks import Hooks
from ddp_operator.features import lost_nodes, pace, stalls
from tests.support.builders import page
from tests.support.decisions import present
from tests.unit.ddp_operator.features.pace.test_pace import report, train_with_pace


async def test_stall_leaves_rate_and_no_throughput() -> None:
    harness = await train_with_pace(Hooks((pace.FEATURE, stalls.FEATURE)))
    harness.cluster.page = report(30, heartbeat_age=5000)
    harness.clock.advance(60)
    await harness.settle()
    assert present(harness.status.condition(c.PROGRESSING)).reason == other_reasons.STALLED
    progress = present(harness.status.progress)
    assert (progress.throughput, progress.eta, progress.steps_per_second) == (None, None, "2")


async def test_job_that_starts_again_without_a_lost_node_has_no_throughput(monkeypatch: pytest.MonkeyPatch) -> None:
    async def read_node(name: str) -> None:
        """Return no node: it was deleted."""

    harness = await train_with_pace(Hooks((pace.FEATURE, lost_nodes.FEATURE)))
    harness.cluster.page = page(phase="Rendezvous", restarts=1)
    harness.clock.advance(60)
    monkeypatch.setattr(harness.cluster, "node", read_node)
    lost = harness.pods()[1]
    conditions = [
        {"type": "Ready", "status": "False", "lastTransitionTime": format_time(harness.clock())},
        {"type": "ContainersReady", "status": "True"},
    ]
    harness.cluster.store.change(lost, status={**lost["status"], "conditions": conditions})
    await harness.settle()
    assert present(harness.status.condition(c.PROGRESSING)).reason == other_reasons.NODE_NOT_READY
    progress = present(harness.status.progress)
    assert (progress.throughput, progress.eta, progress.steps_per_second) == (None, None, "2")

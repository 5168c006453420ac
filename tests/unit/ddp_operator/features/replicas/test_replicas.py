"""Jobs whose replicas differ, or one of whose ranks has lost its loss."""

from functools import partial
from typing import Any

import pytest
from msgspec.structs import replace

from ddp_operator.api.status import Status
from ddp_operator.decide.hooks import Hooks
from ddp_operator.features.replicas import FEATURE
from ddp_pod.contract.group_facts import (
    DIFFERENT,
    LOST_LOSS,
    SAME_DATA,
)
from tests.support.builders import NOW, child_pod
from tests.support.decisions import run_pass
from tests.support.group_reports import groups, read_texts, with_groups

STARTED = Status(attempt=1, job_name="train-1", start_time=NOW, attempt_time=NOW).remember(nodes=2)
run = partial(run_pass, status=STARTED, hooks=Hooks((FEATURE,)))


@pytest.mark.parametrize(
    ("facts", "recovery", "result"),
    [
        (groups(DIFFERENT, rank=1, pod=1), {}, (1, ())),
        (groups(DIFFERENT, rank=1, pod=1), {"replicaMismatch": "Report"}, (1, ())),
        (groups(DIFFERENT, rank=1, pod=1), {"replicaMismatch": "Restart"}, (2, ("node-a",))),
        (groups(DIFFERENT), {"replicaMismatch": "Restart"}, (2, ())),
        (groups(LOST_LOSS, rank=1, pod=1), {"replicaMismatch": "Restart"}, (2, ("node-a",))),
        (groups(LOST_LOSS, rank=1, pod=1), {}, (1, ())),
        (groups(DIFFERENT, is_mistake=True), {"replicaMismatch": "Restart"}, (1, ())),
        (groups(SAME_DATA), {"replicaMismatch": "Restart"}, (1, ())),
        (groups(DIFFERENT, rank=1, pod=7), {"replicaMismatch": "Restart"}, (1, ())),
    ],
)
def test_replicas_that_differ_restart_without_the_node_of_the_rank(
    facts: Any, recovery: dict[str, Any], result: tuple[int, tuple[str, ...]]
) -> None:
    status = run(child_pod(0), child_pod(1), text=with_groups(facts), recovery=recovery).status
    assert (status.attempt, status.failed_nodes) == result
    assert status.counts.counted == status.attempt - 1


@pytest.mark.parametrize(("rank", "result"), [(1, (1, "Failed")), (0, (2, "Restarting"))])
def test_rank_that_loses_its_loss_again_after_a_restart_fails_the_job(rank: int, result: tuple[int, str]) -> None:
    policy = {"replicaMismatch": "Restart"}
    text = with_groups(groups(LOST_LOSS, rank=1, pod=1))
    before = run(child_pod(0), child_pod(1), text=text, recovery=policy).status
    restarted = replace(STARTED, last_failure=before.last_failure)
    text = with_groups(groups(LOST_LOSS, rank=rank, pod=rank))
    after = run(child_pod(0), child_pod(1), text=text, status=restarted, recovery=policy).status
    assert (after.attempt, after.phase) == result


def test_replicas_that_differ_fail_a_job_without_restarts() -> None:
    recovery = {"replicaMismatch": "Restart", "maxRestarts": 0}
    text = with_groups(groups(DIFFERENT, rank=1, pod=1))
    decision = run(child_pod(0), child_pod(1), text=text, recovery=recovery)
    assert read_texts(decision, "Failed")[1] == "RestartBudgetExhausted"

"""The conditions of a job, and the column REASON that sums them up."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from ddp_operator.api.status import Condition, LastFailure, LastRestart, Phase, Status
from ddp_operator.decide import conditions as c
from ddp_operator.decide import describe, doubts, other_reasons
from ddp_operator.decide.attempt import observe_attempt
from ddp_operator.decide.conditions import set_conditions, summarize
from ddp_operator.decide.scheduling import describe_scheduling
from ddp_operator.decide.state import State
from ddp_operator.decide.views import Pods
from ddp_operator.reading.objects import view_pod
from tests.support.builders import NOW, child_job, child_pod, decode, job, observe, page


def pods(*raw: Any) -> Any:
    return Pods(map(view_pod, raw))


def unschedulable(index: int, words: str = "0/3 nodes are available") -> dict[str, Any]:
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": words}
    return child_pod(index, "Pending", status={"conditions": [condition]})


def was(status: Any, reason: str, message: str = "") -> Condition:
    return Condition(type="Rendezvoused", status=status, reason=reason, message=message, last_transition_time=NOW)


class TestMergedConditions:
    def merge(self, before: tuple[Condition, ...], *facts: c.Fact, seconds: float = 0) -> tuple[Condition, ...]:
        return c.merge_conditions(before, facts, NOW + timedelta(seconds=seconds), 7)

    def test_time_changes_only_with_status(self) -> None:
        first = self.merge((), c.Fact("Scheduled", "False", "A"))
        second = self.merge(first, c.Fact("Scheduled", "False", "B", "words"), seconds=9)
        third = self.merge(second, c.Fact("Scheduled", "True", "C"), seconds=20)
        assert second[0].last_transition_time == first[0].last_transition_time == NOW
        assert (second[0].reason, second[0].message) == ("B", "words")
        assert third[0].last_transition_time == NOW + timedelta(seconds=20)

    def test_merging_same_facts_changes_nothing(self) -> None:
        fact = c.Fact("Scheduled", "False", "A", "m" * 5000)
        first = self.merge((), fact)
        assert self.merge(first, fact, seconds=99) == first
        assert len(first[0].message) == 1024


class TestScheduled:
    def describe(self, *raw: Any, nodes: int = 2, former: int = 0) -> tuple[str, str, str]:
        strays = [child_pod(n, owner="gone", suffix=f"gone{n}") for n in range(former)]
        typed = job(status=Status(attempt=1).remember(nodes=nodes))
        fact = describe_scheduling(typed, observe(typed, [child_job()], [*raw, *strays]), 1, nodes, NOW)
        return fact.status, fact.reason, fact.message

    def test_pod_with_node_is_scheduled_despite_condition(self) -> None:
        """A scheduler that lost the race for a pod writes its complaint after the binding."""
        raced = unschedulable(0, 'pod is already assigned to node "a"')
        assert self.describe(raced, nodes=1)[0] == "False"
        raced["spec"]["nodeName"] = "a"
        assert self.describe(raced, nodes=1)[:2] == ("True", "AllPodsScheduled")

    def test_counts_scheduled_pods(self) -> None:
        assert self.describe(child_pod(0), child_pod(1, "Pending", age=5)) == (
            "False",
            "WaitingForPods",
            "1/2 pods scheduled",
        )
        assert self.describe(child_pod(0), child_pod(1)) == ("True", "AllPodsScheduled", "2/2 pods scheduled")


class TestRendezvoused:
    def describe(
        self,
        *raw: Any,
        text: str | None = None,
        requested: bool = True,
        before: Any = None,
        nodes: int = 1,
        seconds: float = 0,
    ) -> tuple[str, str, str]:
        status = Status(attempt=1, conditions=(before,) if before else ()).remember(nodes=nodes)
        typed = job(status=status, nodes=nodes)
        seen = observe(typed, [child_job()], raw, None if text is None else decode(text), page_requested=requested)
        state = State(typed, seen, NOW + timedelta(seconds=seconds))
        fact = describe.describe_rendezvous(observe_attempt(state, status, None))
        return fact.status, fact.reason, fact.message

    def test_message_names_at_most_ten_pods(self) -> None:
        assert self.describe(nodes=500)[2].endswith("waiting for pods 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, …")

    def test_step_on_page_sets_rendezvoused(self) -> None:
        assert self.describe(child_pod(0), text=page(step=1))[0] == "True"
        assert self.describe(child_pod(0), text=page(step=0))[0] == "False"

    @pytest.mark.parametrize("before", [was("True", "AllRanksJoined"), was("Unknown", "NoMetricsPage")])
    def test_condition_is_kept_while_no_page_is_requested(self, before: Condition) -> None:
        assert self.describe(child_pod(0), requested=False, before=before)[:2] == (before.status, before.reason)

    def test_list_of_missing_pods_ends_with_pods(self) -> None:
        before = was("False", "WaitingForRanks", "0/1 pods running; waiting for pods 0")
        assert self.describe(child_pod(0), requested=False, before=before)[1] == "WaitingForWorkers"

    def test_unreadable_page_keeps_rendezvoused_true(self) -> None:
        assert self.describe(child_pod(0), before=was("True", "AllRanksJoined"), seconds=600)[0] == "True"


OOM = LastFailure(attempt=1, category="OutOfMemory", conclusion="the budget is used up")
TRAINS = [
    c.Fact(c.ACCEPTED, "True", c.VALID),
    c.Fact(c.SCHEDULED, "True", c.ALL_PODS_SCHEDULED),
    c.Fact(c.PROGRESSING, "True", c.TRAINING),
]


def reason(phase: Phase, *facts: c.Fact, **status: Any) -> str:
    return summarize(set_conditions(Status(phase=phase, **status), [*TRAINS, *facts], NOW, 1)).reason


def no(kind: str, why: str) -> c.Fact:
    return c.Fact(kind, "False", why)


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        (reason("Running"), ""),
        (reason("Running", no(c.PROGRESSING, other_reasons.STALLED)), "Stalled"),
        (reason("Pending", no(c.SCHEDULED, c.IMAGE_PULL), no(c.RENDEZVOUSED, c.WAITING_FOR_RANKS)), "ImagePull"),
        (reason("Rejected", no(c.ACCEPTED, c.INVALID_SPEC), no(c.SCHEDULED, c.IMAGE_PULL)), "InvalidSpec"),
        (reason("Suspended", c.Fact(c.SUSPENDED, "True", c.SUSPENDED_BY_SPEC)), ""),
        (reason("Suspended", no(c.SUSPENDED, c.STOPPING)), "Stopping"),
        (reason("Succeeded", last_failure=OOM), ""),
    ],
)
def test_first_obstacle_is_reason(result: str, expected: str) -> None:
    assert result == expected


def test_restart_reason_is_failure_category_unless_blocked() -> None:
    again = c.Fact(c.RESTARTING, "True", c.GROUP_RESTART)
    assert reason("Restarting", again, last_failure=OOM) == "OutOfMemory"
    assert reason("Restarting", again, no(c.SCHEDULED, c.WAITING_FOR_PODS), last_failure=OOM) == "OutOfMemory"
    assert reason("Restarting", again, no(c.SCHEDULED, c.UNSCHEDULABLE), last_failure=OOM) == "Unschedulable"


@pytest.mark.parametrize(
    ("cause", "recovery_seconds", "expected"),
    [
        ("OutOfMemory", None, "OutOfMemory"),
        ("None", None, "WaitingForWorkers"),
        ("OutOfMemory", 9, "WaitingForWorkers"),
    ],
)
def test_reason_of_restart_in_same_pods_is_failure_category(
    cause: str, recovery_seconds: int | None, expected: str
) -> None:
    restart = LastRestart(attempt=1, level="SamePods", time=NOW, cause=cause, recovery_seconds=recovery_seconds)
    starting = no(c.RENDEZVOUSED, c.WAITING_FOR_WORKERS)
    assert reason("Running", starting, last_failure=OOM, last_restart=restart) == expected


def test_failed_job_reason_is_failure_category() -> None:
    ended = c.Fact(c.FAILED, "True", c.RESTART_BUDGET_EXHAUSTED)
    assert reason("Failed", ended, last_failure=OOM) == "OutOfMemory"
    deadline = c.Fact(c.FAILED, "True", c.DEADLINE_EXCEEDED)
    survived = LastFailure(attempt=1, category="OutOfMemory")
    assert reason("Failed", deadline, last_failure=survived) == "DeadlineExceeded"


@pytest.mark.parametrize(
    ("progressing", "reason"),
    [
        (c.Fact(c.PROGRESSING, "True", "Training"), c.SAME_BATCHES),
        (c.Fact(c.PROGRESSING, "Unknown", "NoMetrics"), c.SAME_BATCHES),
        (c.Fact(c.PROGRESSING, "False", other_reasons.STALLED), other_reasons.STALLED),
    ],
)
def test_defect_of_a_job_does_not_hide_that_it_stands_still(progressing: c.Fact, reason: str) -> None:
    facts = [c.Fact(c.TRAINS_AS_ONE, "False", c.SAME_BATCHES), progressing]
    status = Status(phase="Running", conditions=c.merge_conditions((), facts, NOW, 1))
    assert c.find_reason(status) == reason


def test_wait_for_the_process_group_explains_that_a_job_makes_no_step() -> None:
    facts = [c.Fact(c.TRAINS_AS_ONE, "False", doubts.WAITING_FOR_GROUP), c.Fact(c.PROGRESSING, "False", c.NO_STEP_YET)]
    status = Status(phase="Running", conditions=c.merge_conditions((), facts, NOW, 1))
    assert c.find_reason(status) == doubts.WAITING_FOR_GROUP

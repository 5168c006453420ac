"""The conditions of a job: status, message and time of the last change."""

from datetime import timedelta
from typing import Any

import pytest

from ddp_operator.api.job import JobSize
from ddp_operator.api.status import Condition, Nodes, Status
from ddp_operator.decide import conditions as c
from ddp_operator.decide import describe
from ddp_operator.decide.scheduling import describe_scheduling
from ddp_operator.decide.state import Observation, Pods
from ddp_operator.decide.views import view_pod
from ddp_pod.contract.group_facts import ALONE, GroupFacts
from ddp_pod.contract.records import to_json
from tests.support.builders import NOW, child_job, child_pod, decode, job, last_words, observe, page


def pods(*raw: Any) -> Any:
    return Pods(map(view_pod, raw))


def unschedulable(index: int, words: str = "0/3 nodes are available") -> dict[str, Any]:
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": words}
    return child_pod(index, "Pending", status={"conditions": [condition]})


def was(status: Any, reason: str, message: str = "") -> Condition:
    return Condition(type="Rendezvoused", status=status, reason=reason, message=message, last_transition_time=NOW)


@pytest.mark.parametrize(("pods", "shown"), [(10, "0, 1, 2, 3, 4, 5, 6, 7, 8, 9"), (11, "7, 8, 9, …")])
def test_distributed_message_lists_ten_pods(pods: int, shown: str) -> None:
    alone = to_json(GroupFacts(ALONE, pods, "ranks train alone"))
    ended = [child_pod(i, "Succeeded", message=last_words(groups=alone, exitCode=0)) for i in range(pods)]
    fact = describe.describe_distribution(Pods(map(view_pod, ended)))
    assert fact is not None
    assert fact.status == "False"
    assert f"{shown})" in fact.message
    assert ("…" in fact.message) is (pods > 10)


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

    def test_condition_without_new_fact_is_kept(self) -> None:
        first = self.merge((), c.Fact("Accepted", "True", "Valid"))
        assert self.merge(first, c.Fact("Failed", "False", "X"))[0] == first[0]

    def test_conditions_are_in_fixed_order(self) -> None:
        facts = [c.Fact(kind, "False", "X") for kind in reversed(c.TYPES)]
        assert tuple(condition.type for condition in self.merge((), *facts)) == c.TYPES

    def test_merging_same_facts_changes_nothing(self) -> None:
        fact = c.Fact("Scheduled", "False", "A", "m" * 5000)
        first = self.merge((), fact)
        assert self.merge(first, fact, seconds=99) == first
        assert len(first[0].message) == 1024


class TestScheduled:
    def describe(self, *raw: Any, nodes: int = 2, former: int = 0) -> tuple[str, str, str]:
        strays = [child_pod(n, owner="gone", suffix=f"gone{n}") for n in range(former)]
        typed = job(status=Status(attempt=1, attempt_nodes=nodes))
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

    def test_quotes_schedulers_message_on_first_pod(self) -> None:
        statement = self.describe(unschedulable(1, "second"), unschedulable(0, "first"))
        assert statement == ("False", "Unschedulable", "train-1-0-abcde (and 1 more pod): first")

    @pytest.mark.parametrize("reason", ["ErrImagePull", "ImagePullBackOff", "InvalidImageName"])
    def test_image_that_cannot_be_pulled(self, reason: str) -> None:
        waiting = {"name": "trainer", "state": {"waiting": {"reason": reason, "message": "no such image"}}}
        pod = child_pod(0, "Pending", node="n", status={"containerStatuses": [waiting]})
        assert self.describe(pod, nodes=1) == ("False", "ImagePull", "train-1-0-abcde: no such image")

    def test_other_reasons_keep_their_name(self) -> None:
        waiting = {"name": "a", "state": {"waiting": {"reason": "CreateContainerConfigError", "message": "no secret"}}}
        pod = child_pod(0, "Pending", status={"initContainerStatuses": [waiting]})
        statement = self.describe(pod, nodes=1)
        assert statement == (
            "False",
            "PodsNotStarting",
            "train-1-0-abcde: CreateContainerConfigError: init container a: no secret",
        )

    @pytest.mark.parametrize("reason", ["ContainerCreating", "PodInitializing"])
    def test_slow_start_is_no_obstacle(self, reason: str) -> None:
        waiting = {"name": "trainer", "state": {"waiting": {"reason": reason}}}
        assert (
            self.describe(child_pod(0, "Pending", node="n", status={"containerStatuses": [waiting]}), nodes=1)[0]
            == "True"
        )

    def test_former_pods_hide_missing_pods(self) -> None:
        assert self.describe(former=3)[1:] == (
            "WaitingForFormerPods",
            "waiting for 3 pods of the previous attempt to terminate",
        )

    def test_replaced_pod_is_not_counted_beside_successor(self) -> None:
        dead = child_pod(0, "Failed", code=137, suffix="zzzzz", age=100)
        assert self.describe(dead, child_pod(0, suffix="aaaaa", age=5), nodes=2)[2] == "1/2 pods scheduled"


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
        observation = Observation(page=None if text is None else decode(text), page_requested=requested)
        now = NOW + timedelta(seconds=seconds)
        fact = describe.describe_rendezvous(pods(*raw), JobSize(nodes), observation, before, now)
        return fact.status, fact.reason, fact.message

    def test_missing_pods_are_listed(self) -> None:
        statement = self.describe(child_pod(1), child_pod(2, "Pending"), nodes=3)
        assert statement == ("False", "WaitingForRanks", "1/3 pods running; waiting for pods 0, 2")

    def test_message_names_at_most_ten_pods(self) -> None:
        assert self.describe(nodes=500)[2].endswith("waiting for pods 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, …")

    @pytest.mark.parametrize("phase", ["Running", "Stopping", "Done"])
    def test_launcher_phase_after_start_sets_rendezvoused(self, phase: str) -> None:
        assert self.describe(child_pod(0), text=page(phase=phase))[:2] == ("True", "AllRanksJoined")

    @pytest.mark.parametrize("phase", ["Starting", "WaitingForMaster", "Rendezvous"])
    def test_launcher_phase_before_start_is_in_message(self, phase: str) -> None:
        statement = self.describe(child_pod(0), text=page(phase=phase))
        assert statement[1:] == (
            "WaitingForWorkers",
            f"1/1 pods running; workers have not started yet (pod 0: {phase})",
        )

    def test_step_on_page_sets_rendezvoused(self) -> None:
        assert self.describe(child_pod(0), text=page(step=1))[0] == "True"
        assert self.describe(child_pod(0), text=page(step=0))[0] == "False"

    @pytest.mark.parametrize("before", [was("True", "AllRanksJoined"), was("Unknown", "NoMetricsPage")])
    def test_condition_is_kept_while_no_page_is_requested(self, before: Condition) -> None:
        assert self.describe(child_pod(0), requested=False, before=before)[:2] == (before.status, before.reason)

    def test_reason_of_last_page_is_kept_until_next_page(self) -> None:
        before = was("False", "WaitingForWorkers", "pod 0: Rendezvous")
        assert self.describe(child_pod(0), requested=False, before=before, seconds=600)[2] == "pod 0: Rendezvous"

    def test_list_of_missing_pods_ends_with_pods(self) -> None:
        before = was("False", "WaitingForRanks", "0/1 pods running; waiting for pods 0")
        assert self.describe(child_pod(0), requested=False, before=before)[1] == "WaitingForWorkers"

    def test_unreadable_page_keeps_rendezvoused_true(self) -> None:
        assert self.describe(child_pod(0), before=was("True", "AllRanksJoined"), seconds=600)[0] == "True"

    def test_unreadable_page_is_reported_after_patience(self) -> None:
        assert self.describe(child_pod(0, age=5), seconds=0)[1] == "WaitingForWorkers"
        status, reason, words = self.describe(child_pod(0, age=5), seconds=60)
        assert (status, reason) == ("Unknown", "NoMetricsPage")
        assert "the operator cannot read the report" in words

    def test_unreadable_page_of_young_pod_is_not_reported(self) -> None:
        young = child_pod(0, age=100), child_pod(1, age=5)
        assert self.describe(*young, nodes=2, seconds=0)[1] == "WaitingForWorkers"
        assert self.describe(*young, nodes=2, seconds=60)[1] == "NoMetricsPage"

    def test_unrequested_page_is_not_reported(self) -> None:
        assert self.describe(child_pod(0, age=5), requested=False, seconds=600)[1] == "WaitingForWorkers"


class TestCounting:
    def test_newest_pod_of_index_counts(self) -> None:
        for first, second in (("aaaaa", "zzzzz"), ("zzzzz", "aaaaa")):
            dead = child_pod(0, "Failed", code=137, suffix=first, age=100)
            done = child_pod(0, "Succeeded", suffix=second, age=50)
            assert pods(dead, done).counts(1) == Nodes(desired=1, ready=0, succeeded=1, failed=0)

    def test_live_pod_precedes_ended_pod_of_same_second(self) -> None:
        both = pods(child_pod(0, suffix="a"), child_pod(0, "Failed", code=137, suffix="b"))
        assert (both.running, both.counts(1)) == (1, Nodes(desired=1, ready=1, succeeded=0, failed=0))

    def test_pod_that_is_being_deleted_is_not_running(self) -> None:
        both = pods(child_pod(0, deleting=True), child_pod(1, ready=False))
        assert (both.running, both.counts(2)) == (1, Nodes(desired=2, ready=0, succeeded=0, failed=0))

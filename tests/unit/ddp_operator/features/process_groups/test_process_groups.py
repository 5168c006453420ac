"""Do the ranks of a job train together?"""

from functools import partial
from typing import Any

import pytest

from ddp_operator.api.status import Status
from ddp_operator.decide.hooks import Hooks
from ddp_operator.decide.job_events import list_transition_events
from ddp_operator.decide.views import Pods
from ddp_operator.features.process_groups import FEATURE, describe_distribution
from ddp_operator.reading.objects import view_pod
from ddp_pod.contract.group_facts import (
    ALONE,
    DIFFERENT,
    LOST_LOSS,
    SAME_DATA,
    SEPARATE,
    TOGETHER,
    UNKNOWN,
    WAITING,
    GroupFacts,
)
from ddp_pod.contract.records import to_json
from tests.support.builders import NOW, child_job, child_pod, last_words, page
from tests.support.decisions import present, run_pass
from tests.support.group_reports import groups, read_texts, succeed, with_groups

STARTED = Status(attempt=1, job_name="train-1", start_time=NOW, attempt_time=NOW).remember(nodes=2)
run = partial(run_pass, status=STARTED, hooks=Hooks((FEATURE,)))


class TestProcessGroup:
    """Do the ranks train together?"""

    COMPLETE = child_job(conditions={"Complete": ""})

    @pytest.mark.parametrize(
        ("ends", "result"),
        [
            ((groups(TOGETHER), groups(TOGETHER)), ("True", "ProcessGroupOfAllRanks")),
            ((groups(ALONE), groups(ALONE)), ("False", "NoProcessGroup")),
            ((groups(ALONE), groups(SEPARATE)), ("False", "SeparateGroups")),
            ((groups(TOGETHER), groups(ALONE)), ("False", "NoProcessGroup")),
            ((groups(ALONE), {}), ("False", "NoProcessGroup")),
            ((groups(DIFFERENT), groups(TOGETHER)), ("False", "ReplicasDiffer")),
            ((groups(TOGETHER), groups(SAME_DATA)), ("False", "SameBatches")),
            ((groups(TOGETHER), {}), ("True", "ProcessGroupOfAllRanks")),
            ((groups(UNKNOWN), groups(UNKNOWN)), ("Unknown", "GroupUnknown")),
            (({}, {}), None),
            (({"groups": {"state": "Other", "worldSize": 2}}, {"groups": []}), ("Unknown", "GroupUnknown")),
        ],
    )  # fmt: skip
    def test_group_at_the_end_is_condition(self, ends: Any, result: tuple[str, str] | None) -> None:
        pods = [succeed(index, **known) for index, known in enumerate(ends)]
        decision = run(*pods, jobs=[self.COMPLETE], processGroupPolicy="Warn")
        assert decision.status.phase == "Succeeded"
        distributed = decision.status.condition("TrainsAsOne")
        assert ((distributed.status, distributed.reason) if distributed else None) == result
        events = [event.reason for event in list_transition_events(STARTED, decision.status)]
        assert (result is not None and result[1] in events) is (distributed is not None and result[0] == "False")

    @pytest.mark.parametrize(
        ("facts", "result", "reason"),
        [
            (groups(TOGETHER), "True", ""),
            (groups(ALONE), "False", "NoProcessGroup"),
            (groups(SEPARATE), "False", "SeparateGroups"),
            (groups(WAITING, remedy="use RANK"), "False", "WaitingForGroup"),
            (groups(DIFFERENT, pod=1), "False", "ReplicasDiffer"),
            (groups(LOST_LOSS, pod=1), "False", "RankLossNotFinite"),
            (groups(SAME_DATA), "False", "SameBatches"),
            (groups(UNKNOWN), "Unknown", ""),
        ],
    )
    def test_group_is_condition_while_it_trains(self, facts: Any, result: str, reason: str) -> None:
        status = run(child_pod(0), child_pod(1), text=with_groups(facts), processGroupPolicy="Warn").status
        distributed = present(status.condition("TrainsAsOne"))
        assert distributed.status == result
        assert distributed.message.startswith("how the ranks train")
        assert ("use RANK" in distributed.message) is (reason == "WaitingForGroup")
        assert ("node-a" in distributed.message) is (reason in ("ReplicasDiffer", "RankLossNotFinite"))
        assert (status.phase, status.reason) == ("Running", reason)

    def test_group_of_former_ranks_is_forgotten_with_their_restart(self) -> None:
        before = run(child_pod(0), child_pod(1), text=with_groups(groups(WAITING))).status
        after = run(child_pod(0), child_pod(1), text=page(phase="Rendezvous"), status=before).status
        distributed = present(after.condition("TrainsAsOne"))
        assert (distributed.status, distributed.reason) == ("Unknown", "GroupUnknown")

    @pytest.mark.parametrize("state", [ALONE, SEPARATE, WAITING, TOGETHER, UNKNOWN])
    @pytest.mark.parametrize("policy", [{}, {"processGroupPolicy": "Fail"}, {"processGroupPolicy": "Ignore"}])
    def test_running_job_whose_ranks_train_apart_fails_unless_ignored(self, state: str, policy: dict[str, str]) -> None:
        text = with_groups(groups(state, remedy="write the script"))
        decision = run(child_pod(0), child_pod(1), text=text, **policy)
        is_failed = state in (ALONE, SEPARATE) and policy.get("processGroupPolicy") != "Ignore"
        assert (decision.status.phase == "Failed") is is_failed
        if is_failed:
            assert read_texts(decision, "Failed")[2] == "how the ranks train; write the script"

    def test_process_group_policy_fails_or_ignores_at_the_end(self) -> None:
        pods = succeed(0, **groups(ALONE)), succeed(1, **groups(ALONE))
        failed = run(*pods, jobs=[self.COMPLETE])
        assert failed.status.phase == "Failed"
        status, reason, message = read_texts(failed, "Failed")
        assert (status, reason) == ("True", "NoProcessGroup")
        assert message == "how the ranks train (the same in pods 0, 1)"
        differs = [succeed(index, **groups(SAME_DATA)) for index in (0, 1)]
        assert run(*differs, jobs=[self.COMPLETE]).status.phase == "Succeeded"
        ignored = run(*pods, jobs=[self.COMPLETE], processGroupPolicy="Ignore")
        assert (ignored.status.phase, ignored.status.condition("TrainsAsOne")) == ("Succeeded", None)


@pytest.mark.parametrize(("pods", "shown"), [(10, "0, 1, 2, 3, 4, 5, 6, 7, 8, 9"), (11, "7, 8, 9, …")])
def test_distributed_message_lists_ten_pods(pods: int, shown: str) -> None:
    alone = to_json(GroupFacts(ALONE, pods, "ranks train alone"))
    ended = [child_pod(i, "Succeeded", message=last_words(groups=alone, exitCode=0)) for i in range(pods)]
    fact = present(describe_distribution(Pods(map(view_pod, ended))))
    assert fact.status == "False"
    assert f"{shown})" in fact.message
    assert ("…" in fact.message) is (pods > 10)

"""Runs of `ddp dev` with other features: what they report of pods that are held between runs."""

from functools import partial
from typing import Any

from msgspec.structs import replace

from ddp_operator.api.status import Status, Usage
from ddp_operator.decide.hooks import Hooks
from ddp_operator.features import dev, process_groups, replicas, usage
from ddp_operator.features.usage.accounting import find_purpose
from ddp_pod.contract.group_facts import ALONE, SEPARATE, GroupFacts
from ddp_pod.contract.records import to_json
from tests.support.builders import NOW, child_job, child_pod, last_words, page
from tests.support.decisions import RUNNING, STARTED, present, read_state
from tests.support.decisions import run_pass as run_pass_of_kernel

HOOKS = Hooks((dev.FEATURE, process_groups.FEATURE, replicas.FEATURE, usage.FEATURE))
run_pass = partial(run_pass_of_kernel, hooks=HOOKS, dev={})


def report(run: int = 1, result: str = "", **values: Any) -> str:
    """Return the report of pod 0 during a run, or after its end with ``result``."""
    began = NOW.timestamp()
    known = {"run": run, "started": began, "result": result}
    if result:
        known |= {"ended": began + 5, "releaseAt": began + 1805}
    return page(phase="Held" if result else "Running", dev=known, step=3, steps=3, **values)


def follow(*reports: str) -> Status:
    """Return the status after passes that read these reports, each one twice."""
    status = STARTED
    for text in (text for text in reports for _ in range(2)):
        status = run_pass(*RUNNING, status=status, text=text, seconds=10).status
    return status


def test_gpus_of_held_pods_are_lost_to_hold() -> None:
    held = follow(report(1), report(1, "Succeeded"))
    assert find_purpose(held) == "Held"
    assert find_purpose(follow(report(1))) == "Productive"
    used = replace(held, usage=Usage(gpus=2)).remember(usage_time=NOW)
    lost = present(run_pass(*RUNNING, status=used, text=report(2), seconds=30).status.usage).lost
    assert [(item.cause, item.gpu_seconds) for item in lost] == [("Held", 60)]


def test_groups_of_run_that_has_ended_do_not_count() -> None:
    status = follow(report(1), report(1, "Succeeded"))
    strict = {"processGroupPolicy": "Fail", "recovery": {"replicaMismatch": "Restart"}}
    stale = report(1, "Succeeded", groups=to_json(GroupFacts(SEPARATE, 2, "two groups")))
    decision = run_pass(*RUNNING, status=status, text=stale, seconds=900, **strict)
    assert (decision.status.phase, decision.status.attempt) == ("Held", 1)
    assert decision.status.condition("TrainsAsOne") is None


def test_run_whose_ranks_train_apart_only_reports() -> None:
    apart = last_words(groups=to_json(GroupFacts(ALONE, 2, "how the ranks train")))
    ends = [child_pod(index, "Succeeded", message=apart) for index in (0, 1)]
    reported = run_pass(*ends, jobs=[child_job(conditions={"Complete": ""})])
    assert (reported.status.phase, read_state(reported, "TrainsAsOne")[0]) == ("Succeeded", "False")

"""``spec.processGroupPolicy`` and the condition TrainsAsOne: whether the ranks of a job train as one."""

from collections.abc import Mapping
from typing import Annotated, Final, Literal

from msgspec import Meta

from ddp_operator.api.schema import OwnFields
from ddp_operator.api.spec import SpecFields
from ddp_operator.api.status import ConditionStatus, Status
from ddp_operator.decide import conditions as c
from ddp_operator.decide import doubts
from ddp_operator.decide.conditions import Fact, is_finished, list_indexes
from ddp_operator.decide.hooks import Feature
from ddp_operator.decide.state import Remark, State, Verdict
from ddp_operator.decide.views import Pods
from ddp_operator.reading.parts import read_end_part, read_report_part
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

_CONDITIONS: Final[Mapping[str, tuple[ConditionStatus, str]]] = {
    TOGETHER: ("True", doubts.PROCESS_GROUP_OF_ALL_RANKS),
    ALONE: ("False", doubts.NO_PROCESS_GROUP),
    SEPARATE: ("False", doubts.SEPARATE_GROUPS),
    WAITING: ("False", doubts.WAITING_FOR_GROUP),
    DIFFERENT: ("False", c.REPLICAS_DIFFER),
    SAME_DATA: ("False", c.SAME_BATCHES),
    LOST_LOSS: ("False", c.RANK_LOSS_NOT_FINITE),
    UNKNOWN: ("Unknown", doubts.GROUP_UNKNOWN),
}


class ProcessGroupFields(SpecFields, frozen=True, kw_only=True):
    """The part of this feature in the spec."""

    process_group_policy: Annotated[
        Literal["Warn", "Fail", "Ignore"] | None,
        Meta(
            description="If ranks make steps and no process group spans all of them, as with bash -c 'torchrun "
            "…'. Fail: fail the job. Warn: set the condition TrainsAsOne to False. Ignore: for "
            "independent ranks. Unset: Fail."
        ),
    ] = None


FIELDS: Final = OwnFields("process-groups", ProcessGroupFields, fixed_once="ended")


def _find_policy(state: State) -> str:
    """Return the action if no process group spans all ranks. A job of `ddp dev` only reports."""
    policy = FIELDS.read(state.spec).process_group_policy or "Fail"
    return "Warn" if policy == "Fail" and state.job.holds_pods else policy


def judge(state: State, has_succeeded: bool) -> Verdict | None:
    """Fail a job whose ranks do not train together, unless spec.processGroupPolicy allows it."""
    if _find_policy(state) != "Fail":
        return None
    page = state.observation.page
    fact = describe_distribution(state.pods) if has_succeeded else None
    groups = None if page is None else read_report_part(page, "groups").groups
    if not has_succeeded and groups is not None:
        fact = describe_groups(groups, state.pods)
    if fact is None or fact.reason not in (doubts.NO_PROCESS_GROUP, doubts.SEPARATE_GROUPS):
        return None
    return Verdict(fact.reason, fact.message)


def conclude(state: State, status: Status) -> Fact | None:
    """Return TrainsAsOne of a job that succeeds."""
    return None if _find_policy(state) == "Ignore" else describe_distribution(state.pods)


def review(state: State) -> Remark | None:
    """Return TrainsAsOne by pod 0's page; None: it does not change."""
    page = state.observation.page
    if page is None or page.is_empty or page.is_held or is_finished(state.status) or _find_policy(state) == "Ignore":
        return None
    groups = read_report_part(page, "groups").groups
    if groups is not None:
        return Remark(describe_groups(groups, state.pods))
    if not state.status.is_false(c.TRAINS_AS_ONE):
        return None
    message = "the ranks have shown no process group since their restart"
    return Remark(Fact(c.TRAINS_AS_ONE, "Unknown", doubts.GROUP_UNKNOWN, message))


def describe_groups(facts: GroupFacts, pods: Pods, more: str = "") -> Fact:
    """Return TrainsAsOne by what a pod has observed. ``more``: which pods have."""
    status, reason = _CONDITIONS[facts.state]
    has_node = facts.state in (DIFFERENT, LOST_LOSS) and facts.pod is not None
    pod = pods.newest.get(facts.pod or 0) if has_node else None
    node = f"; it is on node {pod.node_name}" if pod is not None and pod.node_name else ""
    remedy = f"; {facts.remedy}" if facts.remedy else ""
    return Fact(c.TRAINS_AS_ONE, status, reason, facts.message + node + more + remedy)


def describe_distribution(pods: Pods) -> Fact | None:
    """Return TrainsAsOne of pods that have succeeded; None: no pod reports its process groups."""
    ends = {index: pod.termination for index, pod in pods.newest.items() if pod.phase == "Succeeded"}
    reported = {index: read_end_part(end, "groups").groups for index, end in ends.items() if end is not None}
    known = {index: groups for index, groups in reported.items() if groups is not None}
    for state in (SEPARATE, ALONE, DIFFERENT, LOST_LOSS, SAME_DATA, TOGETHER):
        indexes = [index for index, facts in known.items() if facts.state == state]
        if indexes:
            is_repeated = len(indexes) > 1 and state != TOGETHER
            more = f" (the same in pods {list_indexes(indexes)})" if is_repeated else ""
            return describe_groups(known[indexes[0]], pods, more)
    return describe_groups(next(iter(known.values())), pods) if known else None


FEATURE: Final = Feature(
    FIELDS.feature,
    maturity="stable",
    page="your-script.md",
    fields=FIELDS,
    review=review,
    judge=judge,
    conclude=conclude,
)

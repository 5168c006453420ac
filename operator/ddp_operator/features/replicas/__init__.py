"""``recovery.replicaMismatch``: restart a job whose replicas differ, or one of whose ranks has lost its loss."""

from typing import Annotated, Final, Literal

from msgspec import Meta
from msgspec.structs import replace

from ddp_operator.api.schema import OwnFields
from ddp_operator.api.spec import SpecFields
from ddp_operator.api.status import LastFailure
from ddp_operator.decide import conditions as c
from ddp_operator.decide.diagnosis import build_failure
from ddp_operator.decide.hooks import Feature
from ddp_operator.decide.state import State, Verdict
from ddp_operator.reading.parts import read_report_part
from ddp_pod.contract.failure_table import REPLICAS
from ddp_pod.contract.group_facts import DIFFERENT, LOST_LOSS, GroupFacts


class ReplicaFields(SpecFields, frozen=True, kw_only=True):
    """The part of this feature in the spec."""

    replica_mismatch: Annotated[
        Literal["Report", "Restart"] | None,
        Meta(
            description="If parameters of ranks differ that were equal, or a rank's loss was not finite before "
            "those of its peers. Report: set the condition TrainsAsOne to False. Restart: also "
            "restart from the checkpoint, counted, without the rank's node, if it is one. Unset: "
            "Report."
        ),
    ] = None


FIELDS: Final = OwnFields("replicas", ReplicaFields, at="recovery")


def judge(state: State, has_succeeded: bool) -> Verdict | None:
    """Restart a job whose replicas differ, if recovery.replicaMismatch requires it and they were equal before.

    Also one whose ranks lost their loss because of one rank: once, as data that repeats this is no fault of a node.
    """
    page = state.observation.page
    groups = read_report_part(page, "groups").groups if page is not None else None
    may_restart = not (has_succeeded or state.spec.suspend or state.job.holds_pods)
    is_wanted = may_restart and FIELDS.read(state.spec).replica_mismatch == "Restart"
    if not is_wanted or groups is None or groups.state not in (DIFFERENT, LOST_LOSS) or groups.is_mistake:
        return None
    cause = _build_failure(state, groups)
    if cause is None:
        return None
    last = state.status.last_failure
    is_repeated = bool(cause.signature) and last is not None and last.signature == cause.signature
    message = f"not restarted: {cause.signature} occurred twice"
    return Verdict(c.REPEATED_FAILURE, message, cause, is_final=is_repeated)


def _build_failure(state: State, facts: GroupFacts) -> LastFailure | None:
    """Return the failure of an attempt whose replicas differ, in the pod of the rank that does; None: it is gone."""
    pod = state.pods.newest.get(facts.pod or 0)
    if pod is None:
        return None
    failure = build_failure(state.status.attempt, pod, REPLICAS, facts.message, state.now)
    signature = f"{c.RANK_LOSS_NOT_FINITE} of rank {facts.rank}" if facts.state == LOST_LOSS else ""
    node = pod.node_name if facts.rank is not None else ""
    return replace(failure, rank=facts.rank, node_name=node, signature=signature)


FEATURE: Final = Feature(FIELDS.feature, maturity="stable", page="api.md", fields=FIELDS, judge=judge)

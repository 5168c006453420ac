"""Conditions: what is true of a job now, with the reason and the cluster's own message, and what they say in a word."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from msgspec.structs import replace

from ddp_operator.api.status import Condition, ConditionStatus, Status
from ddp_operator.kubeobjects import format_time, truncate
from ddp_operator.status.observation import Observation, Pods

ACCEPTED: Final = "Accepted"
SUSPENDED: Final = "Suspended"
INPUTS_READY: Final = "InputsReady"
SCHEDULED: Final = "Scheduled"
RENDEZVOUSED: Final = "Rendezvoused"
PROGRESSING: Final = "Progressing"
RESTARTING: Final = "Restarting"
UPLOADED: Final = "CheckpointsUploaded"
DISTRIBUTED: Final = "Distributed"
IDLE: Final = "Idle"
NODES_HEALTHY: Final = "NodesHealthy"
SUCCEEDED: Final = "Succeeded"
FAILED: Final = "Failed"
_ENDS: Final = (DISTRIBUTED, SUCCEEDED, FAILED)
_WAYS: Final = (ACCEPTED, SUSPENDED, INPUTS_READY, SCHEDULED, RENDEZVOUSED, PROGRESSING, RESTARTING)
TYPES: Final = (*_WAYS, IDLE, NODES_HEALTHY, UPLOADED, *_ENDS)

# Accepted
VALID: Final = "Valid"
INVALID_SPEC: Final = "InvalidSpec"
VERSION_MISMATCH: Final = "VersionMismatch"
NAME_CONFLICT: Final = "NameConflict"
CLAIM_IN_USE: Final = "ClaimInUse"
PROFILE_NOT_FOUND: Final = "ProfileNotFound"
PROFILE_LOCKED: Final = "ProfileLocked"
RESOURCE_CLAIM_NOT_FOUND: Final = "ResourceClaimNotFound"
FORBIDDEN: Final = "Forbidden"
SERVER_ERROR: Final = "ServerError"
STATUS_REFUSED: Final = "StatusRefused"
# Suspended
SUSPENDED_BY_SPEC: Final = "SuspendedBySpec"
STOPPING: Final = "Stopping"
NOT_SUSPENDED: Final = "NotSuspended"
# InputsReady: also the reasons of Scheduled, of the pod that fetches. The failures are the launcher's words.
FETCHED: Final = "Fetched"
NOT_FETCHED: Final = "NotFetched"
FETCHING_INPUTS: Final = "FetchingInputs"
UNREACHABLE: Final = "Unreachable"
FETCH_FAILED: Final = "FetchFailed"
FETCH_FAILURES: Final = (
    UNREACHABLE,
    FETCH_FAILED,
    "NotFound",
    "AccessDenied",
    "ChecksumMismatch",
    "NoSpace",
    "NotWritable",
    "Unsupported",
)
"""Of Failed too."""
# Scheduled
ALL_PODS_SCHEDULED: Final = "AllPodsScheduled"
CHANGE_PENDING: Final = "ChangePending"  # all pods are, and so are these
SIDECAR_RESTARTED: Final = "SidecarRestarted"
WAITING_FOR_PODS: Final = "WaitingForPods"
WAITING_FOR_FORMER_PODS: Final = "WaitingForFormerPods"
UNSCHEDULABLE: Final = "Unschedulable"
QUOTA_PENDING: Final = "QuotaPending"
INADMISSIBLE: Final = "Inadmissible"
QUEUE_STOPPED: Final = "QueueStopped"
WORKLOAD_FINISHED: Final = "WorkloadFinished"
WORKLOAD_DEACTIVATED: Final = "WorkloadDeactivated"
WORKLOAD_MISSING: Final = "WorkloadMissing"
PODS_FORBIDDEN: Final = "PodsForbidden"
VOLUME_NOT_READY: Final = "VolumeNotReady"
IMAGE_PULL: Final = "ImagePull"
PODS_NOT_STARTING: Final = "PodsNotStarting"
BLOCKING: Final = (
    UNSCHEDULABLE,
    QUOTA_PENDING,
    INADMISSIBLE,
    QUEUE_STOPPED,
    WORKLOAD_FINISHED,
    WORKLOAD_DEACTIVATED,
    WORKLOAD_MISSING,
    PODS_FORBIDDEN,
    VOLUME_NOT_READY,
    IMAGE_PULL,
    PODS_NOT_STARTING,
)
"""Those that do not go by themselves: somebody has to act, or a queue."""
SCHEDULED_REASONS: Final = (
    ALL_PODS_SCHEDULED,
    CHANGE_PENDING,
    SIDECAR_RESTARTED,
    WAITING_FOR_PODS,
    WAITING_FOR_FORMER_PODS,
    *BLOCKING,
)
# Rendezvoused
ALL_RANKS_JOINED: Final = "AllRanksJoined"
ENOUGH_RANKS_JOINED: Final = "EnoughRanksJoined"
WAITING_FOR_RANKS: Final = "WaitingForRanks"
WAITING_FOR_WORKERS: Final = "WaitingForWorkers"
NO_METRICS_PAGE: Final = "NoMetricsPage"
# Progressing
TRAINING: Final = "Training"
STALLED: Final = "Stalled"
NO_STEP_YET: Final = "NoStepYet"
NOT_RUNNING: Final = "NotRunning"
WAITING_FOR_PEERS: Final = "WaitingForPeers"
NODE_NOT_READY: Final = "NodeNotReady"  # of Rendezvoused too
# Restarting
GROUP_RESTART: Final = "GroupRestart"
POD_REPLACEMENT: Final = "PodReplacement"
RESIZED: Final = "Resized"
DISRUPTED: Final = "Disrupted"
RESUMED: Final = "Resumed"
NODES_READMITTED: Final = "NodesReadmitted"
RESTARTED_IN_PLACE: Final = "RestartedInPlace"  # of an Event alone: the pods go on
NOT_RESTARTING: Final = "NotRestarting"
# CheckpointsUploaded: only of a job with checkpoint.url
SNAPSHOT_UPLOADED: Final = "SnapshotUploaded"
UPLOAD_FAILING: Final = "UploadFailing"
# Distributed: only of a job whose pods have succeeded, and only where it is known
PROCESS_GROUP_OF_ALL_RANKS: Final = "ProcessGroupOfAllRanks"
NO_PROCESS_GROUP: Final = "NoProcessGroup"  # of Failed too
# Idle: only where spec.idle is set
NO_STEPS: Final = "NoSteps"
NOT_IDLE: Final = "NotIdle"
# NodesHealthy: only where recovery.nodeHealth is set
NODE_UNHEALTHY: Final = "NodeUnhealthy"  # of Restarting too
NO_TROUBLE: Final = "NoTrouble"
# Succeeded and Failed
RANK_ZERO_SUCCEEDED: Final = "RankZeroSucceeded"
PENDING_DEADLINE_EXCEEDED: Final = "PendingDeadlineExceeded"
ALL_NODES_SUCCEEDED: Final = "AllNodesSucceeded"
NOT_FINISHED: Final = "NotFinished"
RESTART_BUDGET_EXHAUSTED: Final = "RestartBudgetExhausted"
CRASH_LOOP: Final = "CrashLoop"
REPEATED_FAILURE: Final = "RepeatedFailure"
DEADLINE_EXCEEDED: Final = "DeadlineExceeded"
OPERATOR_ERROR: Final = "OperatorError"  # of `ddp run` alone: an operator in a cluster never gives up
INTERRUPTED: Final = "Interrupted"  # likewise: it was, or it was killed
FINISHED: Final = "Finished"


# A launcher serves its page within a second of its start; so long a silence has another cause.
_PAGE_PATIENCE = timedelta(seconds=30)
_UNREAD = "the operator cannot read the metrics page of pod 0, so it does not know"
_ALL_THE_SAME = "failures and lost pods are answered all the same, and restarts counted when the pods end"
_OF_PAGE = (ALL_RANKS_JOINED, WAITING_FOR_WORKERS, NO_METRICS_PAGE)
# Unsatisfactory states in the order in which they hide each other: type and the bad status of the condition.
_ORDER: Final = (
    (ACCEPTED, "False"),
    (ACCEPTED, "Unknown"),
    (SUSPENDED, "True"),
    (INPUTS_READY, "False"),
    (RESTARTING, "True"),
    (SCHEDULED, "False"),
    (RENDEZVOUSED, "False"),
    (PROGRESSING, "False"),
    (RENDEZVOUSED, "Unknown"),
    (PROGRESSING, "Unknown"),
)


@dataclass(frozen=True, slots=True)
class Fact:
    """A condition before it has a time."""

    type: str
    status: ConditionStatus
    reason: str
    message: str = ""


def merge_conditions(
    previous: Iterable[Condition], facts: Iterable[Fact], now: datetime, generation: int
) -> tuple[Condition, ...]:
    """Return the conditions in the order of TYPES. A transition time changes only with the status."""
    old = {condition.type: condition for condition in previous}
    new = {fact.type: fact for fact in facts}
    merged = []
    for kind in TYPES:
        fact, before = new.get(kind), old.get(kind)
        if fact is None:
            if before is not None:
                merged.append(before)
            continue
        since = before.last_transition_time if before and before.status == fact.status else truncate(now)
        merged.append(
            Condition(
                type=kind,
                status=fact.status,
                reason=fact.reason,
                message=fact.message[:1024],
                last_transition_time=since,
                observed_generation=generation,
            )
        )
    return tuple(merged)


def has_quorum(running: Collection[int], nodes: int, spares: int) -> bool:
    """Tell whether pods of these indexes are enough: all the lower ones, or where there are spares any with pod 0."""
    return len(running) >= nodes and 0 in running if spares else all(index in running for index in range(nodes))


def describe_rendezvous(
    pods: Pods, nodes: int, spares: int, observation: Observation, before: Condition | None, now: datetime
) -> Fact:
    """Return Rendezvoused. ``before``: what it was at the last look of this attempt.

    The launcher on pod 0 knows when torchrun has started the workers; a page with a step proves it too.
    """
    newest = pods.newest
    running = {index for index, pod in newest.items() if pod.phase in ("Running", "Succeeded")}
    missing = [str(index) for index in range(nodes) if index not in running]
    if missing and not has_quorum(running, nodes, spares):
        shown = ", ".join(missing[:10]) + (", …" if len(missing) > 10 else "")
        return Fact(
            RENDEZVOUSED, "False", WAITING_FOR_RANKS, f"{len(running)}/{nodes} pods running; waiting for pods {shown}"
        )
    page = observation.page
    if page is None:
        # What only a page can have said stands until the next page is read.
        stands = not observation.page_requested and before is not None and before.reason in _OF_PAGE
        if before is not None and (before.status == "True" or stands):
            return Fact(RENDEZVOUSED, before.status, before.reason, before.message)
    elif page.training or page.launcher_phase in ("Running", "Stopping", "Done"):
        return Fact(RENDEZVOUSED, "True", ALL_RANKS_JOINED, f"{nodes}/{nodes} pods joined the rendezvous")
    elif not page.launcher_phase and before is not None and before.status == "True":
        return Fact(RENDEZVOUSED, "True", before.reason, before.message)
    old = all(pod.started and now - pod.started > _PAGE_PATIENCE for pod in newest.values())
    if page is None and observation.page_requested and old:
        return Fact(
            RENDEZVOUSED, "Unknown", NO_METRICS_PAGE, f"{_UNREAD} whether training has started; {_ALL_THE_SAME}"
        )
    phase = f" (pod 0: {page.launcher_phase})" if page and page.launcher_phase else ""
    restarts = page.in_place_restarts if page else 0
    workers = (
        f"workers are restarting in the same pods, restart {restarts}" if restarts else "workers have not started yet"
    )
    message = f"{nodes}/{nodes} pods running; {workers}{phase}"
    return Fact(RENDEZVOUSED, "False", WAITING_FOR_WORKERS, message)


def describe_lost_page(since: datetime | None, now: datetime) -> Fact | None:
    """Return Progressing of a job that has trained, where pod 0's page has not answered ``since``; None: not for long.

    What its pods do is in their last words at the latest.
    """
    if since is None or now - since <= _PAGE_PATIENCE:
        return None
    message = f"{_UNREAD} how far training is since {format_time(since)}; {_ALL_THE_SAME}"
    return Fact(PROGRESSING, "Unknown", NO_METRICS_PAGE, message)


def may_have_joined(rendezvoused: Condition | None) -> bool:
    """Tell whether the workers of an attempt have begun, or all its pods run and nobody can say it."""
    return rendezvoused is not None and rendezvoused.status != "False"


def describe_distribution(pods: Pods) -> Fact | None:
    """Return Distributed of pods that have succeeded: whether a process group spanned all ranks; None: not known."""
    ends = {index: pod.termination for index, pod in pods.newest.items() if pod.phase == "Succeeded"}
    known = [
        (index, end.world_size, end.group_size)
        for index, end in ends.items()
        if end is not None and end.world_size is not None and end.group_size is not None
    ]
    alone = [(index, size) for index, world, size in known if size < world]
    if not known or (not alone and len(known) < len(ends)) or all(world <= 1 for _, world, _ in known):
        return None
    world = max(world for _, world, _ in known)
    if not alone:
        message = f"a process group of torch.distributed spanned all {world} ranks"
        return Fact(DISTRIBUTED, "True", PROCESS_GROUP_OF_ALL_RANKS, message)
    shown = ", ".join(str(index) for index, _ in alone[:10]) + (", …" if len(alone) > 10 else "")
    most = max(size for _, size in alone)
    what = f"had a process group of only {most} ranks" if most else "ended without a process group"
    plural = "s" if len(alone) > 1 else ""
    message = (
        f"no process group spanned all {world} ranks: those of pod{plural} {shown} {what}, so each trained alone; "
        "the script has to call torch.distributed.init_process_group() in every rank"
    )
    return Fact(DISTRIBUTED, "False", NO_PROCESS_GROUP, message)


def set_conditions(status: Status, facts: Iterable[Fact], now: datetime, generation: int) -> Status:
    """Return the status with the facts among its conditions, and with what columns of ``kubectl get`` cannot build."""
    restarts = status.restarts
    status = replace(
        status,
        observed_generation=generation,
        restarts=replace(restarts, all=restarts.total + restarts.replaced + restarts.in_place),
        conditions=merge_conditions(status.conditions, facts, now, generation),
    )
    return replace(status, reason=find_reason(status))


def find_obstacle(status: Status) -> Condition | None:
    """Return the condition that keeps a job from training, the one that hides the others; None: it trains."""
    for kind, bad in _ORDER:
        condition = status.condition(kind)
        if condition is not None and (condition.status == bad or condition.reason == STOPPING):
            return condition
    return None


def find_blocker(status: Status) -> Condition | None:
    """Return Scheduled where a job that starts again waits until somebody acts, or for its queue."""
    scheduled = status.condition(SCHEDULED)
    return scheduled if scheduled and scheduled.status == "False" and scheduled.reason in BLOCKING else None


def find_reason(status: Status) -> str:
    """Return what the job waits for or why it failed; empty where nothing is to be said, as of a job that trains."""
    failure, failed, distributed = status.last_failure, status.condition(FAILED), status.condition(DISTRIBUTED)
    if status.phase == "Succeeded":
        return distributed.reason if distributed and distributed.status == "False" else ""
    if failed is not None and failed.status == "True":
        return failure.category if failure is not None and failure.conclusion else failed.reason
    obstacle = find_obstacle(status)
    if obstacle is not None and obstacle.type == RESTARTING:
        obstacle = find_blocker(status) or obstacle
    if obstacle is None or obstacle.reason == SUSPENDED_BY_SPEC:  # the phase says so
        return ""
    return failure.category if obstacle.reason == GROUP_RESTART and failure is not None else obstacle.reason

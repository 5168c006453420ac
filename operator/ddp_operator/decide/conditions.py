"""Conditions: types and reasons, how they are merged into a status, and the one reason that sums them up. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from msgspec.structs import replace

from ddp_operator.api.kubeobjects import truncate
from ddp_operator.api.spec import Spec
from ddp_operator.api.status import Condition, ConditionStatus, Restarts, Status
from ddp_pod.contract.credentials import hide_credentials

ACCEPTED: Final = "Accepted"
SUSPENDED: Final = "Suspended"
INPUTS_READY: Final = "InputsReady"
SCHEDULED: Final = "Scheduled"
RENDEZVOUSED: Final = "Rendezvoused"
PROGRESSING: Final = "Progressing"
RESTARTING: Final = "Restarting"
UPLOADED: Final = "CheckpointsUploaded"
TRAINS_AS_ONE: Final = "TrainsAsOne"
TRAINING_COMPLETE: Final = "TrainingComplete"
NODES_HEALTHY: Final = "NodesHealthy"
FEATURES_WORK: Final = "FeaturesWork"
SUCCEEDED: Final = "Succeeded"
FAILED: Final = "Failed"
_FINAL_TYPES: Final = (TRAINS_AS_ONE, TRAINING_COMPLETE, SUCCEEDED, FAILED)
_RUNNING_TYPES: Final = (ACCEPTED, SUSPENDED, INPUTS_READY, SCHEDULED, RENDEZVOUSED, PROGRESSING, RESTARTING)
TYPES: Final = (*_RUNNING_TYPES, NODES_HEALTHY, FEATURES_WORK, UPLOADED, *_FINAL_TYPES)
"""Those of the kernel; features have further ones."""

# Accepted
VALID: Final = "Valid"
INVALID_SPEC: Final = "InvalidSpec"
VERSION_MISMATCH: Final = "VersionMismatch"
NAME_CONFLICT: Final = "NameConflict"
CLAIM_IN_USE: Final = "ClaimInUse"
PROFILE_NOT_FOUND: Final = "ProfileNotFound"
FORBIDDEN: Final = "Forbidden"
SERVER_ERROR: Final = "ServerError"
STATUS_REFUSED: Final = "StatusRefused"
# Suspended
SUSPENDED_BY_SPEC: Final = "SuspendedBySpec"
STOPPING: Final = "Stopping"
NOT_SUSPENDED: Final = "NotSuspended"
# Scheduled
ALL_PODS_SCHEDULED: Final = "AllPodsScheduled"
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
QUEUE_REASONS: Final = (
    QUOTA_PENDING,
    INADMISSIBLE,
    QUEUE_STOPPED,
    WORKLOAD_FINISHED,
    WORKLOAD_DEACTIVATED,
    WORKLOAD_MISSING,
)
"""Reasons that a queue explains."""
BLOCKING: Final = (
    UNSCHEDULABLE,
    *QUEUE_REASONS,
    PODS_FORBIDDEN,
    VOLUME_NOT_READY,
    IMAGE_PULL,
    PODS_NOT_STARTING,
)
"""Reasons that last until a person or a queue acts."""
# Rendezvoused
ALL_RANKS_JOINED: Final = "AllRanksJoined"
ENOUGH_RANKS_JOINED: Final = "EnoughRanksJoined"
WAITING_FOR_RANKS: Final = "WaitingForRanks"
INIT_CONTAINER_RUNNING: Final = "InitContainerRunning"
WAITING_FOR_WORKERS: Final = "WaitingForWorkers"
NO_METRICS_PAGE: Final = "NoMetricsPage"
PEER_UNREACHABLE: Final = "PeerUnreachable"  # of Progressing too
# Progressing
TRAINING: Final = "Training"
NO_STEP_YET: Final = "NoStepYet"
NOT_RUNNING: Final = "NotRunning"
WAITING_FOR_PEERS: Final = "WaitingForPeers"
HELD: Final = "Held"  # of `ddp dev`; the phase too
# Restarting
GROUP_RESTART: Final = "GroupRestart"
POD_REPLACEMENT: Final = "PodReplacement"
RESIZED: Final = "Resized"
DISRUPTED: Final = "Disrupted"
RESUMED: Final = "Resumed"
NODES_READMITTED: Final = "NodesReadmitted"
RESTARTED_IN_PLACE: Final = "RestartedInPlace"  # of an Event alone: the pods continue
NOT_RESTARTING: Final = "NotRestarting"
# TrainsAsOne: only of a job with several ranks; ``doubts`` has more
REPLICAS_DIFFER: Final = "ReplicasDiffer"
SAME_BATCHES: Final = "SameBatches"
RANK_LOSS_NOT_FINITE: Final = "RankLossNotFinite"
# FeaturesWork: only after a fault of a feature
FEATURE_FAULT: Final = "FeatureFault"
NO_FAULT: Final = "NoFault"
# NodesHealthy: only where a feature reads the nodes, or others have asked a pod to leave
NODE_UNHEALTHY: Final = "NodeUnhealthy"  # of Restarting too
DRAINED: Final = "Drained"  # of Restarting and of pods too
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
FINISHED: Final = "Finished"
_MAX_LISTED = 10
# Obstacles to training, the first one found is reported: type and status of the condition.
_OBSTACLES: Final = (
    (ACCEPTED, "False"),
    (ACCEPTED, "Unknown"),
    (SUSPENDED, "True"),
    (INPUTS_READY, "False"),
    (RESTARTING, "True"),
    (SCHEDULED, "False"),
    (RENDEZVOUSED, "False"),
    (TRAINS_AS_ONE, "False"),
    (PROGRESSING, "False"),
    (RENDEZVOUSED, "Unknown"),
    (PROGRESSING, "Unknown"),
)
DEFECTS: Final = (REPLICAS_DIFFER, SAME_BATCHES, RANK_LOSS_NOT_FINITE)
"""Reasons with which a job trains on, so that they are no reason why it makes no step."""


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
    """Return the conditions in the order of TYPES, then those of features by name.

    A transition time changes only with the status.
    """
    old = {condition.type: condition for condition in previous}
    new = {fact.type: fact for fact in facts}
    merged = []
    for kind in (*TYPES, *sorted({*old, *new}.difference(TYPES))):
        fact = new.get(kind)
        before = old.get(kind)
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
                message=hide_credentials(fact.message)[:1024],
                last_transition_time=since,
                observed_generation=generation,
            )
        )
    return tuple(merged)


def list_indexes(indexes: Sequence[int]) -> str:
    """Return indexes of pods or ranks separated by commas, at most ten of them."""
    shown = ", ".join(map(str, indexes[:_MAX_LISTED]))
    return f"{shown}, …" if len(indexes) > _MAX_LISTED else shown


def may_have_joined(rendezvoused: Condition | None) -> bool:
    """Return whether the workers of an attempt have joined, or all its pods run and no page can be read."""
    return rendezvoused is not None and rendezvoused.status != "False"


def set_conditions(status: Status, facts: Iterable[Fact], now: datetime, generation: int) -> Status:
    """Return the status with the facts among its conditions."""
    conditions = merge_conditions(status.conditions, facts, now, generation)
    return replace(status, observed_generation=generation, conditions=conditions)


def summarize(status: Status, spec: Spec | None = None) -> Status:
    """Return the status with the fields that sum up others for users. ``spec``: None if it cannot be read."""
    counts = status.counts
    limit = spec.recovery.max_restarts if spec is not None else status.restarts.limit
    restarts = Restarts(all=counts.all, in_place=counts.in_place, used=counts.used, limit=limit)
    return replace(status, restarts=restarts, reason=find_reason(status))


def find_obstacle(status: Status) -> Condition | None:
    """Return the most important condition that keeps a job from training; None: it trains."""
    obstacles = [
        condition
        for kind, bad in _OBSTACLES
        if (condition := status.condition(kind)) and (condition.status == bad or condition.reason == STOPPING)
    ]
    first = next(iter(obstacles), None)
    if first is None or first.reason not in DEFECTS:
        return first
    # Where the job also stands still, that is more important.
    return next((later for later in obstacles[1:] if later.status != "Unknown"), first)


def find_blocker(status: Status) -> Condition | None:
    """Return Scheduled or Rendezvoused where a restarting job waits until a person or its queue acts."""
    for kind, reasons in ((SCHEDULED, BLOCKING), (RENDEZVOUSED, (PEER_UNREACHABLE, INIT_CONTAINER_RUNNING))):
        condition = status.condition(kind)
        if condition is not None and condition.status == "False" and condition.reason in reasons:
            return condition
    return None


def find_reason(status: Status) -> str:
    """Return what the job waits for or why it failed; empty for a job that trains or succeeded."""
    failure = status.last_failure
    failed = status.condition(FAILED)
    if status.phase == "Succeeded":
        return ""
    if failed is not None and failed.status == "True":
        return failure.category if failure is not None and failure.conclusion else failed.reason

    if status.phase == HELD and status.dev is not None:
        return failure.category if status.dev.result == "Failed" and failure is not None else status.dev.result or HELD

    obstacle = find_obstacle(status)
    if obstacle is not None and obstacle.type == RESTARTING:
        obstacle = find_blocker(status) or obstacle
    if obstacle is None or obstacle.reason == SUSPENDED_BY_SPEC:  # the phase is Suspended
        return ""
    is_restarting = obstacle.reason == GROUP_RESTART or _is_restarting_in_place(status, obstacle)
    return failure.category if is_restarting and failure is not None else obstacle.reason


def _is_restarting_in_place(status: Status, obstacle: Condition) -> bool:
    """Return whether the workers start again in the same pods after the last failure."""
    restart = status.last_restart
    if obstacle.reason != WAITING_FOR_WORKERS or restart is None or status.last_failure is None:
        return False
    return restart.recovery_seconds is None and restart.cause == status.last_failure.category


def is_finished(status: Status) -> bool:
    """Return whether the job has succeeded or failed; no later observation changes that."""
    return status.is_true(SUCCEEDED) or status.is_true(FAILED)

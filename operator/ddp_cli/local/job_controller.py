"""Decide about an Indexed Job as Kubernetes' Job controller does: a pure function over plain objects.

The local cluster and the simulated API server of the tests use it; ``tests/contract`` compares it with recordings of a
real controller (1.36). A caller applies one decision and calls again until a decision changes nothing. As in the real
controller, no pass both decides to end a Job and finishes it.

Not implemented, because the operator does not use it: the growth of the back-off between failures,
``backoffLimitPerIndex``, ``activeDeadlineSeconds``, ``ttlSecondsAfterFinished`` and non-Indexed Jobs.
"""

from collections.abc import Iterable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final, Self

from ddp_operator.api.cluster import Object
from ddp_operator.api.constants import ANNOTATION_COMPLETION_INDEX, JOB_TRACKING_FINALIZER
from ddp_operator.api.kubeobjects import format_time
from ddp_pod.contract.numbers import parse_count

Json = dict[str, Any]

SUCCESS_POLICY: Final = ("SuccessPolicy", "Matched rules at index 0")
COMPLETIONS_REACHED: Final = ("CompletionsReached", "Reached expected number of succeeded pods")


@dataclass(frozen=True, slots=True)
class JobDecision:
    """The actions for one Job, in this order: write the status, release, delete, create."""

    status: Json
    release: tuple[str, ...] = ()
    """Names of pods that the status counts: remove their tracking finalizer."""
    delete: tuple[str, ...] = ()
    """Names of pods to delete, with their grace period."""
    create: tuple[int, ...] = ()
    """Completion indexes that need a pod, ascending."""
    retry_after: float | None = None
    """Seconds until the back-off ends and the missing pods may be created."""

    def changes(self, job: Object) -> bool:
        """Return whether applying this changes ``job`` or its pods."""
        return bool(self.release or self.delete or self.create) or self.status != job.get("status", {})


def decide_job(job: Object, pods: Iterable[Object], now: datetime, *, backoff: float = 0) -> JobDecision:
    """Decide for one Job from all its pods; pods that another Job controls are ignored.

    ``backoff``: seconds after a pod's failure in which no pod is created.
    """
    own = [pod for pod in pods if is_controlled_by(pod, job["metadata"]["uid"])]
    own.sort(key=_name)
    deleting = job["metadata"].get("deletionTimestamp") is not None
    if deleting or has_condition(job, "Complete") or has_condition(job, "Failed"):
        release = tuple(_name(pod) for pod in own if _is_tracked(pod) and (deleting or _is_finished(pod)))
        return JobDecision(status=dict(job.get("status") or {}), release=release)

    work = _Pass.start(job, own, now)
    if work.is_ending:
        work.finish()
    elif not work.start_ending():
        retry_after = work.set_size(backoff)
        if retry_after is not None:  # the status counts a failure when its replacement is created
            return JobDecision(status=dict(job.get("status") or {}), retry_after=retry_after)
    return work.conclude()


@dataclass(slots=True)
class _Pass:
    """One pass of the controller over an unfinished Job: its pods, and the decision under construction."""

    spec: Object
    pods: Sequence[Object]
    now: datetime
    status: Json
    release: tuple[str, ...]
    """Finished pods that this pass has counted."""
    newly_failed: int
    succeeded: set[int]
    """Completed indexes."""
    delete: list[Object] = field(default_factory=list)
    create: tuple[int, ...] = ()

    @classmethod
    def start(cls, job: Object, pods: Sequence[Object], now: datetime) -> Self:
        """Count the pods that have finished since the last pass."""
        spec = job["spec"]
        status: Json = deepcopy(dict(job.get("status") or {}))
        status.setdefault("conditions", [])
        if not spec.get("suspend") and "startTime" not in status:
            status["startTime"] = format_time(now)
        release, newly_failed, succeeded = _count(job, pods, int(spec["completions"]))
        status["failed"] = int(status.get("failed", 0)) + newly_failed
        status["succeeded"] = len(succeeded)
        status["completedIndexes"] = format_indexes(succeeded)
        return cls(spec, pods, now, status, release, newly_failed, succeeded)

    @property
    def completions(self) -> int:
        return int(self.spec["completions"])

    @property
    def active(self) -> list[Object]:
        """Pods that are neither finished nor deleted."""
        return [pod for pod in self.pods if not _is_finished(pod) and not _is_deleted(pod)]

    @property
    def terminating(self) -> list[Object]:
        """Deleted pods that are not finished."""
        return [pod for pod in self.pods if not _is_finished(pod) and _is_deleted(pod)]

    @property
    def failure_target(self) -> Json | None:
        """The condition by which the Job will fail."""
        return _condition(self.status["conditions"], "FailureTarget")

    @property
    def success_criteria(self) -> Json | None:
        """The condition by which the Job will complete."""
        return _condition(self.status["conditions"], "SuccessCriteriaMet")

    @property
    def is_ending(self) -> bool:
        return self.failure_target is not None or self.success_criteria is not None

    def start_ending(self) -> bool:
        """Set the condition by which the Job fails, completes or is suspended; return whether one applies."""
        message = _fail_job_message(self.spec, self.pods)
        limit_exceeded = self.newly_failed and self.status["failed"] > int(self.spec.get("backoffLimit", 6))
        completed = len(self.succeeded) >= self.completions
        if message is not None:
            self._set("FailureTarget", "True", "PodFailurePolicy", message)
        elif limit_exceeded:
            self._set("FailureTarget", "True", "BackoffLimitExceeded", "Job has reached the specified backoff limit")
        elif completed or _meets_success_policy(self.spec, self.succeeded):
            # Checked before the pods: an elastic Job may shrink while pods beyond its new size still run.
            reason, text = COMPLETIONS_REACHED if completed else SUCCESS_POLICY
            self._set("SuccessCriteriaMet", "True", reason, text)
        elif self.spec.get("suspend"):
            if self._set("Suspended", "True", "JobSuspended", "Job suspended"):
                self.status.pop("startTime", None)
        else:
            return False
        self.delete = self.active
        return True

    def set_size(self, backoff: float) -> float | None:
        """Delete surplus pods or create missing ones; return the seconds to wait, None: no wait."""
        if self._set("Suspended", "False", "JobResumed", "Job resumed"):
            self.status["startTime"] = format_time(self.now)
        self.delete, self.create = _scale(self.spec, self.active, self.terminating, self.succeeded, self.completions)
        return _remaining_backoff(self.pods, backoff, self.now) if self.create else None

    def finish(self) -> None:
        """Delete the remaining pods; once all have ended, set the final condition."""
        self.delete = self.active
        if self.active or self.terminating:
            return
        target = self.failure_target
        cause = target or self.success_criteria
        assert cause is not None
        self._set("Failed" if target else "Complete", "True", cause["reason"], cause["message"])
        if not target:
            self.status["completionTime"] = format_time(self.now)

    def conclude(self) -> JobDecision:
        """Return the decision, with the numbers of pods in the status."""
        # A pod that is deleted here is released at once; when the Job fails, all unfinished pods count as failed.
        ended = [*self.delete, *(self.terminating if self.is_ending else ())]
        released = [pod for pod in ended if _is_tracked(pod)]
        if self.failure_target is not None:
            self.status["failed"] += sum(_has_index_below(pod, self.completions) for pod in released)
        kept = [pod for pod in self.active if pod not in self.delete]
        self.status["active"] = len(kept) + len(self.create)
        self.status["ready"] = sum(has_condition(pod, "Ready") for pod in kept)
        self.status["terminating"] = len(self.terminating) + len(self.delete)
        if not self.status["conditions"]:
            del self.status["conditions"]
        return JobDecision(
            status=self.status,
            release=(*self.release, *map(_name, released)),
            delete=tuple(map(_name, self.delete)),
            create=self.create,
        )

    def _set(self, kind: str, value: str, reason: str, message: str) -> bool:
        """Set a condition; return whether it changed. A condition that is absent counts as false."""
        conditions: list[Json] = self.status["conditions"]
        old = next((condition for condition in conditions if condition["type"] == kind), None)
        if (old["status"] if old else "False") == value:
            return False
        stamp = format_time(self.now)
        times = {"lastProbeTime": stamp, "lastTransitionTime": stamp}
        if old is not None:
            conditions.remove(old)
        conditions.append({"type": kind, "status": value, "reason": reason, "message": message, **times})
        return True


def completion_index(pod: Object) -> int | None:
    """Return a pod's completion index, or None if it has no numeric one."""
    return parse_count((pod["metadata"].get("annotations") or {}).get(ANNOTATION_COMPLETION_INDEX, ""))


def is_controlled_by(child: Object, uid: str) -> bool:
    """Return whether the object's controlling owner has this UID."""
    owners = child["metadata"].get("ownerReferences") or ()
    return any(owner.get("controller") and owner.get("uid") == uid for owner in owners)


def has_condition(item: Object, kind: str) -> bool:
    """Return whether a condition of this type is true."""
    return _condition((item.get("status") or {}).get("conditions") or (), kind) is not None


def format_indexes(indexes: Iterable[int]) -> str:
    """Return indexes in the format of a Job's status: ``0-2,5,6``."""
    runs: list[list[int]] = []
    for index in sorted(indexes):
        if runs and index == runs[-1][1] + 1:
            runs[-1][1] = index
        else:
            runs.append([index, index])
    return ",".join(_format_run(first, last) for first, last in runs)


def _format_run(first: int, last: int) -> str:
    if first == last:
        return str(first)
    separator = "," if last - first == 1 else "-"
    return f"{first}{separator}{last}"


def parse_indexes(text: str) -> set[int]:
    """Return the indexes of a text such as ``0-2,5``."""
    indexes: set[int] = set()
    for run in filter(None, text.split(",")):
        first, _, last = run.partition("-")
        indexes |= set(range(int(first), int(last or first) + 1))
    return indexes


def _count(job: Object, pods: Sequence[Object], completions: int) -> tuple[tuple[str, ...], int, set[int]]:
    """Count the finished pods that still have a finalizer: (pods to release, new failures, completed indexes)."""
    policy = job["spec"].get("podFailurePolicy")
    succeeded = parse_indexes((job.get("status") or {}).get("completedIndexes", ""))
    release = []
    failed = 0
    for pod in pods:
        if not _is_tracked(pod) or not _is_finished(pod):
            continue
        release.append(_name(pod))
        if not _has_index_below(pod, completions):
            continue
        if pod["status"]["phase"] == "Succeeded":
            succeeded.add(int(pod["metadata"]["annotations"][ANNOTATION_COMPLETION_INDEX]))
        elif policy is None or _match_policy(policy, pod)[0] != "Ignore":
            failed += 1
    return tuple(release), failed, {index for index in succeeded if index < completions}


def _scale(
    spec: Object, active: Sequence[Object], terminating: Sequence[Object], succeeded: set[int], completions: int
) -> tuple[list[Object], tuple[int, ...]]:
    """Return (pods to delete, indexes to create); as in the real controller, at most one of them in a pass."""
    size = min(int(spec.get("parallelism", 1)), completions - len(succeeded))
    surplus: list[Object] = []
    kept: dict[int, Object] = {}
    for pod in sorted(active, key=_advancement, reverse=True):
        index = completion_index(pod)
        if index is None or index >= completions or index in kept:
            surplus.append(pod)
        else:
            kept[index] = pod
    while len(kept) > size:
        least_advanced = min(kept, key=lambda index: (_advancement(kept[index]), -index))
        surplus.append(kept.pop(least_advanced))
    if surplus:
        return surplus, ()
    taken = succeeded | set(kept)
    missing = size - len(kept)
    if spec.get("podFailurePolicy") or spec.get("podReplacementPolicy") == "Failed":
        taken |= {index for pod in terminating if (index := completion_index(pod)) is not None}
        missing -= len(terminating)
    pending = [index for index in range(completions) if index not in taken]
    return [], tuple(pending[: max(missing, 0)])


def _meets_success_policy(spec: Object, succeeded: set[int]) -> bool:
    """Return whether all indexes of a rule have succeeded (the operator writes no rules by count)."""
    rules = (spec.get("successPolicy") or {}).get("rules") or ()
    return any(parse_indexes(rule["succeededIndexes"]) <= succeeded for rule in rules)


def _remaining_backoff(pods: Sequence[Object], backoff: float, now: datetime) -> float | None:
    """Return the seconds until the back-off after the latest failure ends; None: it has ended.

    A later success ends it too.
    """
    failed = max(_end_times(pods, "Failed"), default=0.0)
    succeeded = max(_end_times(pods, "Succeeded"), default=0.0)
    if failed <= succeeded:
        return None
    remaining = failed + backoff - now.timestamp()
    # It exceeds the whole back-off if the clock was set back.
    return remaining if 0 < remaining <= backoff else None


def _end_times(pods: Sequence[Object], phase: str) -> Iterator[float]:
    """Yield the end of each container of the pods in this phase (Unix seconds)."""
    for pod in pods:
        if pod["status"].get("phase") != phase:
            continue
        for container in _container_statuses(pod):
            terminated = (container.get("state") or {}).get("terminated") or {}
            if terminated.get("finishedAt"):
                yield datetime.fromisoformat(terminated["finishedAt"]).timestamp()


def _fail_job_message(spec: Object, pods: Sequence[Object]) -> str | None:
    """Return the message of the first pod that fails the Job by its policy; None: no pod does."""
    failed = [pod for pod in pods if pod["status"].get("phase") == "Failed"]
    matches = (_match_policy(spec.get("podFailurePolicy") or {}, pod) for pod in failed)
    return next((message for action, message in matches if action == "FailJob"), None)


def _match_policy(policy: Object, pod: Object) -> tuple[str | None, str]:
    """Return the first matching rule's action and the message with which it fails a Job."""
    for number, rule in enumerate(policy.get("rules", ())):
        exit_codes = rule.get("onExitCodes")
        if exit_codes:
            match = _match_exit_code(exit_codes, pod)
        else:
            match = _match_condition(rule.get("onPodConditions", ()), pod)
        if match is not None:
            return rule["action"], f"{match} matching {rule['action']} rule at index {number}"
    return None, ""


def _match_exit_code(rule: Object, pod: Object) -> str | None:
    """Return the controller's description of the first container that a rule matches; None: there is none."""
    for container in _container_statuses(pod):
        code = ((container.get("state") or {}).get("terminated") or {}).get("exitCode", 0)
        applies = rule.get("containerName") in (None, container["name"])
        if code != 0 and applies and (code in rule["values"]) == (rule["operator"] == "In"):
            return f"Container {container['name']} for pod {_qualified_name(pod)} failed with exit code {code}"
    return None


def _match_condition(patterns: Iterable[Object], pod: Object) -> str | None:
    """Return the controller's description of the first condition that a pattern matches; None: there is none."""
    conditions = pod["status"].get("conditions") or ()
    actual = {(condition["type"], condition["status"]) for condition in conditions}
    for pattern in patterns:
        if (pattern["type"], pattern.get("status", "True")) in actual:
            return f"Pod {_qualified_name(pod)} has condition {pattern['type']}"
    return None


def _container_statuses(pod: Object) -> list[Json]:
    status = pod["status"]
    return [*(status.get("containerStatuses") or ()), *(status.get("initContainerStatuses") or ())]


def _condition(conditions: Iterable[Json], kind: str) -> Json | None:
    """Return the condition of this type if it is true."""
    return next((c for c in conditions if c["type"] == kind and c["status"] == "True"), None)


def _advancement(pod: Object) -> tuple[bool, bool, bool]:
    """Return the key by which the controller chooses pods to delete: the least advanced first."""
    phase = pod["status"].get("phase")
    return bool(pod["spec"].get("nodeName")), phase == "Running", has_condition(pod, "Ready")


def _has_index_below(pod: Object, completions: int) -> bool:
    index = completion_index(pod)
    return index is not None and index < completions


def _is_tracked(pod: Object) -> bool:
    return JOB_TRACKING_FINALIZER in (pod["metadata"].get("finalizers") or ())


def _is_finished(pod: Object) -> bool:
    return pod["status"].get("phase") in ("Succeeded", "Failed")


def _is_deleted(pod: Object) -> bool:
    return pod["metadata"].get("deletionTimestamp") is not None


def _name(pod: Object) -> str:
    return str(pod["metadata"]["name"])


def _qualified_name(pod: Object) -> str:
    return f"{pod['metadata']['namespace']}/{_name(pod)}"

"""What Kubernetes' Job controller decides for an Indexed Job, as a pure function over plain objects.

The local cluster and the stand-in API server of the tests both use it, so that one reading of the Job controller serves
wherever no real one runs; ``tests/contract`` holds it against recordings of a real one (1.36). A caller applies one
decision and asks again until a decision changes nothing: like the real controller, it never finishes a Job in the pass
that sees the reason.

Left out on purpose: the growth of the back-off between failures, ``backoffLimitPerIndex``,
``activeDeadlineSeconds``, ``ttlSecondsAfterFinished`` and non-Indexed Jobs. The operator uses none.
"""

from collections.abc import Iterable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from ddp_operator.cluster import Object
from ddp_operator.constants import ANNOTATION_COMPLETION_INDEX, JOB_TRACKING_FINALIZER
from ddp_operator.kubeobjects import format_time

Json = dict[str, Any]

SUCCESS_POLICY: Final = ("SuccessPolicy", "Matched rules at index 0")
COMPLETIONS_REACHED: Final = ("CompletionsReached", "Reached expected number of succeeded pods")


@dataclass(frozen=True, slots=True)
class JobDecision:
    """What to do about one Job now, in this order: write the status, release, delete, create."""

    status: Json
    release: tuple[str, ...] = ()
    """Names of pods that the status has now counted: remove their tracking finalizer."""
    delete: tuple[str, ...] = ()
    """Names of pods to delete, with their grace time."""
    create: tuple[int, ...] = ()
    """Completion indexes that need a pod, ascending."""
    retry_after: float | None = None
    """Seconds after which indexes that wait for the back-off may get their pods."""

    def changes(self, job: Object) -> bool:
        """Say whether applying this to ``job`` does anything."""
        return bool(self.release or self.delete or self.create) or self.status != job.get("status", {})


def decide_job(job: Object, pods: Iterable[Object], now: datetime, *, backoff: float = 0) -> JobDecision:
    """Decide for one Job from all its pods; pods that another Job controls are ignored.

    ``backoff``: seconds after a pod's failure in which no pod is created.
    """
    spec = job["spec"]
    status: Json = deepcopy(dict(job.get("status") or {}))
    conditions: list[Json] = status.setdefault("conditions", [])
    mine = sorted((p for p in pods if is_controlled_by(p, job["metadata"]["uid"])), key=lambda p: p["metadata"]["name"])
    stamp = format_time(now)
    deleting = job["metadata"].get("deletionTimestamp") is not None
    if has_condition(job, "Complete") or has_condition(job, "Failed") or deleting:
        release = tuple(_name(p) for p in mine if _is_tracked(p) and (deleting or _is_finished(p)))
        return JobDecision(status=dict(job.get("status") or {}), release=release)

    suspended = bool(spec.get("suspend"))
    if not suspended and "startTime" not in status:
        status["startTime"] = stamp
    completions = int(spec["completions"])
    unfinished = [p for p in mine if not _is_finished(p)]
    active = [p for p in unfinished if p["metadata"].get("deletionTimestamp") is None]
    terminating = [p for p in unfinished if p["metadata"].get("deletionTimestamp") is not None]

    release, newly_failed, succeeded = _count(job, mine, completions)
    status["failed"] = int(status.get("failed", 0)) + newly_failed
    status["succeeded"] = len(succeeded)
    status["completedIndexes"] = format_indexes(succeeded)

    delete: list[Object] = []
    create: tuple[int, ...] = ()
    target = _condition(conditions, "FailureTarget")
    if target is None and _condition(conditions, "SuccessCriteriaMet") is None:
        message = _fail_job_message(spec, mine)
        if message is not None:
            target = _set(conditions, "FailureTarget", "True", "PodFailurePolicy", message, stamp)
            delete = active
        elif newly_failed and status["failed"] > int(spec.get("backoffLimit", 6)):
            words = "Job has reached the specified backoff limit"
            target = _set(conditions, "FailureTarget", "True", "BackoffLimitExceeded", words, stamp)
            delete = active
        elif len(succeeded) >= completions or _meets_success_policy(spec, succeeded):
            # Checked before ``active``: an elastic Job may shrink while pods beyond its new size still run.
            reached = len(succeeded) >= completions
            why = COMPLETIONS_REACHED if reached else SUCCESS_POLICY
            _set(conditions, "SuccessCriteriaMet", "True", *why, stamp)
            delete = active
        elif suspended:
            if _set(conditions, "Suspended", "True", "JobSuspended", "Job suspended", stamp) is not None:
                status.pop("startTime", None)
            delete = active
        else:
            if _set(conditions, "Suspended", "False", "JobResumed", "Job resumed", stamp) is not None:
                status["startTime"] = stamp
            delete, create = _scale(spec, active, terminating, succeeded, completions)
            retry_after = _backoff_left(mine, backoff, now) if create else None
            if retry_after is not None:  # a failure is counted, and its pod let go, once there is another pod
                return JobDecision(status=dict(job.get("status") or {}), retry_after=retry_after)
    else:
        delete = active
        if not active and not terminating:
            _finish(status, conditions, target, stamp)

    # A pod that is deleted here is let go at once; where the Job fails, all that have not ended count as failed.
    ends = target or _condition(conditions, "SuccessCriteriaMet")
    let_go = [p for p in (*delete, *(terminating if ends else ())) if _is_tracked(p)]
    if target is not None:
        status["failed"] += sum(_has_index_below(p, completions) for p in let_go)
    left = [p for p in active if p not in delete]
    status["active"] = len(left) + len(create)
    status["ready"] = sum(has_condition(p, "Ready") for p in left)
    status["terminating"] = len(terminating) + len(delete)
    if not conditions:
        del status["conditions"]
    names = tuple(_name(p) for p in delete)
    return JobDecision(status=status, release=(*release, *map(_name, let_go)), delete=names, create=create)


def completion_index(pod: Object) -> int | None:
    """Return a pod's completion index, or None where it carries none that is a number."""
    text = (pod["metadata"].get("annotations") or {}).get(ANNOTATION_COMPLETION_INDEX, "")
    return int(text) if text.isascii() and text.isdigit() else None


def is_controlled_by(child: Object, uid: str) -> bool:
    """Say whether the object's controlling owner has this UID."""
    return any(o.get("controller") and o.get("uid") == uid for o in child["metadata"].get("ownerReferences") or ())


def has_condition(item: Object, kind: str) -> bool:
    """Say whether a condition of this type is true."""
    conditions = (item.get("status") or {}).get("conditions") or ()
    return any(c["type"] == kind and c["status"] == "True" for c in conditions)


def format_indexes(indexes: Iterable[int]) -> str:
    """Write indexes as the Job's status does: ``0-2,5,6``."""
    runs: list[list[int]] = []
    for index in sorted(indexes):
        if runs and index == runs[-1][1] + 1:
            runs[-1][1] = index
        else:
            runs.append([index, index])
    return ",".join(f"{a}" if a == b else f"{a},{b}" if b - a == 1 else f"{a}-{b}" for a, b in runs)


def parse_indexes(text: str) -> set[int]:
    """Read ``0-2,5`` back."""
    found: set[int] = set()
    for run in filter(None, text.split(",")):
        first, _, last = run.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return found


def _count(job: Object, pods: Sequence[Object], completions: int) -> tuple[tuple[str, ...], int, set[int]]:
    """Count finished pods that were not counted yet: (pods to release, new failures, completed indexes)."""
    policy = job["spec"].get("podFailurePolicy")
    succeeded = parse_indexes((job.get("status") or {}).get("completedIndexes", ""))
    release, failed = [], 0
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
    """Return (pods to delete, indexes to create); as in the real controller never both in one pass."""
    wanted = min(int(spec.get("parallelism", 1)), completions - len(succeeded))
    surplus: list[Object] = []
    kept: dict[int, Object] = {}
    for pod in sorted(active, key=_worth, reverse=True):
        index = completion_index(pod)
        if index is None or index >= completions or index in kept:
            surplus.append(pod)
        else:
            kept[index] = pod
    while len(kept) > wanted:
        victim = min(kept, key=lambda index: (_worth(kept[index]), -index))
        surplus.append(kept.pop(victim))
    if surplus:
        return surplus, ()
    taken = succeeded | set(kept)
    room = wanted - len(kept)
    if spec.get("podFailurePolicy") or spec.get("podReplacementPolicy") == "Failed":
        taken |= {index for pod in terminating if (index := completion_index(pod)) is not None}
        room -= len(terminating)
    pending = [index for index in range(completions) if index not in taken]
    return [], tuple(pending[: max(room, 0)])


def _meets_success_policy(spec: Object, succeeded: set[int]) -> bool:
    """Tell whether all indexes that a rule names have succeeded (rules by a mere count are not used here)."""
    rules = (spec.get("successPolicy") or {}).get("rules") or ()
    return any(parse_indexes(rule["succeededIndexes"]) <= succeeded for rule in rules)


def _backoff_left(pods: Sequence[Object], backoff: float, now: datetime) -> float | None:
    """Return the seconds left of the back-off that began with the latest failure of a pod that is still listed.

    A success since then has ended it.
    """
    failed, succeeded = (max(_ends(pods, phase), default=0.0) for phase in ("Failed", "Succeeded"))
    left = failed + backoff - now.timestamp() if failed > succeeded else 0.0
    # More than the whole of it is left where the clock was set back since.
    return left if 0 < left <= backoff else None


def _ends(pods: Sequence[Object], phase: str) -> Iterator[float]:
    """Yield when the containers of pods in this phase ended (Unix time)."""
    for container in (one for pod in pods if pod["status"].get("phase") == phase for one in _container_statuses(pod)):
        terminated = (container.get("state") or {}).get("terminated") or {}
        if terminated.get("finishedAt"):
            yield datetime.fromisoformat(terminated["finishedAt"]).timestamp()


def _fail_job_message(spec: Object, pods: Sequence[Object]) -> str | None:
    failed = [pod for pod in pods if pod["status"].get("phase") == "Failed"]
    found = (_match_policy(spec.get("podFailurePolicy") or {}, pod) for pod in failed)
    return next((message for action, message in found if action == "FailJob"), None)


def _match_policy(policy: Object, pod: Object) -> tuple[str | None, str]:
    """Return the first matching rule's action and the message with which it fails a Job."""
    where = f"{pod['metadata']['namespace']}/{_name(pod)}"
    for number, rule in enumerate(policy.get("rules", ())):
        action = rule["action"]
        if codes := rule.get("onExitCodes"):
            for container in _container_statuses(pod):
                code = ((container.get("state") or {}).get("terminated") or {}).get("exitCode", 0)
                named = codes.get("containerName") in (None, container["name"])
                if code != 0 and named and (code in codes["values"]) == (codes["operator"] == "In"):
                    words = f"Container {container['name']} for pod {where} failed with exit code {code}"
                    return action, f"{words} matching {action} rule at index {number}"
        else:
            for wanted in rule.get("onPodConditions", ()):
                for condition in pod["status"].get("conditions") or ():
                    if (condition["type"], condition["status"]) == (wanted["type"], wanted.get("status", "True")):
                        words = f"Pod {where} has condition {condition['type']}"
                        return action, f"{words} matching {action} rule at index {number}"
    return None, ""


def _container_statuses(pod: Object) -> list[Json]:
    status = pod["status"]
    return [*(status.get("containerStatuses") or ()), *(status.get("initContainerStatuses") or ())]


def _finish(status: Json, conditions: list[Json], target: Json | None, stamp: str) -> None:
    (met,) = [target] if target else [c for c in conditions if c["type"] == "SuccessCriteriaMet"]
    _set(conditions, "Failed" if target else "Complete", "True", met["reason"], met["message"], stamp)
    if not target:
        status["completionTime"] = stamp


def _condition(conditions: Sequence[Json], kind: str) -> Json | None:
    return next((c for c in conditions if c["type"] == kind and c["status"] == "True"), None)


def _set(conditions: list[Json], kind: str, value: str, reason: str, message: str, stamp: str) -> Json | None:
    """Set a condition and return it, or None where it was so already. A false one is never added anew."""
    old = next((c for c in conditions if c["type"] == kind), None)
    if (old["status"] if old else "False") == value:
        return None
    times = {"lastProbeTime": stamp, "lastTransitionTime": stamp}
    new = {"type": kind, "status": value, "reason": reason, "message": message, **times}
    if old is not None:
        conditions.remove(old)
    conditions.append(new)
    return new


def _worth(pod: Object) -> tuple[bool, bool, bool]:
    """Order pods as the controller does when some must go: the least advanced one goes first."""
    phase = pod["status"].get("phase")
    return bool(pod["spec"].get("nodeName")), phase == "Running", has_condition(pod, "Ready")


def _has_index_below(pod: Object, completions: int) -> bool:
    index = completion_index(pod)
    return index is not None and index < completions


def _is_tracked(pod: Object) -> bool:
    return JOB_TRACKING_FINALIZER in (pod["metadata"].get("finalizers") or ())


def _is_finished(pod: Object) -> bool:
    return pod["status"].get("phase") in ("Succeeded", "Failed")


def _name(pod: Object) -> str:
    return str(pod["metadata"]["name"])

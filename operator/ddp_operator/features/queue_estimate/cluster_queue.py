"""A ClusterQueue of Kueue as typed values: its Workloads and their order, its quotas, and what fits. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from math import inf
from typing import Any

from ddp_operator.api.kubeobjects import EPOCH, parse_quantity, parse_time
from ddp_operator.api.status import Status

FlavorResource = tuple[str, str]
Taken = tuple[tuple[FlavorResource, float], ...]
"""Amounts of quota."""
Choices = tuple[tuple[Taken, ...], ...]
"""What a request takes: for each group of resources, the amounts in each of its flavors."""


@dataclass(frozen=True, slots=True)
class QueuedWorkload:
    """The fields of a Workload that matter to its queue."""

    uid: str
    local_queue: tuple[str, str]
    """Namespace and name."""
    job_name: str
    priority: int
    created: datetime
    request: Mapping[str, float]
    """By resource, of the fewest pods that may start."""
    usage: Taken
    """Reserved quota."""
    cluster_queue: str
    """Where quota is reserved; empty: nowhere."""
    admitted: datetime | None
    finished: datetime | None
    seconds_limit: float
    active: bool


def parse_workload(item: Mapping[str, Any]) -> QueuedWorkload:
    """Return the fields of a Workload of v1beta1 or v1beta2."""
    meta = item["metadata"]
    spec = item.get("spec") or {}
    status = item.get("status") or {}
    times = {
        (condition["type"], condition.get("reason")): parse_time(condition.get("lastTransitionTime"))
        for condition in status.get("conditions") or ()
        if condition.get("status") == "True"
    }
    by_type = {kind: time for (kind, _), time in times.items()}
    # Kueue moves a Workload to the end of the queue after these evictions.
    moved = times.get(("Evicted", "PodsReadyTimeout")) or times.get(("Evicted", "AdmissionCheck"))
    admission = status.get("admission") or {}
    return QueuedWorkload(
        uid=str(meta["uid"]),
        local_queue=(str(meta["namespace"]), str(spec.get("queueName") or "")),
        job_name=str((meta.get("ownerReferences") or [{}])[0].get("name")),
        priority=int(spec.get("priority") or 0),
        created=moved or parse_time(meta.get("creationTimestamp")) or EPOCH,
        request=_sum_requests(spec.get("podSets") or ()),
        usage=tuple(
            ((str((assignment.get("flavors") or {}).get(name)), name), amount)
            for assignment in admission.get("podSetAssignments") or ()
            for name, amount in _parse_amounts(assignment.get("resourceUsage"))
        ),
        cluster_queue=str(admission.get("clusterQueue") or ""),
        admitted=by_type.get("QuotaReserved"),
        finished=by_type.get("Finished"),
        seconds_limit=float(spec.get("maximumExecutionTimeSeconds") or inf),
        active=spec.get("active") is not False,
    )


def _sum_requests(pod_sets: Iterable[Mapping[str, Any]]) -> Mapping[str, float]:
    """Return the requests of all pods: of their containers and sidecars, or of the pod where it has its own."""
    total: dict[str, float] = {}
    for pod_set in pod_sets:
        pod = (pod_set.get("template") or {}).get("spec") or {}
        count = pod_set.get("minCount") or pod_set.get("count") or 0
        requests = {"pods": 1.0}
        sidecars = [container for container in pod.get("initContainers") or () if container.get("restartPolicy")]
        for container in (*sidecars, *(pod.get("containers") or ())):
            for name, amount in _parse_requests(container):
                requests[name] = requests.get(name, 0.0) + amount
        requests |= dict(_parse_requests(pod))
        for name, amount in requests.items():
            total[name] = total.get(name, 0.0) + count * amount
    return total


def _parse_requests(owner: Mapping[str, Any]) -> list[tuple[str, float]]:
    """Return the requests of a container or pod. A Workload has the Job's limits, which Kueue takes for requests."""
    resources = owner.get("resources") or {}
    return _parse_amounts({**(resources.get("limits") or {}), **(resources.get("requests") or {})})


def _parse_amounts(amounts: Mapping[str, Any] | None) -> list[tuple[str, float]]:
    return [(str(name), float(parse_quantity(amount) or 0)) for name, amount in (amounts or {}).items()]


class Quotas:
    """The quotas of a ClusterQueue."""

    def __init__(self, cluster_queue: Mapping[str, Any]) -> None:
        spec = cluster_queue.get("spec") or {}
        self.is_strict = spec.get("queueingStrategy") == "StrictFIFO"
        self.has_cohort = bool(spec.get("cohortName") or spec.get("cohort"))
        self.nominal: dict[FlavorResource, float] = {}
        self.limits: dict[FlavorResource, float] = {}
        """With what may be borrowed."""
        self._groups: list[list[list[FlavorResource]]] = []
        for group in spec.get("resourceGroups") or ():
            self._groups.append([self._add_flavor(flavor) for flavor in group.get("flavors") or ()])

    def _add_flavor(self, flavor: Mapping[str, Any]) -> list[FlavorResource]:
        keys = []
        for resource in flavor.get("resources") or ():
            key = (str(flavor.get("name")), str(resource.get("name")))
            self.nominal[key] = float(parse_quantity(resource.get("nominalQuota")) or 0)
            borrowed = parse_quantity(resource.get("borrowingLimit", "0" if not self.has_cohort else None))
            self.limits[key] = inf if borrowed is None else self.nominal[key] + float(borrowed)
            keys.append(key)
        return keys

    def list_choices(self, request: Mapping[str, float]) -> Choices:
        """Return what a request takes of each flavor."""
        return tuple(
            tuple(tuple((key, request[key[1]]) for key in flavor if request.get(key[1])) for flavor in flavors)
            for flavors in self._groups
        )

    def find_lacking(self, request: Mapping[str, float], free: Mapping[FlavorResource, float]) -> str:
        """Return the first resource of which no flavor has enough; empty: each has one that has."""
        for resource, amount in request.items():
            available = [free[key] for key in self.nominal if key[1] == resource]
            if available and amount > max(available):
                return f"{resource}: {amount:g} > {max(0.0, *available):g}"
        return ""


def assign(choices: Choices, free: Mapping[FlavorResource, float]) -> Taken | None:
    """Return the quota that a request takes: of each group the first flavor that has enough. None: none has."""
    taken: Taken = ()
    for flavors in choices:
        for needed in flavors:
            for key, amount in needed:
                if amount > free[key]:
                    break
            else:
                taken += needed
                break
        else:
            return None
    return taken


@dataclass(frozen=True, slots=True)
class QueueContents:
    """A ClusterQueue, as read at ``time``."""

    name: str
    workloads: Sequence[QueuedWorkload]
    training: Mapping[str, Status]
    """The statuses of training jobs that run or have ended, by the UIDs of their Workloads."""
    time: datetime

    def list_pending(self) -> list[QueuedWorkload]:
        """Return the Workloads without quota in the order in which Kueue admits them."""
        waiting = [item for item in self.workloads if item.active and not item.cluster_queue and not item.finished]
        return sorted(waiting, key=lambda item: (-item.priority, item.created, item.uid))

    def compute_free(self, quotas: Quotas) -> dict[FlavorResource, float]:
        """Return the nominal quota that no Workload has reserved."""
        free = dict(quotas.nominal)
        for item in self.workloads:
            for key, amount in () if item.finished else item.usage:
                free[key] = free.get(key, 0.0) - amount
        return free

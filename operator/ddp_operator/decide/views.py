"""Jobs, pods and nodes, reduced to what decisions depend on. ``reading/objects`` builds these views. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from typing import Any

from ddp_operator.api import constants
from ddp_operator.api.status import Nodes
from ddp_operator.decide.failures import Termination

_MAX_INT = 2**31 - 1
UNSEEN = "EndUnseen"
"""The disruption of a pod whose end nobody has seen."""


@dataclass(frozen=True, slots=True)
class JobView:
    """One child Job."""

    name: str
    uid: str
    attempt: int
    nodes: int
    suspended: bool
    complete: bool
    failed: bool
    failed_message: str
    failed_at: datetime | None
    deleting: bool
    launcher: str = ""
    """Name of the ConfigMap that its pods mount the launcher from."""
    secret: str = ""
    """Name of the Secret of its pods' rendezvous."""
    ignored_since: datetime | None = None
    """Since when the Job controller has not acted on it."""
    suspend_written: bool | None = None
    """The ``spec.suspend`` that the operator wrote last; None: created by an older operator without this record."""
    queue: str = ""
    """The LocalQueue in its label, which Kueue adds in a namespace with a default queue."""
    admitted: bool = False
    """Whether Kueue has marked its pod template as admitted, also without the label."""
    takes_slices: bool = False
    """Whether the Job is elastic in Kueue: running pods continue while additional pods wait for quota."""
    started: datetime | None = None
    """When the Job controller last started it; None while it is suspended."""
    suspend_changed: datetime | None = None
    """When the Job controller last suspended or resumed it."""
    ganged: bool = False
    """Whether its template names a Kubernetes gang, to which each of its pods then belongs, whoever creates it."""
    spec_digest: str = ""
    """Digest of the spec that it was built from; empty: an older operator created it."""
    raw: Mapping[str, Any] = field(default_factory=dict)

    @property
    def finished(self) -> bool:
        """True if the Job controller creates no more pods for it."""
        return self.complete or self.failed


@dataclass(frozen=True, slots=True)
class PodView:
    """One pod of an attempt."""

    name: str
    uid: str
    attempt: int
    index: int
    created: datetime
    phase: str
    ready: bool
    deleting: bool
    node_name: str
    scheduled: bool
    started: datetime | None
    disrupted: bool
    waiting_reason: str
    waiting_message: str
    termination: Termination | None
    trained: bool
    raw: Mapping[str, Any]
    disruption: str = ""
    disruption_message: str = ""
    deleted_at: datetime | None = None
    grace_ends: datetime | None = None
    unready_since: datetime | None = None
    cut_off_since: datetime | None = None
    """Since when the node controller marks it as not ready because its kubelet does not report."""
    unscheduled_since: datetime | None = None
    ignored_since: datetime | None = None
    """Since when no scheduler has acted on it."""

    @property
    def address(self) -> str:
        """Its IP address; empty if it has none yet."""
        return str((self.raw.get("status") or {}).get("podIP") or "")

    @property
    def scheduler(self) -> str:
        """The name of its scheduler."""
        return (self.raw.get("spec") or {}).get("schedulerName") or "default-scheduler"

    @property
    def alive(self) -> bool:
        """True while a process of it may run."""
        return self.phase not in ("Succeeded", "Failed")

    @property
    def running(self) -> bool:
        """True while its containers run and it is not being deleted."""
        return self.phase == "Running" and not self.deleting

    @property
    def has_finished_training(self) -> bool:
        """Whether its training container has ended with exit code 0; other containers may still run."""
        return self.trained and self.termination is not None and self.termination.container_exit_code == 0

    @property
    def ganged(self) -> bool:
        """Whether it is part of a Kubernetes gang, so its Job cannot be resized."""
        return bool((self.raw.get("spec") or {}).get("schedulingGroup"))

    @property
    def avoided_nodes(self) -> tuple[str, ...]:
        """The failed nodes on which it must not run: see ``manifests.pod``."""
        affinity = (self.raw.get("spec") or {}).get("affinity") or {}
        required = (affinity.get("nodeAffinity") or {}).get("requiredDuringSchedulingIgnoredDuringExecution") or {}
        nodes: dict[str, None] = {}
        for term in required.get("nodeSelectorTerms") or ():
            for selector in term.get("matchFields") or ():
                if (selector.get("key"), selector.get("operator")) == ("metadata.name", "NotIn"):
                    nodes |= dict.fromkeys(map(str, selector.get("values") or ()))
        return tuple(nodes)

    @property
    def has_run(self) -> bool:
        """True if a kubelet has started it, so its peers depend on it. A pod that fetches inputs has no peers."""
        return self.attempt > 0 and self.started is not None and self.phase != "Pending"

    @property
    def fails_job(self) -> bool:
        """True if the Job's podFailurePolicy fails the Job for its end: see ``manifests.children``."""
        code = self.termination.container_exit_code if self.termination else constants.EXIT_OK
        replaced = code == constants.EXIT_OK or code in constants.REPLACED_EXIT_CODES
        return self.trained and not replaced and not self.disrupted


class Pods(tuple[PodView, ...]):
    """The pods of one attempt by index; a replaced pod precedes its successor."""

    @cached_property
    def newest(self) -> Mapping[int, PodView]:
        """One pod per index: the newest relevant one of a replaced pod and its successors."""
        ordered = sorted(self, key=lambda pod: (pod.index, pod.alive, pod.phase == "Succeeded", pod.created, pod.name))
        return {pod.index: pod for pod in ordered}

    @property
    def running(self) -> int:
        """Number of newest pods that run."""
        return sum(pod.running for pod in self.newest.values())

    @property
    def scheduled(self) -> int:
        """Number of newest pods that have a node, or have ended."""
        return sum(pod.scheduled or not pod.alive for pod in self.newest.values())

    @property
    def has_finished_training(self) -> bool:
        """Whether all training containers have ended with exit code 0; containers beside them may still run."""
        return bool(self) and all(pod.has_finished_training for pod in self.newest.values())

    def counts(self, desired: int) -> Nodes:
        """Return ``status.nodes``."""
        newest = self.newest.values()
        ready = sum(pod.running and pod.ready for pod in newest)
        succeeded = min(desired, sum(pod.phase == "Succeeded" for pod in newest))
        return Nodes(
            desired=desired,
            ready=min(ready, desired - succeeded),
            spares=max(0, ready + succeeded - desired),
            succeeded=succeeded,
            failed=sum(pod.phase == "Failed" for pod in newest),
        )


@dataclass(frozen=True, slots=True)
class NodeView:
    """A Kubernetes node with a pod that does not report. ``ready``: None if the operator may not read nodes."""

    ready: bool | None
    message: str


def is_taken_away(raw: Mapping[str, Any]) -> bool:
    """Return whether a pod was deleted or evicted, or ended with its node."""
    has_reason = bool((raw.get("status") or {}).get("reason"))
    return has_reason or is_disrupted(raw) or "deletionTimestamp" in (raw.get("metadata") or {})


def is_disrupted(raw: Mapping[str, Any]) -> bool:
    """Return whether a pod was deleted or evicted for the sake of others, or with its node."""
    conditions = (raw.get("status") or {}).get("conditions") or []
    return any(condition.get("type") == "DisruptionTarget" for condition in conditions)


def list_sidecars(raw: Mapping[str, Any]) -> frozenset[str]:
    """Return the names of the native sidecars: init containers that are always restarted."""
    containers = (raw.get("spec") or {}).get("initContainers") or []
    return frozenset(str(item.get("name")) for item in containers if item.get("restartPolicy") == "Always")


def read_int(value: Any) -> int:
    """Return a number of another component, within 32 bits; 0 if it is none."""
    try:
        return max(-_MAX_INT, min(_MAX_INT, int(value)))
    except (TypeError, ValueError, OverflowError):
        return 0

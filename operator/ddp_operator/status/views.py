"""Jobs, pods and nodes of the Kubernetes API as the few facts that decisions rest on."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from ddp_operator import constants
from ddp_operator.failures import KubeletEvidence, Termination, parse_termination
from ddp_operator.kubeobjects import EPOCH, find_trainer, parse_time, scheduling_gates

_PULL_REASONS = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "RegistryUnavailable")
# The kubelet says the same about a try and about the pause before the next one, but for this beginning.
_BACK_OFF = re.compile(r'^Back-off pulling image "[^"]*": (?:\w+: )?')

_MAX_WORDS = 512
_EVICTED = "Evicted"
_EXIT_KILLED = 137  # assumed where no container is reported


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
    ignored_since: datetime | None = None
    """Since when it waits for a first word of the Job controller."""
    suspend_written: bool | None = None
    """What the operator has last written into its ``spec.suspend``; None: an older operator made it, which kept no
    record."""
    queue: str = ""
    """The LocalQueue that its label names; Kueue adds that label in a namespace with a default queue."""
    admitted: bool = False
    """Whether Kueue has marked its pod template as admitted, which it also does to a Job without the label."""
    takes_slices: bool = False
    """Whether Kueue holds back more pods until they have quota and leaves those that run alone (an elastic Job)."""
    started: datetime | None = None
    """When it was last allowed to run, by the Job controller; None while it is suspended."""
    suspend_changed: datetime | None = None
    """When it was last suspended or resumed, by the Job controller."""
    spec_digest: str = ""
    """Of the fields of the spec that it was built from; empty: an older operator made it."""
    raw: Mapping[str, Any] = field(default_factory=dict)

    @property
    def finished(self) -> bool:
        """True once the Job controller starts no more pods for it."""
        return self.complete or self.failed


class RestartedSidecar(NamedTuple):
    """A native sidecar that was restarted. ``reason``: why it ended last."""

    name: str
    restarts: int
    reason: str


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
    """Since when the node controller holds it for not ready because its kubelet is silent."""
    unscheduled_since: datetime | None = None
    ignored_since: datetime | None = None
    """Since when it waits for a first word of a scheduler."""

    @property
    def scheduler(self) -> str:
        """Who is to place it."""
        return (self.raw.get("spec") or {}).get("schedulerName") or "default-scheduler"

    @property
    def restarted_sidecars(self) -> tuple[RestartedSidecar, ...]:
        """The native sidecars that were restarted."""
        sidecars = _sidecars(self.raw)
        restarted = []
        for container in (self.raw.get("status") or {}).get("initContainerStatuses") or ():
            restarts = _int(container.get("restartCount"))
            if restarts > 0 and container.get("name") in sidecars:
                ended = (container.get("lastState") or {}).get("terminated") or {}
                restarted.append(RestartedSidecar(container["name"], restarts, str(ended.get("reason") or "")))
        return tuple(restarted)

    @property
    def alive(self) -> bool:
        """True while a process of it may run."""
        return self.phase not in ("Succeeded", "Failed")

    @property
    def running(self) -> bool:
        """True while its containers run and nobody has deleted it."""
        return self.phase == "Running" and not self.deleting

    @property
    def ganged(self) -> bool:
        """Whether Kubernetes' own gang scheduling has placed it: its Job cannot be given another size then."""
        return bool((self.raw.get("spec") or {}).get("schedulingGroup"))

    @property
    def avoids_nodes(self) -> bool:
        """True where the operator has kept it off nodes that failed: see ``manifests.pod``."""
        affinity = (self.raw.get("spec") or {}).get("affinity") or {}
        required = (affinity.get("nodeAffinity") or {}).get("requiredDuringSchedulingIgnoredDuringExecution") or {}
        fields = [field for term in required.get("nodeSelectorTerms") or [] for field in term.get("matchFields") or []]
        return any((field.get("key"), field.get("operator")) == ("metadata.name", "NotIn") for field in fields)

    @property
    def has_run(self) -> bool:
        """True once a kubelet has taken it: its end takes something from its peers. One that fetches has none."""
        return self.attempt > 0 and self.started is not None and self.phase != "Pending"

    @property
    def fails_job(self) -> bool:
        """True where the Job's podFailurePolicy answers its end by failing the Job: see ``manifests.children``."""
        code = self.termination.container_exit_code if self.termination else constants.EXIT_OK
        replaced = code == constants.EXIT_OK or code in constants.REPLACED_EXIT_CODES
        return self.trained and not replaced and not self.disrupted


@dataclass(frozen=True, slots=True)
class NodeView:
    """A Kubernetes node that a pod in doubt runs on. ``ready`` is None where the operator may not read nodes."""

    ready: bool | None
    message: str


def view_job(raw: Mapping[str, Any]) -> JobView:
    """Return a Job's view."""
    metadata, spec = raw.get("metadata") or {}, raw.get("spec") or {}
    conditions = {
        c.get("type"): c for c in (raw.get("status") or {}).get("conditions") or [] if c.get("status") == "True"
    }
    # FailureTarget and SuccessCriteriaMet say that the Job controller has decided; Failed and Complete follow only
    # when the last pod is gone, which may take a whole grace time.
    decided = conditions.get("FailureTarget")
    failed = conditions.get("Failed") or decided
    template, status = spec.get("template") or {}, raw.get("status") or {}
    volumes = (template.get("spec") or {}).get("volumes") or ()
    suspended: Mapping[str, Any] = next((c for c in status.get("conditions") or [] if c.get("type") == "Suspended"), {})
    # The time of the start is renewed together with the condition, after the Job was resumed.
    runs = not spec.get("suspend") and suspended.get("status") != "True"
    annotations = metadata.get("annotations") or {}
    written = annotations.get(constants.ANNOTATION_SUSPEND)
    return JobView(
        name=metadata.get("name", ""),
        uid=metadata.get("uid", ""),
        attempt=_int(_labels(raw).get(constants.LABEL_ATTEMPT)),
        nodes=_int(spec.get("completions")),
        suspended=bool(spec.get("suspend")),
        complete="Complete" in conditions or "SuccessCriteriaMet" in conditions,
        failed=failed is not None,
        failed_message=str((failed or {}).get("message") or ""),
        # What the Job controller deletes after its decision was not taken away before.
        failed_at=parse_time((decided or failed or {}).get("lastTransitionTime")),
        deleting="deletionTimestamp" in metadata,
        launcher=next((str(v["configMap"].get("name")) for v in volumes if v["name"] == constants.LAUNCHER_VOLUME), ""),
        ignored_since=None if raw.get("status") else parse_time(metadata.get("creationTimestamp")),
        suspend_written=None if written is None else written == "true",
        queue=_labels(raw).get(constants.KUEUE_QUEUE_LABEL, ""),
        admitted=constants.KUEUE_PODSET_LABEL in ((template.get("metadata") or {}).get("labels") or {}),
        takes_slices=constants.KUEUE_ELASTIC_GATE in scheduling_gates(template)
        and constants.KUEUE_MIN_PARALLELISM not in annotations,
        started=parse_time(status.get("startTime")) if runs else None,
        suspend_changed=parse_time(suspended.get("lastTransitionTime")),
        spec_digest=str(annotations.get(constants.ANNOTATION_SPEC) or ""),
        raw=raw,
    )


def view_pod(raw: Mapping[str, Any]) -> PodView:
    """Return a pod's view."""
    metadata, status = raw.get("metadata") or {}, raw.get("status") or {}
    conditions = {c.get("type"): c for c in status.get("conditions") or []}
    node_name = (raw.get("spec") or {}).get("nodeName") or ""
    # A scheduler that lost a race for the pod may leave its complaint behind: what has a node is placed.
    scheduled = {} if node_name else conditions.get("PodScheduled") or {}
    # What a sidecar waits for keeps a training container that runs from nothing.
    trains = _trainer_state(raw).get("running") is not None
    waiting_reason, waiting_message = ("", "") if trains else _waiting(status, scheduled)
    index = (metadata.get("annotations") or {}).get(constants.ANNOTATION_COMPLETION_INDEX)
    disruption, ready = conditions.get("DisruptionTarget") or {}, conditions.get("Ready") or {}
    unready_since = parse_time(ready.get("lastTransitionTime")) if ready.get("status") == "False" else None
    # The kubelet takes both conditions away together, the node controller of a silent node only Ready.
    containers_ready = (conditions.get("ContainersReady") or {}).get("status") == "True"
    cut_off = containers_ready and ready.get("reason") != "ReadinessGatesNotReady"
    grace_ends = parse_time(metadata.get("deletionTimestamp"))
    grace = timedelta(seconds=max(0, _int(metadata.get("deletionGracePeriodSeconds"))))
    return PodView(
        name=metadata.get("name", ""),
        uid=metadata.get("uid", ""),
        attempt=_int(_labels(raw).get(constants.LABEL_ATTEMPT)),
        index=_int(index),
        created=parse_time(metadata.get("creationTimestamp")) or EPOCH,
        phase=status.get("phase") or "Pending",
        ready=ready.get("status") == "True",
        deleting="deletionTimestamp" in metadata,
        node_name=node_name,
        scheduled=bool(node_name) or scheduled.get("status") == "True",
        started=parse_time(status.get("startTime")),
        disrupted=disruption.get("status") == "True",
        waiting_reason=waiting_reason,
        waiting_message=waiting_message,
        termination=_read_end(raw),
        trained=bool(_trainer_state(raw).get("terminated")),
        raw=raw,
        disruption=str(disruption.get("reason") or ""),
        disruption_message=str(disruption.get("message") or "")[:_MAX_WORDS],
        # The time stamp is that of the end of the grace time.
        deleted_at=None if grace_ends is None else grace_ends - grace,
        grace_ends=grace_ends,
        unready_since=unready_since,
        cut_off_since=unready_since if cut_off else None,
        unscheduled_since=parse_time(scheduled.get("lastTransitionTime"))
        if scheduled.get("status") == "False"
        else None,
        ignored_since=None if node_name or scheduled else parse_time(metadata.get("creationTimestamp")),
    )


def view_node(raw: Mapping[str, Any] | None) -> NodeView:
    """Return a node's view; None: it is gone."""
    if raw is None:
        return NodeView(False, "the node is gone")
    conditions = (raw.get("status") or {}).get("conditions") or []
    ready: Mapping[str, Any] = next((c for c in conditions if c.get("type") == "Ready"), {})
    if ready.get("status") == "True":
        return NodeView(True, "")
    message = str(ready.get("message") or ready.get("reason") or "its kubelet has not reported Ready")
    return NodeView(False, f"the node is not ready: {message}"[:_MAX_WORDS])


def _waiting(status: Mapping[str, Any], scheduled: Mapping[str, Any]) -> tuple[str, str]:
    """Return why a pod does not start, in the scheduler's or the kubelet's own message."""
    if scheduled.get("status") == "False":
        return str(scheduled.get("reason") or "Unschedulable"), str(scheduled.get("message") or "")
    for container in [*(status.get("initContainerStatuses") or []), *(status.get("containerStatuses") or [])]:
        waiting = (container.get("state") or {}).get("waiting") or {}
        reason = str(waiting.get("reason") or "")
        if reason in _PULL_REASONS:
            return "ImagePull", _BACK_OFF.sub("", str(waiting.get("message") or reason))
        if reason and reason not in ("ContainerCreating", "PodInitializing"):
            return reason, str(waiting.get("message") or "")
    return "", ""


def _trainer_state(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the state of the training container."""
    trainer = find_trainer(raw).get("name")
    found = (raw.get("status") or {}).get("containerStatuses") or []
    return next((one.get("state") or {} for one in found if one.get("name") == trainer), {})


def _read_end(raw: Mapping[str, Any]) -> Termination | None:
    """Return how a pod ended, by its training container, an init container, or the pod's status; None: it has not."""
    ended = _trainer_state(raw).get("terminated")
    if ended:
        return _parse_end(ended, KubeletEvidence(eviction=_find_eviction(raw)))

    status = raw.get("status") or {}
    if status.get("phase") != "Failed":
        return None

    pod = str((raw.get("metadata") or {}).get("name"))
    sidecars = _sidecars(raw)
    for container in status.get("initContainerStatuses") or []:
        ended = (container.get("state") or {}).get("terminated") or {}
        name = container.get("name")
        if ended.get("exitCode") and name not in sidecars:
            return _parse_end(ended, KubeletEvidence(pod, init_container=str(name)))

    # Evicted or lost with its node: the kubelet reports no container.
    message = ": ".join(str(status[key]) for key in ("reason", "message") if status.get(key))
    return parse_termination(_EXIT_KILLED, "", message, evidence=KubeletEvidence(pod, has_container=False))


def _find_eviction(raw: Mapping[str, Any]) -> str:
    """Return why the kubelet evicted a pod for its own use of resources; empty where it did not.

    The launcher knows only of a signal. A pod that is evicted for the sake of others has the condition
    DisruptionTarget instead.
    """
    status = raw.get("status") or {}
    conditions = status.get("conditions") or []
    is_disrupted = any(condition.get("type") == "DisruptionTarget" for condition in conditions)
    if status.get("reason") != _EVICTED or is_disrupted:
        return ""
    return f"{_EVICTED}: {status.get('message') or 'by the kubelet'}"[:_MAX_WORDS]


def _sidecars(raw: Mapping[str, Any]) -> frozenset[str]:
    """Return the names of the native sidecars: init containers that run on."""
    containers = (raw.get("spec") or {}).get("initContainers") or []
    return frozenset(str(one.get("name")) for one in containers if one.get("restartPolicy") == "Always")


def _parse_end(terminated: Mapping[str, Any], evidence: KubeletEvidence) -> Termination:
    return parse_termination(
        _int(terminated.get("exitCode")),
        str(terminated.get("reason") or ""),
        str(terminated.get("message") or ""),
        parse_time(terminated.get("finishedAt")),
        evidence,
    )


def _labels(raw: Mapping[str, Any]) -> Mapping[str, str]:
    return (raw.get("metadata") or {}).get("labels") or {}


def _int(value: Any) -> int:
    try:
        return int(value)
    except (TypeError, ValueError):
        return 0

"""Jobs, pods and nodes of the Kubernetes API, reduced to the fields on which decisions depend. Pure."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import cached_property
from typing import Any, NamedTuple

from ddp_operator.api import constants
from ddp_operator.api.kubeobjects import EPOCH, find_trainer, parse_time, scheduling_gates
from ddp_operator.api.status import Nodes
from ddp_operator.decide.failures import ContainerKill, KubeletEvidence, Termination, decode_object, parse_termination
from ddp_pod.contract import names

_PULL_REASONS = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "RegistryUnavailable")
# During back-off the kubelet adds this prefix to the error message.
_BACK_OFF = re.compile(r'^Back-off pulling image "[^"]*": (?:\w+: )?')

_MAX_MESSAGE = 512
_MAX_INT = 2**31 - 1
_EVICTED = "Evicted"
UNSEEN = "EndUnseen"
_UNSEEN_MESSAGE = "the container runtime has not seen how it ended, as after a restart of the node"
_UNSEEN_REASONS = ("Unknown", "ContainerStatusUnknown")  # of containerd and of the kubelet
_EXIT_KILLED = 137  # assumed if no container is reported


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
    spec_digest: str = ""
    """Digest of the spec that it was built from; empty: an older operator created it."""
    raw: Mapping[str, Any] = field(default_factory=dict)

    @property
    def finished(self) -> bool:
        """True if the Job controller creates no more pods for it."""
        return self.complete or self.failed


class RunningInitContainer(NamedTuple):
    """An init container that runs before the training container. ``is_sidecar``: its startupProbe has not succeeded."""

    name: str
    since: str
    is_sidecar: bool


class RestartedSidecar(NamedTuple):
    """A native sidecar that was restarted. ``reason``: of its last end."""

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
    def init_container(self) -> RunningInitContainer | None:
        """The init container that runs now; None: none does."""
        sidecars = _sidecars(self.raw)
        for container in (self.raw.get("status") or {}).get("initContainerStatuses") or ():
            running = (container.get("state") or {}).get("running")
            name = str(container.get("name"))
            if self.phase == "Pending" and running is not None and not (name in sidecars and container.get("started")):
                return RunningInitContainer(name, str(running.get("startedAt") or ""), name in sidecars)
        return None

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
        """True while its containers run and it is not being deleted."""
        return self.phase == "Running" and not self.deleting

    @property
    def has_finished_training(self) -> bool:
        """Whether its training container has ended with exit code 0; other containers may still run."""
        return self.trained and self.termination is not None and self.termination.container_exit_code == 0

    @property
    def injected_containers(self) -> tuple[str, ...]:
        """The containers that run beside the training container, which a template cannot have: a webhook added them."""
        statuses = (self.raw.get("status") or {}).get("containerStatuses") or ()
        running = (str(item["name"]) for item in statuses if not (item.get("state") or {}).get("terminated"))
        return tuple(name for name in running if name != find_trainer(self.raw).get("name"))

    @property
    def remaining_containers(self) -> tuple[str, ...]:
        """The containers and native sidecars that have not ended."""
        status = self.raw.get("status") or {}
        sidecars = _sidecars(self.raw)
        init_containers = [item for item in status.get("initContainerStatuses") or () if item.get("name") in sidecars]
        containers = [*(status.get("containerStatuses") or ()), *init_containers]
        return tuple(str(item["name"]) for item in containers if not (item.get("state") or {}).get("terminated"))

    @property
    def ganged(self) -> bool:
        """Whether it is part of a Kubernetes gang, so its Job cannot be resized."""
        return bool((self.raw.get("spec") or {}).get("schedulingGroup"))

    @property
    def avoids_nodes(self) -> bool:
        """True if it must not run on failed nodes: see ``manifests.pod``."""
        affinity = (self.raw.get("spec") or {}).get("affinity") or {}
        required = (affinity.get("nodeAffinity") or {}).get("requiredDuringSchedulingIgnoredDuringExecution") or {}
        for term in required.get("nodeSelectorTerms") or ():
            for selector in term.get("matchFields") or ():
                if (selector.get("key"), selector.get("operator")) == ("metadata.name", "NotIn"):
                    return True
        return False

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


def view_job(raw: Mapping[str, Any]) -> JobView:
    """Return a Job's view."""
    metadata = raw.get("metadata") or {}
    spec = raw.get("spec") or {}
    status = raw.get("status") or {}
    template = spec.get("template") or {}
    annotations = metadata.get("annotations") or {}
    conditions = {item.get("type"): item for item in status.get("conditions") or ()}
    true_conditions = {kind: item for kind, item in conditions.items() if item.get("status") == "True"}

    # FailureTarget and SuccessCriteriaMet are the Job controller's decision; Failed and Complete follow only when the
    # last pod has ended, which may take a whole grace period.
    decided = true_conditions.get("FailureTarget")
    failed = true_conditions.get("Failed") or decided
    suspended = conditions.get("Suspended") or {}
    # The Job controller renews the start time together with this condition, after the Job was resumed.
    runs = not spec.get("suspend") and suspended.get("status") != "True"
    suspend_written = annotations.get(constants.ANNOTATION_SUSPEND)
    elastic = constants.KUEUE_ELASTIC_GATE in scheduling_gates(template)
    return JobView(
        name=metadata.get("name", ""),
        uid=metadata.get("uid", ""),
        attempt=_int(_labels(raw).get(constants.LABEL_ATTEMPT)),
        nodes=_int(spec.get("completions")),
        suspended=bool(spec.get("suspend")),
        complete="Complete" in true_conditions or "SuccessCriteriaMet" in true_conditions,
        failed=failed is not None,
        failed_message=str((failed or {}).get("message") or ""),
        # The decision precedes the deletion of the remaining pods by the Job controller.
        failed_at=parse_time((decided or failed or {}).get("lastTransitionTime")),
        deleting="deletionTimestamp" in metadata,
        launcher=_find_launcher(template),
        secret=_find_secret(template),
        ignored_since=None if raw.get("status") else parse_time(metadata.get("creationTimestamp")),
        suspend_written=None if suspend_written is None else suspend_written == "true",
        queue=_labels(raw).get(constants.KUEUE_QUEUE_LABEL, ""),
        admitted=constants.KUEUE_PODSET_LABEL in ((template.get("metadata") or {}).get("labels") or {}),
        takes_slices=elastic and constants.KUEUE_MIN_PARALLELISM not in annotations,
        started=parse_time(status.get("startTime")) if runs else None,
        suspend_changed=parse_time(suspended.get("lastTransitionTime")),
        spec_digest=str(annotations.get(constants.ANNOTATION_SPEC) or ""),
        raw=raw,
    )


def _find_launcher(template: Mapping[str, Any]) -> str:
    """Return the name of the ConfigMap that a template's pods mount the launcher from."""
    for volume in (template.get("spec") or {}).get("volumes") or ():
        if volume["name"] == constants.LAUNCHER_VOLUME:
            return str(volume["configMap"].get("name"))
    return ""


def _find_secret(template: Mapping[str, Any]) -> str:
    """Return the name of the Secret with which a template's pods sign what they exchange."""
    for variable in find_trainer(template).get("env") or ():
        if variable["name"] == constants.ENV_RENDEZVOUS_SECRET:
            return str(variable["valueFrom"]["secretKeyRef"]["name"])
    return ""


def view_pod(raw: Mapping[str, Any], kill: ContainerKill | None = None) -> PodView:
    """Return a pod's view. ``kill``: why the kubelet killed its training container, from its Events."""
    metadata = raw.get("metadata") or {}
    status = raw.get("status") or {}
    conditions = {item.get("type"): item for item in status.get("conditions") or ()}
    created = parse_time(metadata.get("creationTimestamp"))
    node_name = (raw.get("spec") or {}).get("nodeName") or ""
    # A second scheduler may have written its condition; a pod with a node is scheduled.
    scheduled = {} if node_name else conditions.get("PodScheduled") or {}
    unschedulable = scheduled.get("status") == "False"

    trainer = _trainer_state(raw)
    # A waiting sidecar does not block a training container that runs or has ended.
    waits = trainer.get("running") is None and trainer.get("terminated") is None
    waiting_reason, waiting_message = _waiting(status, scheduled) if waits else ("", "")

    disruption = conditions.get("DisruptionTarget") or {}
    is_unseen = _is_end_unseen(raw)
    ready = conditions.get("Ready") or {}
    unready_since = parse_time(ready.get("lastTransitionTime")) if ready.get("status") == "False" else None
    # The kubelet sets both conditions to False together, the node controller of a silent node only Ready.
    containers_ready = (conditions.get("ContainersReady") or {}).get("status") == "True"
    cut_off = containers_ready and ready.get("reason") != "ReadinessGatesNotReady"
    # The deletion timestamp is the end of the grace period.
    grace_ends = parse_time(metadata.get("deletionTimestamp"))
    grace = timedelta(seconds=max(0, _int(metadata.get("deletionGracePeriodSeconds"))))
    return PodView(
        name=metadata.get("name", ""),
        uid=metadata.get("uid", ""),
        attempt=_int(_labels(raw).get(constants.LABEL_ATTEMPT)),
        index=_int((metadata.get("annotations") or {}).get(constants.ANNOTATION_COMPLETION_INDEX)),
        created=created or EPOCH,
        phase=status.get("phase") or "Pending",
        ready=ready.get("status") == "True",
        deleting="deletionTimestamp" in metadata,
        node_name=node_name,
        scheduled=bool(node_name) or scheduled.get("status") == "True",
        started=parse_time(status.get("startTime")),
        disrupted=disruption.get("status") == "True" or is_unseen,
        waiting_reason=waiting_reason,
        waiting_message=waiting_message,
        termination=_read_end(raw, kill),
        trained=bool(trainer.get("terminated")),
        raw=raw,
        disruption=str(disruption.get("reason") or (UNSEEN if is_unseen else "")),
        disruption_message=str(disruption.get("message") or (_UNSEEN_MESSAGE if is_unseen else ""))[:_MAX_MESSAGE],
        deleted_at=None if grace_ends is None else grace_ends - grace,
        grace_ends=grace_ends,
        unready_since=unready_since,
        cut_off_since=unready_since if cut_off else None,
        unscheduled_since=parse_time(scheduled.get("lastTransitionTime")) if unschedulable else None,
        ignored_since=None if node_name or scheduled else created,
    )


def view_node(raw: Mapping[str, Any] | None) -> NodeView:
    """Return a node's view; ``raw`` is None for a deleted node."""
    if raw is None:
        return NodeView(False, "the node was deleted")
    conditions = (raw.get("status") or {}).get("conditions") or []
    ready: Mapping[str, Any] = next((c for c in conditions if c.get("type") == "Ready"), {})
    if ready.get("status") == "True":
        return NodeView(True, "")
    message = str(ready.get("message") or ready.get("reason") or "its kubelet has not reported Ready")
    return NodeView(False, f"the node is not ready: {message}"[:_MAX_MESSAGE])


def _waiting(status: Mapping[str, Any], scheduled: Mapping[str, Any]) -> tuple[str, str]:
    """Return reason and message of a pod that does not start, from the scheduler or the kubelet."""
    if scheduled.get("status") == "False":
        return str(scheduled.get("reason") or "Unschedulable"), str(scheduled.get("message") or "")
    init_containers = status.get("initContainerStatuses") or []
    for container in [*init_containers, *(status.get("containerStatuses") or [])]:
        state = container.get("state") or {}
        ended = state.get("terminated") or {}
        # An init container that failed and is about to be restarted has ended.
        waiting = state.get("waiting") or (ended if ended.get("exitCode") else {})
        reason = str(waiting.get("reason") or "")
        place = f"init container {container.get('name')}" if container in init_containers else ""
        message = str(waiting.get("message") or "")
        if reason in _PULL_REASONS:
            return "ImagePull", ": ".join(filter(None, (place, _BACK_OFF.sub("", message or reason))))
        if reason and reason not in ("ContainerCreating", "PodInitializing"):
            return reason, ": ".join(filter(None, (place, _describe_last_end(container) or message)))
    return "", ""


def _describe_last_end(container: Mapping[str, Any]) -> str:
    """Return how a container that is restarted ended last; empty: it has not. The back-off's message has no cause."""
    states = (container.get("state") or {}, container.get("lastState") or {})
    ended = next((state["terminated"] for state in states if state.get("terminated")), None)
    if not ended:
        return ""
    end = _parse_end(ended, KubeletEvidence())
    return f"exit code {end.container_exit_code}: {end.message}"


def _trainer_state(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the state of the training container."""
    trainer = find_trainer(raw).get("name")
    for container in (raw.get("status") or {}).get("containerStatuses") or ():
        if container.get("name") == trainer:
            return container.get("state") or {}
    return {}


def _is_end_unseen(raw: Mapping[str, Any]) -> bool:
    """Return whether nobody has seen how the training container ended, neither its launcher nor the runtime."""
    ended = _trainer_state(raw).get("terminated") or {}
    was_evicted = bool((raw.get("status") or {}).get("reason"))
    if ended.get("reason") not in _UNSEEN_REASONS or was_evicted:
        return False
    return decode_object(str(ended.get("message") or ""), names.TERMINATION_MESSAGE_LIMIT) is None


def find_trainer_start(raw: Mapping[str, Any]) -> datetime | None:
    """Return when a pod's training container started, after images, volumes and init containers; None: unknown."""
    state = _trainer_state(raw)
    return parse_time((state.get("running") or state.get("terminated") or {}).get("startedAt"))


def _read_end(raw: Mapping[str, Any], kill: ContainerKill | None) -> Termination | None:
    """Return how a pod ended, by its training container, an init container, or the pod's status; None: it has not."""
    ended = _trainer_state(raw).get("terminated")
    if ended:
        eviction = _find_eviction(raw)
        remains = not eviction and not is_taken_away(raw)
        return _parse_end(ended, KubeletEvidence(eviction=eviction, kill=kill, pod_remains=remains))

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
    if status.get("reason") != _EVICTED or _is_disrupted(raw):
        return ""
    return f"{_EVICTED}: {status.get('message') or 'by the kubelet'}"[:_MAX_MESSAGE]


def is_taken_away(raw: Mapping[str, Any]) -> bool:
    """Return whether a pod was deleted or evicted, or ended with its node."""
    has_reason = bool((raw.get("status") or {}).get("reason"))
    return has_reason or _is_disrupted(raw) or "deletionTimestamp" in (raw.get("metadata") or {})


def _is_disrupted(raw: Mapping[str, Any]) -> bool:
    conditions = (raw.get("status") or {}).get("conditions") or []
    return any(condition.get("type") == "DisruptionTarget" for condition in conditions)


def _sidecars(raw: Mapping[str, Any]) -> frozenset[str]:
    """Return the names of the native sidecars: init containers that are always restarted."""
    containers = (raw.get("spec") or {}).get("initContainers") or []
    return frozenset(str(item.get("name")) for item in containers if item.get("restartPolicy") == "Always")


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
        return max(-_MAX_INT, min(_MAX_INT, int(value)))
    except (TypeError, ValueError, OverflowError):
        return 0

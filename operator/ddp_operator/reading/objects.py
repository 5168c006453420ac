"""Views of Jobs, pods and nodes, from the objects that an API server returns. Pure."""

import re
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from ddp_operator.api import child_names, constants
from ddp_operator.api.cluster import Snapshot, controller_of
from ddp_operator.api.faults import contain, name_object, parse_each
from ddp_operator.api.job import DDPTrainingJob
from ddp_operator.api.kubeobjects import EPOCH, find_trainer, parse_time, scheduling_gates
from ddp_operator.decide.failures import Termination
from ddp_operator.decide.state import Children
from ddp_operator.decide.views import (
    UNSEEN,
    JobView,
    NodeView,
    PodView,
    is_disrupted,
    is_taken_away,
    list_sidecars,
    read_int,
)
from ddp_operator.reading.terminations import KubeletEvidence, decode_object, parse_termination
from ddp_pod.contract import names

_PULL_REASONS = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "RegistryUnavailable")
# During back-off the kubelet adds this prefix to the error message.
_BACK_OFF = re.compile(r'^Back-off pulling image "[^"]*": (?:\w+: )?')
_MAX_MESSAGE = 512
_EVICTED = "Evicted"
_UNSEEN_MESSAGE = "the container runtime has not seen how it ended, as after a restart of the node"
_UNSEEN_REASONS = ("Unknown", "ContainerStatusUnknown")  # of containerd and of the kubelet
_EXIT_KILLED = 137  # assumed if no container is reported


def view_children(job: DDPTrainingJob, snapshot: Snapshot) -> Children:
    """Return the Jobs and pods of this resource; those of a deleted resource of the same name are omitted."""
    own = (raw for raw in snapshot.jobs if controller_of(raw).get("uid") == job.uid)
    jobs = tuple(parse_each("Job", own, view_job))
    own_jobs = tuple(view for view in jobs if child_names.is_attempt_name(view.name, job.name))
    feature_jobs = tuple(view for view in jobs if not child_names.is_attempt_name(view.name, job.name))
    uids = {view.uid for view in own_jobs}
    feature_uids = {view.uid for view in feature_jobs}
    own_pods: list[PodView] = []
    orphans: list[PodView] = []
    feature_pods: list[PodView] = []
    for raw in snapshot.pods:
        owner = controller_of(raw)
        with contain("Pod", name_object(raw)):
            if owner.get("uid") in feature_uids:
                feature_pods.append(view_pod(raw))
            elif owner.get("uid") in uids:
                own_pods.append(view_pod(raw))
            elif owner.get("kind") == "Job" and child_names.is_attempt_name(str(owner.get("name")), job.name):
                orphans.append(view_pod(raw))
    return Children(own_jobs, tuple(own_pods), tuple(orphans), feature_jobs, tuple(feature_pods))


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
        attempt=read_int(_labels(raw).get(constants.LABEL_ATTEMPT)),
        nodes=read_int(spec.get("completions")),
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
        ganged=bool((template.get("spec") or {}).get("schedulingGroup")),
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


def view_pod(raw: Mapping[str, Any]) -> PodView:
    """Return a pod's view."""
    metadata = raw.get("metadata") or {}
    status = raw.get("status") or {}
    conditions = {item.get("type"): item for item in status.get("conditions") or ()}
    created = parse_time(metadata.get("creationTimestamp"))
    node_name = (raw.get("spec") or {}).get("nodeName") or ""
    # A second scheduler may have written its condition; a pod with a node is scheduled.
    scheduled = {} if node_name else conditions.get("PodScheduled") or {}
    unschedulable = scheduled.get("status") == "False"

    trainer = find_trainer_state(raw)
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
    grace = timedelta(seconds=max(0, read_int(metadata.get("deletionGracePeriodSeconds"))))
    return PodView(
        name=metadata.get("name", ""),
        uid=metadata.get("uid", ""),
        attempt=read_int(_labels(raw).get(constants.LABEL_ATTEMPT)),
        index=read_int((metadata.get("annotations") or {}).get(constants.ANNOTATION_COMPLETION_INDEX)),
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
        termination=_read_end(raw),
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


def find_trainer_state(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the state of the training container, as its pod's status has it; empty: unknown."""
    trainer = find_trainer(raw).get("name")
    for container in (raw.get("status") or {}).get("containerStatuses") or ():
        if container.get("name") == trainer:
            return container.get("state") or {}
    return {}


def _is_end_unseen(raw: Mapping[str, Any]) -> bool:
    """Return whether nobody has seen how the training container ended, neither its launcher nor the runtime."""
    ended = find_trainer_state(raw).get("terminated") or {}
    was_evicted = bool((raw.get("status") or {}).get("reason"))
    if ended.get("reason") not in _UNSEEN_REASONS or was_evicted:
        return False
    return decode_object(str(ended.get("message") or ""), names.TERMINATION_MESSAGE_LIMIT) is None


def _read_end(raw: Mapping[str, Any]) -> Termination | None:
    """Return how a pod ended, by its training container, an init container, or the pod's status; None: it has not."""
    ended = find_trainer_state(raw).get("terminated")
    if ended:
        eviction = _find_eviction(raw)
        remains = not eviction and not is_taken_away(raw)
        return _parse_end(ended, KubeletEvidence(eviction=eviction, pod_remains=remains))

    status = raw.get("status") or {}
    if status.get("phase") != "Failed":
        return None

    pod = str((raw.get("metadata") or {}).get("name"))
    sidecars = list_sidecars(raw)
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
    if status.get("reason") != _EVICTED or is_disrupted(raw):
        return ""
    return f"{_EVICTED}: {status.get('message') or 'by the kubelet'}"[:_MAX_MESSAGE]


def _parse_end(terminated: Mapping[str, Any], evidence: KubeletEvidence) -> Termination:
    return parse_termination(
        read_int(terminated.get("exitCode")),
        str(terminated.get("reason") or ""),
        str(terminated.get("message") or ""),
        parse_time(terminated.get("finishedAt")),
        evidence,
    )


def _labels(raw: Mapping[str, Any]) -> Mapping[str, str]:
    return (raw.get("metadata") or {}).get("labels") or {}

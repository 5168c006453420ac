"""What a job waits for or why it failed, and what to do: one paragraph, from its status and the Events about it.

Pure. The status already holds the cluster's own words; what is added here is the order of importance and the remedy.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final

import msgspec

from ddp_operator.api.status import Condition, LastFailure, PreflightStatus, Progress, Status
from ddp_operator.failures import describe_end, describe_failure, sentence
from ddp_operator.kubeobjects import parse_time
from ddp_operator.names import POD_SUFFIX
from ddp_operator.progress import format_duration
from ddp_operator.status.conditions import CHANGE_PENDING, SIDECAR_RESTARTED, find_blocker, find_obstacle

_LOOK_AT_LOGS: Final = "Look at the end of its log: ddp logs {name}."
# reason -> what to do. A reason that is not here still gets its message, and kubectl describe as the remedy.
REMEDIES: Final = {
    # Accepted
    "ProfileNotFound": "Create that profile, or correct spec.profileRef: ddp profile list{option} shows those that "
    "exist.",
    "ProfileLocked": "Leave the named fields out of the job and apply it again: ddp profile show NAME{option} has "
    "what a profile sets and locks.",
    "ResourceClaimNotFound": "Create it, or correct its name in the pod template: kubectl get resourceclaims,"
    "resourceclaimtemplates{option} shows those that exist.",
    "InvalidSpec": "Fix that field and apply the file again; `ddp render FILE` checks it without a cluster.",
    "VersionMismatch": "Bring the operator and the definition to one version with helm upgrade or helm rollback; the "
    "job is read again within five minutes.",
    "NameConflict": "Delete or rename that object, or give the job another name.",
    "ClaimInUse": "It starts by itself, within half a minute of the other job's end: ddp list shows both.",
    "Forbidden": "The operator's role lacks that permission, or a quota or policy of the namespace forbids the object: "
    "ask whoever owns the namespace.",
    "ServerError": "It is tried again every half a minute; an admission webhook that does not answer is fixed or "
    "removed by whoever runs the cluster: kubectl get validatingwebhookconfigurations,mutatingwebhookconfigurations.",
    "StatusRefused": "It is written again each minute; after a fix of the definitions or the spec the job continues.",
    # Suspended
    "SuspendedBySpec": "Let it go on with: ddp resume {name}.",
    "Stopping": "Its pods save a checkpoint and end within their grace time; no action needed.",
    # InputsReady, and Failed
    "NotFetched": "Let it go on with: ddp resume {name}.",
    "FetchingInputs": "Training starts when they are there; no action needed.",
    "Unreachable": "It is tried again for some minutes; what was tried: ddp logs {name}.",
    "NotFound": "Then submit the job anew.",
    "AccessDenied": "Then submit the job anew.",
    "ChecksumMismatch": "Then submit the job anew.",
    "NoSpace": "Then submit the job anew: what was fetched is not fetched again.",
    "NotWritable": "Then submit the job anew.",
    "Unsupported": "Then submit the job anew.",
    "FetchFailed": "What was fetched is not fetched again; what was tried: ddp logs {name}.",
    # Scheduled
    "Unschedulable": "Free or add nodes that have what the pods ask for, ask for less in resources, nodeSelector or "
    "tolerations, or run on fewer nodes: ddp scale {name} N.",
    "QuotaPending": "It starts when it is admitted; the queue and those before it: kubectl get "
    "localqueues,workloads{option}.",
    "Inadmissible": "It does not start by itself: create the queue that is named (kubectl get "
    "localqueues,clusterqueues{option}), or move the job to another one by its label kueue.x-k8s.io/queue-name.",
    "QueueStopped": "It goes on when whoever runs the queue lets it (stopPolicy: None, flavors and admission checks "
    "that exist): kubectl describe localqueues,clusterqueues{option}.",
    "WorkloadFinished": "Kueue does not look at it again. To queue the job anew: ddp suspend {name}, then ddp resume "
    "{name}.",
    "WorkloadDeactivated": "It does not start by itself; to queue it again, set spec.active of the Workload that is "
    "named to true: kubectl edit workload{option}.",
    "WorkloadMissing": "Kueue tries again within some minutes once what it needs is there, or at once when the job's "
    "label kueue.x-k8s.io/priority-class is changed.",
    "ImagePull": "Check the image's name and tag, and imagePullSecrets if the registry is private. As long as no pod "
    "has run, a corrected file can be applied to the same job.",
    "PodsForbidden": "A quota, a policy or a missing service account keeps the pods from being made: change the job or "
    "ask whoever owns the namespace.",
    "VolumeNotReady": "Check the claim: kubectl get pvc{option}. One that several nodes use must be ReadWriteMany.",
    "PodsNotStarting": "kubectl describe pod{option} on the pod that is named has the kubelet's words; what is missing "
    "may be made later.",
    "WaitingForPods": "Pods are being made and placed; if this lasts for minutes, the Events of the Job say why.",
    "WaitingForFormerPods": "The next attempt starts when they are gone; a pod on a dead node is given up after "
    "spec.recovery.forceDeleteAfterSeconds.",
    # Rendezvoused
    "WaitingForRanks": "Training starts when all pods run; look at those that do not: kubectl get pods -l "
    "ddp-operator.dev/job-name={name}.",
    "WaitingForWorkers": "Loading PyTorch and connecting takes up to a minute; if it lasts: ddp logs {name}.",
    "NoMetricsPage": "Its log says what it does: ddp logs {name} --node 0. Is that well, let the operator's namespace "
    "reach the pods' metrics port, which a NetworkPolicy may forbid.",
    "EnoughRanksJoined": "Training goes on meanwhile; the pods that are missing: kubectl get pods -l "
    "ddp-operator.dev/job-name={name}.",
    # Progressing
    "NoStepYet": "Start-up or the first batch is slow, or the script reports no steps (docs/pod-contract.md says how "
    "to); its log says what it does: ddp logs {name} -f.",
    "NotRunning": "See the pods: kubectl get pods -l ddp-operator.dev/job-name={name}.",
    "WaitingForPeers": "The cause is known when that pod reports or its node is found lost, which costs no restart; "
    "no action needed. The pods: kubectl get pods -o wide -l ddp-operator.dev/job-name={name}.",
    "NodeNotReady": "Look at the node that is named: kubectl describe node. If it stays away, the job restarts on "
    "other nodes by itself, without using up spec.recovery.maxRestarts.",
    "Stalled": "A rank hangs: its stacks are in the log (ddp logs {name}).",
    # Restarting
    "GroupRestart": "Training starts again by itself, {onward}; no action needed.",
    "PodReplacement": "The pod is replaced under the same index and training goes on; no action needed.",
    "Disrupted": "Evictions and lost nodes are free: it starts again by itself, {onward}; no action needed.",
    "Resumed": "It starts again by itself, {onward}; no action needed.",
    "NodesReadmitted": "No other node could take a pod, so the nodes that failed are used again; look at them.",
    "Resized": "It goes on with the new number of nodes by itself; no action needed.",
    # CheckpointsUploaded
    "UploadFailing": "Training goes on and the upload is tried again; new pods would begin at the newest snapshot. See "
    "that the store answers, and that the credentials of spec.checkpoint.secretRef may write.",
    # Distributed and Failed
    "NoProcessGroup": "Let the script initialize torch.distributed and wrap its model in DistributedDataParallel; "
    "where ranks are meant to work apart, set spec.processGroupPolicy: Ignore.",
    "RestartBudgetExhausted": "A failed job is not started again: fix the cause, or set a larger "
    "spec.recovery.maxRestarts in the file if the cause is gone by now; then ddp delete {name}, and submit the file.",
    "RepeatedFailure": "Another attempt would end alike: fix the cause, then ddp delete {name}, and submit the file.",
    "CrashLoop": "Every attempt died without getting further, so another would too: fix the cause and submit the job "
    "anew.",
    "PendingDeadlineExceeded": "Free or add nodes, ask for less, or raise spec.pendingDeadlineSeconds, and submit the "
    "job anew.",
    "DeadlineExceeded": "Raise spec.activeDeadlineSeconds or make the run shorter, and submit the job anew; it goes on "
    "from its checkpoint if it keeps one on a claim or at a URL.",
    "Interrupted": "Run it again: it goes on from its checkpoint if it keeps one on a claim or at a URL.",
    "OperatorError": "Run it again: it goes on from its checkpoint if it keeps one on a claim or at a URL. Please "
    "report the traceback.",
}
# What others say, as far as it is known: these remedies are better than those of the reason.
_BETTER: Final = {
    r"request > maximum capacity": "It does not start by itself: the queue never has as much. Run on fewer nodes (ddp "
    "scale {name} N), ask for less in resources, or have the queue's quota raised.",
    r"untolerated taint|doesn't match node affinity": "It does not start by itself: correct nodeSelector, affinity or "
    "tolerations, or move the job to another queue by its label kueue.x-k8s.io/queue-name.",
    r"violates PodSecurity": "Set spec.securityProfile: Restricted, and in template.spec what else is named; the image "
    "must then run as a user other than root.",
    r"image will run as root": "Set template.spec.securityContext.runAsUser to a user of the image other than root.",
    # containerd before 2.1 makes of an image volume a folder without a name.
    r'failed to mkdir ""': "The node's container runtime mounts no image volumes (containerd does from 2.1, CRI-O from "
    "1.31): put the code on a claim, with --code-claim, or choose other nodes.",
    r'configmap "\S+-launcher-[0-9a-f]{10,12}" not found': "It is the operator's own, which makes it anew. One that an "
    "older operator has made needs a new Job, while no pod trains: ddp suspend {name}, then ddp resume {name}.",
    r'(?i)\b(secret|configmap) "[^"]+" not found': "Create it in the job's namespace, and the pods start by themselves "
    "within two minutes; or correct its name in a new job.",
}
_DESCRIBE: Final = "kubectl describe ddp {name} has all conditions and events."
# An operator that runs looks at a new job within a second.
_UNSEEN_PATIENCE: Final = timedelta(seconds=10)
_EVENT_LIMIT: Final = 300


@dataclass(frozen=True, slots=True)
class Why:
    """The explanation: ``what`` is the case, ``todo`` the remedy (empty where none is needed)."""

    name: str
    phase: str
    reason: str
    what: str
    todo: str = ""

    def __str__(self) -> str:
        return " ".join(filter(None, (self.what, self.todo)))


def explain_why(
    resource: Mapping[str, Any], events: Sequence[Mapping[str, Any]], now: datetime, *, option: str = ""
) -> Why:
    """Return the explanation of a resource. ``events``: those about it and its children, oldest first.

    ``option``: what the commands that are suggested need to find its namespace, such as `` -n team``.
    """
    metadata = resource["metadata"]
    name = str(metadata["name"])
    try:
        status = msgspec.convert(resource.get("status") or {}, Status)
    except msgspec.ValidationError:  # a newer operator's, or somebody wrote into it
        words = f"{name} has a status that this version of ddp cannot read."
        return Why(name, "Unknown", "", words, _fill(_DESCRIBE, name, option))
    phase = status.phase or "Pending"
    if "deletionTimestamp" in metadata:
        return Why(name, phase, "Deleting", f"{name} is being deleted.", "Its pods end within their grace time.")
    if phase == "Succeeded":
        apart = next((c for c in status.conditions if (c.type, c.status) == ("Distributed", "False")), None)
        if apart is not None:
            what = f"{_describe_success(name, status)} But {sentence(apart.message)}"
            return Why(name, phase, apart.reason, what, _fill(REMEDIES[apart.reason], name, option))
        return Why(name, phase, "", _describe_success(name, status))
    if phase == "Failed":
        return _explain_failure(name, status, option)
    if not status.conditions:
        return _explain_unseen(name, metadata, events, now)
    condition = find_obstacle(status)
    if condition is not None:
        what, condition = _describe_obstacle(name, condition, status, events, now)
        return Why(name, phase, condition.reason, what, _fill(_find_remedy(condition), name, option, status))
    unsaved = status.condition("CheckpointsUploaded")
    if unsaved is not None and unsaved.status == "False":
        what = f"{_describe_training(name, status)} But {sentence(unsaved.message)}"
        return Why(name, phase, unsaved.reason, what, _fill(REMEDIES[unsaved.reason], name, option))
    hint = _describe_hint(status.last_failure) if status.last_failure and status.restarts.all else ""
    if not hint and status.preflight and status.preflight.failed:
        hint = _fill("The reasons are in pod 0's log: ddp logs {name} --node 0.", name, option)
    return Why(name, phase, "", _describe_training(name, status), hint)


def _describe_obstacle(
    name: str, condition: Condition, status: Status, events: Sequence[Mapping[str, Any]], now: datetime
) -> tuple[str, Condition]:
    """Return what is to be said of the condition that a job waits for, and the one that it waits for in truth."""
    since = condition.last_transition_time
    lasting = f" for {format_duration((now - since).total_seconds())}" if since and since <= now else ""
    opening = {
        "Accepted": f"{name} is not accepted ({condition.reason})",
        "Suspended": f"{name} is suspended{lasting}" if condition.reason != "Stopping" else f"{name} is stopping",
        "Restarting": f"{name} is restarting{lasting} ({condition.reason})",
        "InputsReady": f"{name} waits{lasting} for its inputs, before it asks for GPUs ({condition.reason})",
        "Scheduled": f"{name} has waited{lasting} for its pods to be placed and started ({condition.reason})",
        "Rendezvoused": f"{name} has waited{lasting} for its ranks to meet ({condition.reason})",
        "Progressing": f"{name} runs but makes no step{lasting} ({condition.reason})",
    }[condition.type]
    what = f"{opening}: {sentence(condition.message)}" if condition.message else f"{opening}."
    if condition.type == "Restarting" and status.last_failure is not None:
        what += f" The last failure was {_describe_cause(status.last_failure)}"
    if condition.type in ("Scheduled", "Rendezvoused", "Progressing"):
        what += _describe_aside(status)
        what += _last_warning(events, what)
    # A job that starts again does so by itself, unless it cannot.
    if condition.type == "Restarting" and (blocker := find_blocker(status)):
        what += f" Its pods wait ({blocker.reason}): {sentence(blocker.message)}"
        condition = blocker
    return what, condition


def _find_remedy(condition: Condition) -> str:
    better = next((text for words, text in _BETTER.items() if re.search(words, condition.message)), None)
    return better or REMEDIES.get(condition.reason, _DESCRIBE)


def _fill(remedy: str, name: str, option: str, status: Status | None = None) -> str:
    """Return a remedy whose commands name the job and, where that is needed, its namespace."""
    saved = status.checkpoint if status is not None else None
    onward = f"from the checkpoint of step {saved.step}" if saved else "from the beginning: no checkpoint was reported"
    return remedy.format(name=name + option, option=option, onward=onward)


def _explain_failure(name: str, status: Status, option: str) -> Why:
    condition = next((c for c in status.conditions if (c.type, c.status) == ("Failed", "True")), None)
    reason = condition.reason if condition else ""
    failure = status.last_failure
    tries = f" after {status.attempt} attempts" if status.attempt > 1 else ""
    what = f"{name} has failed{tries}"
    words = describe_end(condition, failure) if condition else ""
    what += f" ({reason}): {sentence(words)}" if words else f" ({reason})." if reason else "."
    what += f" Its code was {status.code.revision}." if status.code else ""
    remedy = REMEDIES.get(reason, "")
    if failure is None:
        return Why(name, "Failed", reason, what, _fill(remedy or _LOOK_AT_LOGS, name, option))
    is_cause = failure.conclusion or failure.category == reason
    what += f" The {'cause' if is_cause else 'last failure'} was {_describe_cause(failure)}"
    # The launcher's hint knows the error; the reason only says why there was no further attempt.
    remedy = remedy or ("" if failure.hint else _LOOK_AT_LOGS)
    todo = " ".join(filter(None, (_describe_hint(failure), _fill(remedy, name, option))))
    return Why(name, "Failed", reason, what, todo)


def _explain_unseen(name: str, metadata: Mapping[str, Any], events: Sequence[Mapping[str, Any]], now: datetime) -> Why:
    created = parse_time(metadata.get("creationTimestamp"))
    age = now - created if created else _UNSEEN_PATIENCE
    if age < _UNSEEN_PATIENCE:
        return Why(name, "Pending", "New", f"{name} is new; the operator has not looked at it yet.")
    what = f"No operator has looked at {name} in the {format_duration(age.total_seconds())} since it was created."
    return Why(
        name,
        "Pending",
        "NoOperator",
        what + _last_warning(events, what),
        "Is the operator running, and does it serve this namespace? kubectl get pods -A -l "
        "app.kubernetes.io/name=ddp-operator shows it.",
    )


def _describe_success(name: str, status: Status) -> str:
    began, ended = status.start_time, status.completion_time
    took = f" in {format_duration((ended - began).total_seconds())}" if began and ended else ""
    p = status.progress or Progress()
    named = {"step": p.step, "loss": p.loss, "validation accuracy": p.val_accuracy}
    figures = [f"{what} {figure}" for what, figure in named.items() if figure]
    restarts = status.restarts.all
    figures += [f"{restarts} restart{'s' if restarts != 1 else ''}"] if restarts else []
    return f"{name} has succeeded{took}" + (f": {', '.join(figures)}." if figures else ".")


def _describe_training(name: str, status: Status) -> str:
    p, restarts = status.progress, status.restarts.all
    often = "once" if restarts == 1 else f"{restarts} times"
    again = f" It was started again {often}" if restarts and status.last_failure else ""
    if again and status.last_failure is not None:
        again += f"; the last failure was {_describe_cause(status.last_failure)}"
    again = _describe_aside(status) + _describe_preflight(status.preflight) + again
    if p is None:
        return f"{name} is running; nothing is blocking it.{again}"
    parts = [f"step {p.step}" + (f" of {p.total_steps}" if p.total_steps else "")] if p.step is not None else []
    parts += [f"{p.percent} done"] if p.percent else []
    parts += [f"{p.eta} left"] if p.eta else []
    return f"{name} is training" + (f" ({', '.join(parts)})" if parts else "") + f"; nothing is blocking it.{again}"


def _describe_aside(status: Status) -> str:
    """Return what is to be said of pods that are all placed: of a size that waits, of sidecars."""
    scheduled = status.condition("Scheduled")
    aside = scheduled is not None and scheduled.reason in (CHANGE_PENDING, SIDECAR_RESTARTED)
    return f" {sentence(scheduled.message)}" if scheduled is not None and aside else ""


def _describe_preflight(flight: PreflightStatus | None) -> str:
    """Return what is to be said of a preflight that failed without ending the job."""
    if flight is None or not flight.failed:
        return ""
    pair, found = flight.slowest_pair, []
    if "transport" in flight.failed:
        found.append(f"traffic between pods uses {flight.transport}")
    if "allreduce" in flight.failed and flight.all_reduce_megabytes_per_second:
        found.append(f"an all-reduce makes {flight.all_reduce_megabytes_per_second} MB/s")
    if "pairs" in flight.failed and pair is not None:
        nodes = f" (nodes {' and '.join(pair.nodes)})" if pair.nodes else ""
        pods = " and ".join(map(str, pair.pods))
        found.append(f"pods {pods}{nodes} exchange {pair.megabytes_per_second} MB/s")
    told = f": {', '.join(found)}" if found else ""
    return f" But its preflight failed in {', '.join(flight.failed)}{told}."


def _describe_hint(failure: LastFailure) -> str:
    return sentence(failure.hint[:1].upper() + failure.hint[1:])


def _describe_cause(failure: LastFailure) -> str:
    return sentence(describe_failure(failure, whole=True))


def _last_warning(events: Sequence[Mapping[str, Any]], said: str) -> str:
    """Return the newest warning about the job or its children, unless it has been said."""
    for event in reversed(events):
        message = " ".join(str(event.get("message") or "").split())
        if event.get("type") == "Warning" and message:
            if _without_tries(message.rstrip(".")) in _without_tries(said):
                return ""
            return f" The last warning was {event.get('reason')}: {sentence(message[:_EVENT_LIMIT])}"
    return ""


def _without_tries(text: str) -> str:
    """Return a message without the end of each pod's name, which differs from one try to the next."""
    return re.sub(rf'-(?:[0-9]+-{POD_SUFFIX}|\*)(?=")', "", text)

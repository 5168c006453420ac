"""What a job waits for or why it failed, and what to do: one paragraph, from its status and the Events about it. Pure.

The status holds the cluster's messages; this module adds the order of importance and the remedy.
"""

import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from importlib import resources
from typing import Any, Final, NamedTuple

from ddp_cli.view.failures import describe_end, sentence
from ddp_cli.view.texts import format_estimate
from ddp_operator.api.child_names import POD_SUFFIX
from ddp_operator.api.constants import MANAGED_BY, MESH_PROXIES
from ddp_operator.api.display_texts import format_duration
from ddp_operator.api.kubeobjects import find_foreign_manager, parse_time
from ddp_operator.api.other_kinds import MULTIKUEUE
from ddp_operator.api.resources import find_worker_cluster
from ddp_operator.api.status import (
    ENDED_PHASES,
    Condition,
    LastFailure,
    PreflightStatus,
    Progress,
    Status,
    StragglerCause,
)
from ddp_operator.api.stored_fields import read_status
from ddp_operator.decide.conditions import BLOCKING, WAITING_FOR_RANKS, find_blocker, find_obstacle
from ddp_operator.decide.doubts import find_doubts
from ddp_operator.decide.failures import HIDDEN_FAILURE_REMEDY, describe_detail, describe_failure
from ddp_operator.decide.held_runs import describe_run
from ddp_operator.decide.other_reasons import CHANGE_PENDING, SIDECAR_RESTARTED, STALLED
from ddp_operator.reading.events import EXPLAINING_EVENTS, PROBE_REMEDY, SCHEDULER_EVENT, find_kill, read_event_time
from ddp_pod.contract.failure_text import NON_FINITE_REMEDY


def _capitalize(text: str) -> str:
    return text[:1].upper() + text[1:]


_READ_LOGS: Final = "Read the end of its log: ddp logs {name}."


class _MessageRemedy(NamedTuple):
    """The remedy for a message of another component that matches ``pattern``; it replaces that of the reason.

    ``reason``: the only reason to which it applies; empty: any.
    """

    pattern: str
    remedy: str
    reason: str = ""


_TABLE: Final = tomllib.loads((resources.files(__package__) / "remedies.toml").read_text(encoding="utf-8"))
REMEDIES: Final[Mapping[str, str]] = {
    **_TABLE["reasons"],
    "TracebackAtEnd": f"{_capitalize(HIDDEN_FAILURE_REMEDY)}; then submit the job again.",
    "LossNotFinite": f"{_capitalize(NON_FINITE_REMEDY)}.",
}
"""Remedy by reason. For any other reason, the remedy is kubectl describe."""
_MESSAGE_REMEDIES: Final = (
    *(
        _MessageRemedy(
            f"injected {container}$",
            f"Keep it out by the annotation {annotation}: {value!r} in spec.template.metadata, or let the mesh add "
            "native sidecars; then submit the job again.",
            reason="Finished",
        )
        for container, (annotation, value) in MESH_PROXIES.items()
    ),
    *(_MessageRemedy(**entry) for entry in _TABLE["messages"]),
)
_NO_OPERATOR: Final = "NoOperator"
_NO_ACTION: Final = "; no action needed."
_PLANNED_RESTARTS: Final = ("Resized", "Resumed", "NodesReadmitted", "NodeUnhealthy", "Drained")
"""Reasons of restarts that follow no failure."""
_BEFORE_FIRST_STEP: Final = ("WaitingForWorkers", "NoStepYet")
_AFTER_STEPS: Final = ("Scheduled", "Rendezvoused", "Progressing", "TrainsAsOne", "Restarting")
"""Conditions that may keep a job from further steps."""
_DESCRIBE: Final = "kubectl describe ddp {name} has all conditions and events."
# A running operator handles a new job within a second.
_UNSEEN_PATIENCE: Final = timedelta(seconds=10)
_EVENT_LIMIT: Final = 300
# Kubernetes repeats the warning of a fault that lasts at least every five minutes.
_EVENT_AGE: Final = timedelta(minutes=10)
_EVENT_LATENESS: Final = timedelta(seconds=30)
_START_WARNINGS: Final = frozenset((*EXPLAINING_EVENTS, *BLOCKING))
# The cause is in the pod's status.
_ECHOES: Final = ("BackOff", "Failed")
# The message of ``status.scheduling`` about a restarted sidecar.
_SIDECAR: Final = re.compile(r"sidecar (?P<container>[a-z0-9-]+) of pod (?P<pod>[a-z0-9.-]+):")
# A standby or a new pod takes over within this time after a leader has ended or its Lease has expired.
_TAKEOVER: Final = timedelta(seconds=15)
# While steps are made, the operator writes the status every half a minute; it reports a stall after a third of the
# watchdog's time.
_STATUS_AGE: Final = timedelta(minutes=2)
_STALL_SECONDS: Final = 300
_LONG_PAUSE: Final = timedelta(minutes=1)  # since the last step
_CHECK_OPERATOR: Final = (
    "Check that the operator is running and serves this namespace: kubectl get pods -A -l "
    "app.kubernetes.io/name=ddp-operator shows it."
)


class LeaseRenewal(NamedTuple):
    """The last renewal of an operator's Lease, and for how long it was valid."""

    time: datetime
    duration: timedelta


class Note(NamedTuple):
    """A further finding about a job that trains, with its own remedy (empty if none is needed).

    ``is_about_ranks``: the table of ranks has its details.
    """

    what: str
    todo: str = ""
    is_about_ranks: bool = False


@dataclass(frozen=True, slots=True)
class Why:
    """The explanation: ``what`` is the state and its reason, ``todo`` the remedy (empty if none is needed).

    ``notes``: what else a person should know, present problems before past ones.
    """

    name: str
    phase: str
    reason: str
    what: str
    todo: str = ""
    notes: tuple[Note, ...] = ()

    def __str__(self) -> str:
        parts = (self.what, self.todo, *(part for note in self.notes for part in (note.what, note.todo)))
        return " ".join(filter(None, parts))


@dataclass(frozen=True, slots=True)
class _Case:
    """A job to explain."""

    name: str
    metadata: Mapping[str, Any]
    status: Status
    events: Sequence[Mapping[str, Any]]
    now: datetime
    option: str
    spec: Mapping[str, Any]
    lease: LeaseRenewal | None

    @property
    def phase(self) -> str:
        return self.status.phase or "Pending"

    def conclude(self, reason: str, what: str, remedy: str = "") -> Why:
        """Return the explanation with a remedy whose commands are filled in."""
        return Why(self.name, self.phase, reason, what, self.fill(remedy))

    def fill(self, remedy: str) -> str:
        """Return a remedy whose commands name the job and, if needed, its namespace."""
        saved = self.status.checkpoint
        onward = "from the beginning: no checkpoint was reported"
        if saved is not None:
            onward = f"from the checkpoint of step {saved.step:,}"
        return remedy.format(name=self.name + self.option, option=self.option, onward=onward)


def explain_why(
    resource: Mapping[str, Any],
    events: Sequence[Mapping[str, Any]],
    now: datetime,
    *,
    option: str = "",
    lease: LeaseRenewal | None = None,
) -> Why:
    """Return the explanation of a resource. ``events``: those about it and its child objects, oldest first.

    ``option``: what the suggested commands need to find its namespace, such as `` -n team``. ``lease``: the operator's;
    None: unknown.
    """
    metadata = resource["metadata"]
    name = str(metadata["name"])
    stored = read_status(resource)
    if stored.lacks_phase:  # a newer operator wrote it, or another client
        what = f"{name} has a status that this version of ddp cannot read."
        return Why(name, "Unknown", "", what, _DESCRIBE.format(name=name + option))

    case = _Case(name, metadata, stored.status, events, now, option, resource.get("spec") or {}, lease)
    why = next((why for step in _STEPS if (why := step(case)) is not None), None) or _explain_training(case)
    advice = _advise_on_sidecar(case)
    if advice and case.phase not in ENDED_PHASES:
        why = replace(why, todo=" ".join(filter(None, (why.todo, advice))))
    return _add_operator_absence(case, _add_worker_cluster(case, why))


def _add_worker_cluster(case: _Case, why: Why) -> Why:
    """Return an explanation with the cluster in which MultiKueue runs the pods, or ran them."""
    cluster = find_worker_cluster({"metadata": case.metadata, "spec": case.spec})
    if not cluster:
        return why
    if case.phase in ENDED_PHASES:
        return replace(why, what=f"{why.what} It ran in cluster {cluster} (MultiKueue).")
    command = f"ddp logs {case.name}{case.option} --context NAME"
    todo = f"Its pods and logs are in cluster {cluster} (MultiKueue): {command} reads them."
    return replace(why, todo=" ".join(filter(None, (why.todo, todo))))


def _add_operator_absence(case: _Case, why: Why) -> Why:
    """Return an explanation with a warning if no operator handles the job, so that its state is an old one."""
    if case.phase in ENDED_PHASES or not case.status.conditions:
        return why
    absence = _describe_absence(case)
    if not absence:
        return why
    what = f"{absence}; failures, suspension and resizing are not handled. The last known state: {why.what}"
    return replace(why, reason=_NO_OPERATOR, what=what, todo=_CHECK_OPERATOR)


def _describe_absence(case: _Case) -> str:
    """Return how long no operator has acted, by its Lease or the age of a status that should change; else empty."""
    if case.lease is not None:
        age = case.now - case.lease.time
        if age < case.lease.duration + _TAKEOVER:
            return ""
        return f"No operator has renewed its Lease for {format_duration(age.total_seconds())}"

    if find_foreign_manager({"spec": case.spec}) is not None:
        return ""  # its manager writes the status
    written = _find_status_time(case.metadata)
    is_training = case.status.is_true("Progressing") and case.status.progress is not None
    if written is None or not is_training or case.phase != "Running":
        return ""
    watchdog = case.spec.get("watchdog") or {}
    patience = _STATUS_AGE + timedelta(seconds=(watchdog.get("stallSeconds") or _STALL_SECONDS) / 3)
    age = case.now - written
    if age < patience:
        return ""
    return f"No operator has written the status for {format_duration(age.total_seconds())}, although the job trains"


def _find_status_time(metadata: Mapping[str, Any]) -> datetime | None:
    """Return when the operator last changed the status, as the API server recorded it."""
    entries = metadata.get("managedFields") or ()
    times = [
        parse_time(entry.get("time"))
        for entry in entries
        if (entry.get("manager"), entry.get("subresource")) == (MANAGED_BY, "status")
    ]
    return max(filter(None, times), default=None)


def _explain_deletion(case: _Case) -> Why | None:
    if "deletionTimestamp" not in case.metadata:
        return None
    return case.conclude("Deleting", f"{case.name} is being deleted.", "Its pods end within their grace period.")


def _explain_foreign_manager(case: _Case) -> Why | None:
    manager = find_foreign_manager({"spec": case.spec})
    if manager in (None, MULTIKUEUE):
        return None
    what = f"{case.name} is managed by {manager} (spec.managedBy); the DDP operator of this cluster ignores it."
    return Why(case.name, case.phase, "ManagedElsewhere", what, "Check that controller, or the cluster that it uses.")


def _explain_success(case: _Case) -> Why | None:
    if case.phase != "Succeeded":
        return None
    success = _describe_success(case)
    doubts = find_doubts(case.status)
    if not doubts:
        return case.conclude("", f"{success} {_describe_unknown_groups(case.status)}".rstrip())
    what = " ".join(
        [f"{success} But {sentence(doubts[0].message)}", *(sentence(doubt.message) for doubt in doubts[1:])]
    )
    return case.conclude(doubts[0].reason, what, REMEDIES[doubts[0].reason])


def _explain_failure(case: _Case) -> Why | None:
    if case.phase != "Failed":
        return None
    failed = case.status.condition("Failed")
    if failed is not None and failed.status != "True":
        failed = None
    reason = failed.reason if failed else ""
    failure = case.status.last_failure

    what = _describe_end(case, failed)
    revision = (case.spec.get("code") or {}).get("revision")
    if revision:
        what += f" Its code was {revision}."
    remedy = REMEDIES.get(reason, "")
    if failure is None:
        return case.conclude(reason, what, remedy or _READ_LOGS)
    if not _is_cause(failure, reason):
        what += f" The last failure was {_describe_cause(failure)}"
    # The hint explains the error; the reason only explains why there was no further attempt.
    if not remedy and not failure.remedy:
        remedy = _READ_LOGS
    todo = " ".join(filter(None, (_describe_hint(failure), case.fill(remedy))))
    return Why(case.name, case.phase, reason, what, todo)


def _describe_end(case: _Case, failed: Condition | None) -> str:
    attempts = f" after {case.status.attempt} attempts" if case.status.attempt > 1 else ""
    what = f"{case.name} has failed{attempts}"
    if failed is None:
        return f"{what}."
    failure = case.status.last_failure
    message = describe_end(failed, failure)
    if failure is not None and _is_cause(failure, failed.reason):
        is_same = failed.reason == failure.category
        end = _capitalize(message) if is_same else f"It was given up ({failed.reason}): {message}"
        return f"{what}: {_describe_cause(failure)} {sentence(end) if message else ''}".rstrip()
    return f"{what} ({failed.reason}): {sentence(message)}" if message else f"{what} ({failed.reason})."


def _is_cause(failure: LastFailure, reason: str) -> bool:
    """Return whether the last failure, and not a deadline, ended the job."""
    return bool(failure.conclusion) or failure.category == reason


def _explain_held(case: _Case) -> Why | None:
    dev = case.status.dev
    if case.phase != "Held" or dev is None:
        return None
    what = f"{case.name} has no run in its pods: {describe_run(case.status)}"
    if dev.run:
        what = f"{_capitalize(describe_run(case.status))}"
    hint = ""
    if dev.result == "Failed" and case.status.last_failure is not None:
        hint = _describe_hint(case.status.last_failure)
    if dev.release_time is None:  # a former run
        return Why(case.name, case.phase, case.status.reason, sentence(what), hint)
    left = format_duration(max(0.0, (dev.release_time - case.now).total_seconds()))
    what += f"; the pods of {case.name} are held for {left} more"
    return Why(
        case.name, case.phase, case.status.reason, sentence(what), f"{hint} {case.fill(REMEDIES['Held'])}".strip()
    )


def _explain_unseen(case: _Case) -> Why | None:
    if case.status.conditions:
        return None
    created = parse_time(case.metadata.get("creationTimestamp"))
    age = case.now - created if created else _UNSEEN_PATIENCE
    if age < _UNSEEN_PATIENCE:
        return Why(case.name, "Pending", "New", f"{case.name} is new; the operator has not handled it yet.")
    what = f"No operator has handled {case.name} in the {format_duration(age.total_seconds())} since it was created."
    return Why(
        case.name,
        "Pending",
        _NO_OPERATOR,
        what + _describe_last_warning(case, what),
        _CHECK_OPERATOR,
    )


def _explain_obstacle(case: _Case) -> Why | None:
    obstacle = find_obstacle(case.status)
    if obstacle is None:
        return None
    what = _describe_obstacle(case, obstacle)
    # A restarting job restarts automatically, unless its pods are blocked.
    if obstacle.type == "Restarting":
        blocker = find_blocker(case.status)
        if blocker is not None:
            what += f" Its pods wait ({blocker.reason}): {sentence(blocker.message)}"
            obstacle = blocker
    return case.conclude(obstacle.reason, what, _find_remedy(case.status, obstacle))


def _explain_failing_upload(case: _Case) -> Why | None:
    uploaded = case.status.condition("CheckpointsUploaded")
    if uploaded is None or uploaded.status != "False":
        return None
    what = f"{_describe_training(case, has_problem=True)} But {sentence(uploaded.message)}"
    return replace(case.conclude(uploaded.reason, what, REMEDIES[uploaded.reason]), notes=_list_notes(case))


def _explain_divergence(case: _Case) -> Why | None:
    progress = case.status.progress
    if progress is None or not has_diverged(progress):
        return None
    training = _describe_training(case, has_problem=True)
    what = f"{training} But its loss is {progress.loss}: further steps cannot improve the model."
    return Why(case.name, case.phase, "", what, REMEDIES["LossNotFinite"], _list_notes(case))


def has_diverged(progress: Progress | None) -> bool:
    """Return whether the newest loss is not a number."""
    return progress is not None and (progress.loss or "").lstrip("-") in ("nan", "inf")


def _explain_training(case: _Case) -> Why:
    return Why(case.name, case.phase, "", _describe_training(case), notes=_list_notes(case))


_STEPS: Final[tuple[Callable[[_Case], Why | None], ...]] = (
    _explain_deletion,
    _explain_foreign_manager,
    _explain_success,
    _explain_failure,
    _explain_held,
    _explain_unseen,
    _explain_obstacle,
    _explain_failing_upload,
    _explain_divergence,
)
"""The explanations in the order of their importance; the first one that applies is returned."""


def _describe_obstacle(case: _Case, condition: Condition) -> str:
    opening = _describe_waiting(case, condition)
    what = f"{opening}: {sentence(condition.message)}" if condition.message else f"{opening}."
    what += _describe_last_step(case, condition)
    queue = case.status.queue
    if queue is not None and queue.start_p50 is not None and queue.start_p90 is not None:
        median, late = ((time - case.now).total_seconds() for time in (queue.start_p50, queue.start_p90))
        what += f" Expected in {format_estimate(median)}, with 90% within {format_estimate(late)}."
    failure = case.status.last_failure
    if failure is not None and _is_after_restart(case.status, condition):
        is_stated = describe_detail(failure) in condition.message
        what += f" {_describe_hint(failure)}" if is_stated else f" The last failure was {_describe_cause(failure)}"
    if condition.type in ("Scheduled", "Rendezvoused", "Progressing"):
        what += _describe_aside(case.status)
        what += _describe_last_warning(case, what, condition.last_transition_time)
    return what


def _describe_last_step(case: _Case, condition: Condition) -> str:
    """Return when a job made its last step that has made some and makes none now; of a stall it is stated already."""
    last = case.status.progress.last_step_time if case.status.progress is not None else None
    if last is None or condition.type not in _AFTER_STEPS or condition.reason == STALLED:
        return ""
    return f" Its last step ended {format_duration(max(0.0, (case.now - last).total_seconds()))} ago."


def _describe_waiting(case: _Case, condition: Condition) -> str:
    since = condition.last_transition_time
    joined = case.status.condition("Rendezvoused")
    if condition.type == "Scheduled" and joined is not None and joined.status == "False":
        since = min(since, joined.last_transition_time)  # pods that start and fail again keep the job waiting
    progress = case.status.progress
    if condition.reason == STALLED and progress is not None and progress.last_step_time is not None:
        since = progress.last_step_time
    # The job did not wait while it was suspended.
    since = max(filter(None, (since, case.status.attempt_time)))
    lasting = ""
    if since <= case.now:
        lasting = f" for {format_duration((case.now - since).total_seconds())}"
    if condition.reason == "Stopping":
        return f"{case.name} is stopping"
    if condition.reason == "Finished":
        return f"{case.name} has finished training{lasting} but its pods have not ended"
    states = {
        "Accepted": f"is not accepted ({condition.reason})",
        "Suspended": f"has been suspended{lasting}",
        "Restarting": f"has been restarting{lasting} ({condition.reason})",
        "InputsReady": f"has waited{lasting} for its inputs, before it requests GPUs ({condition.reason})",
        "Scheduled": f"has waited{lasting} for its pods to be scheduled and started ({condition.reason})",
        "Rendezvoused": f"has waited{lasting} for its ranks to join the rendezvous ({condition.reason})",
        "TrainsAsOne": f"is running but not as one job{lasting}{_describe_position(case.status)} ({condition.reason})",
        "Progressing": f"is running without a step{lasting}{_describe_position(case.status)} ({condition.reason})",
    }
    return f"{case.name} {states[condition.type]}"


def _describe_position(status: Status) -> str:
    step = _describe_step(status.progress or Progress())
    return f" after {step}" if step else ""


def _describe_step(progress: Progress) -> str:
    """Return the last step and the number of all; empty: it is unknown."""
    if progress.step is None:
        return ""
    return f"step {progress.step:,}" + (f" of {progress.total_steps:,}" if progress.total_steps else "")


def _find_remedy(status: Status, condition: Condition) -> str:
    # The name of a job may look like a message.
    message = re.sub(rf"^{re.escape(status.job_name)}-\S+( \(and \S+ more pods?\))?: ", "", condition.message)
    for entry in _MESSAGE_REMEDIES:
        match = re.search(entry.pattern, message) if entry.reason in ("", condition.reason) else None
        if match is not None:
            return _insert_names(entry.remedy, match)
    remedy = REMEDIES.get(condition.reason, _DESCRIBE)
    if not _is_after_restart(status, condition):
        return remedy

    # The same fault may end every attempt, so its hint precedes the announcement of another one.
    hint = _describe_hint(status.last_failure) if status.last_failure else ""
    if not hint:
        return remedy
    return f"{_escape(hint)} {remedy.replace(_NO_ACTION, '.')}"


def _insert_names(remedy: str, match: re.Match[str]) -> str:
    """Return a remedy with the names that its pattern found; ``_Case.fill`` replaces the other ones in braces."""
    for name, value in match.groupdict().items():
        remedy = remedy.replace(f"{{{name}}}", _escape(value or ""))
    return remedy


def _is_after_restart(status: Status, condition: Condition) -> bool:
    """Return whether a condition reports that training restarts after a failure, or has not continued since."""
    if condition.type == "Restarting":
        return condition.reason not in _PLANNED_RESTARTS
    return bool(status.restarts.all) and condition.reason in _BEFORE_FIRST_STEP


def _escape(text: str) -> str:
    """Return a text of a pod for ``_Case.fill``, which replaces names in braces."""
    return text.replace("{", "{{").replace("}", "}}")


def _describe_success(case: _Case) -> str:
    status = case.status
    duration = ""
    if status.start_time and status.completion_time:
        seconds = (status.completion_time - status.start_time).total_seconds()
        duration = f" in {format_duration(seconds)}"
    progress = status.progress or Progress()
    step = f"{progress.step:,}" if progress.step else ""
    measured = {"step": step, "loss": progress.loss, "validation accuracy": progress.val_accuracy}
    results = [f"{label} {value}" for label, value in measured.items() if value]
    restarts = status.restarts.all
    if restarts:
        results.append(f"{restarts} restart{'s' if restarts != 1 else ''}")
    success = f"{case.name} has succeeded{duration}" + (f": {', '.join(results)}." if results else ".")
    return f"{success} {describe_stragglers(status)}".rstrip()


class _SlowPart(NamedTuple):
    """Why a rank is slow, and where to look."""

    cause: str
    remedy: str


_SLOW_PARTS: Final[Mapping[StragglerCause, _SlowPart]] = {
    "data": _SlowPart("it waits for data", "look at its storage and its DataLoader workers"),
    "compute": _SlowPart("its computation is slow", "look at its node (clock rates, other processes) and its batches"),
    "sleep": _SlowPart(
        "its process uses hardly any CPU", "look for a sleep, a lock, the network or storage in its steps"
    ),
    "throttled": _SlowPart("its pod has used up its limit of CPUs", "raise or remove that limit"),
    "cpu": _SlowPart("it waits for a CPU", "look at what else runs on its node, and at its number of threads"),
    "storage": _SlowPart("it waits for storage", "look at the disks and file systems of its node"),
    "memory": _SlowPart(
        "its pod waits for memory that the kernel reads back from a disk", "raise its request and limit of memory"
    ),
}


def describe_stragglers(status: Status) -> str:
    """Return the cause and the remedy of the slowest rank, for which all others wait in each step; empty without."""
    note = _note_stragglers(status)
    return f"{note.what} {note.todo}".strip()


def _note_stragglers(status: Status) -> Note:
    if not status.stragglers:
        return Note("")
    part = _SLOW_PARTS[status.stragglers[0].cause]
    what = f"{_capitalize(name_stragglers(status))}: {part.cause}."
    return Note(what, _capitalize_sentence(part.remedy), is_about_ranks=True)


def explain_straggler(cause: StragglerCause) -> str:
    """Return why a rank's own work is slow."""
    return _SLOW_PARTS[cause].cause


def name_stragglers(status: Status) -> str:
    """Return which rank is slow, by which factor of its own work, and which others are; empty without one."""
    if not status.stragglers:
        return ""
    slowest, *others = status.stragglers
    also = f" (also slow: {', '.join(f'rank {other.rank}' for other in others)})" if others else ""
    return f"rank {slowest.rank} works {slowest.ratio} times as long as its peers in each step{also}"


def _describe_training(case: _Case, *, has_problem: bool = False) -> str:
    """Return the progress, and that nothing blocks it, unless a ``has_problem`` or the notes contradict."""
    status = case.status
    progress = status.progress or Progress()
    parts = [
        _describe_step(progress),
        f"{progress.percent} done" if progress.percent else "",
        f"{progress.eta} left" if progress.eta else "",
    ]
    measured = f" ({', '.join(filter(None, parts))})" if any(parts) else ""
    verb = "is running" if status.progress is None else "is training"
    pause = case.now - (progress.last_step_time or case.now)
    state = "" if has_problem or _list_notes(case) else "; nothing blocks it"
    if pause >= _LONG_PAUSE:
        state = f"; its last step ended {format_duration(pause.total_seconds())} ago"
    return f"{case.name} {verb}{measured}{state}.{_describe_aside(status)}"


def _list_notes(case: _Case) -> tuple[Note, ...]:
    """Return what a job that trains has besides, present problems first, each with its remedy."""
    status = case.status
    see_log = case.fill("The reasons are in pod 0's log: ddp logs {name} --node 0.")
    notes = [
        Note(_describe_nodes(status)),
        _note_stragglers(status),
        Note(_describe_unknown_groups(status)),
        Note(_describe_preflight(status.preflight), see_log),
        _note_survived_failure(status),
    ]
    return tuple(note for note in notes if note.what)


def _note_survived_failure(status: Status) -> Note:
    restarts = status.restarts.all
    failure = status.last_failure
    if not restarts or failure is None:
        return Note("")
    times = "once" if restarts == 1 else f"{restarts} times"
    what = f"It was restarted {times}; the last failure was {_describe_cause(failure)}"
    return Note(what, _describe_hint(failure))


def _describe_aside(status: Status) -> str:
    """Return the message about scheduled pods: a pending change of the size, restarted sidecars."""
    scheduled = status.condition("Scheduled")
    if scheduled is None or scheduled.reason not in (CHANGE_PENDING, SIDECAR_RESTARTED):
        return ""
    return f" {sentence(scheduled.message)}"


def _advise_on_sidecar(case: _Case) -> str:
    """Return the probe for which the kubelet restarts a sidecar, or the command that prints why it ended.

    Empty if none was restarted.
    """
    scheduled = case.status.condition("Scheduled")
    if scheduled is None or scheduled.reason != SIDECAR_RESTARTED:
        return ""
    match = _SIDECAR.search(scheduled.message)
    if match is None:
        return ""
    about_pod = [event for event in case.events if (event.get("involvedObject") or {}).get("name") == match["pod"]]
    kill = find_kill(about_pod, match["container"])
    if kill is not None:
        remedy = PROBE_REMEDY.format(field=kill.field, container=kill.container)
        because = f": {kill.message}" if kill.message else ""
        return f"{sentence(f'Its {kill.field} fails{because}')} {_capitalize_sentence(remedy)}"
    command = f"kubectl logs {match['pod']} -c {match['container']} --previous{case.option}"
    return f"Why the sidecar ended: {command}."


def _describe_nodes(status: Status) -> str:
    """Return who drains the job's nodes, or the faults of these."""
    nodes = status.condition("NodesHealthy")
    return _capitalize_sentence(nodes.message) if nodes is not None and nodes.status == "False" else ""


def _describe_unknown_groups(status: Status) -> str:
    distributed = status.condition("TrainsAsOne")
    if distributed is None or distributed.status != "Unknown":
        return ""
    return _capitalize_sentence(distributed.message)


def _describe_preflight(preflight: PreflightStatus | None) -> str:
    """Return the result of a preflight that failed without ending the job."""
    if preflight is None or not preflight.failed:
        return ""
    findings = []
    if "transport" in preflight.failed:
        findings.append(f"traffic between pods uses {preflight.transport}")
    if "allreduce" in preflight.failed and preflight.all_reduce_megabytes_per_second:
        findings.append(f"an all-reduce transfers {preflight.all_reduce_megabytes_per_second} MB/s")
    if "pairs" in preflight.failed and preflight.slowest:
        findings.append(f"the slowest pair is {preflight.slowest}")
    details = f": {', '.join(findings)}" if findings else ""
    return f"Its preflight failed in {', '.join(preflight.failed)}{details}."


def _describe_hint(failure: LastFailure) -> str:
    return _capitalize_sentence(failure.remedy)


def _capitalize_sentence(text: str) -> str:
    return sentence(_capitalize(text))


def _describe_cause(failure: LastFailure) -> str:
    return sentence(describe_failure(failure, whole=True))


def _is_resolved(case: _Case, event: Mapping[str, Any]) -> bool:
    """Return whether a warning is about the start of pods, and they have started, or have a node at least."""
    reason = event.get("reason")
    if reason not in _START_WARNINGS or not case.status.is_true("Scheduled"):
        return False
    rendezvoused = case.status.condition("Rendezvoused")
    waits_for_kubelet = rendezvoused is not None and rendezvoused.reason == WAITING_FOR_RANKS
    return reason == SCHEDULER_EVENT or not waits_for_kubelet


def _describe_last_warning(case: _Case, text: str, since: datetime | None = None) -> str:
    """Return the newest warning about the job or its child objects, unless ``text`` contains it.

    Warnings that are older than the wait, which began at ``since``, or are no longer repeated, belong to another fault.
    """
    created = parse_time(case.metadata.get("creationTimestamp"))
    began = since - _EVENT_LATENESS if since is not None else None
    earliest = max(filter(None, (created, began, case.now - _EVENT_AGE)))
    for event in reversed(case.events):
        time = parse_time(read_event_time(event))
        if time is not None and time < earliest:
            break
        message = " ".join(str(event.get("message") or "").split())
        is_news = event.get("type") == "Warning" and event.get("reason") not in _ECHOES
        if not is_news or not message or _is_resolved(case, event):
            continue
        if _strip_pod_suffixes(message.rstrip(".")) in _strip_pod_suffixes(text):
            return ""
        return f" The last warning was {event.get('reason')}: {sentence(message[:_EVENT_LIMIT])}"
    return ""


def _strip_pod_suffixes(text: str) -> str:
    """Return a message without the end of each pod's name, which differs between attempts to create it."""
    return re.sub(rf'-(?:[0-9]+-{POD_SUFFIX}|\*)(?=")', "", text)


# What only a cluster has, in remedies of the launcher and of this module.
_CLUSTER: Final = re.compile(
    r"kubectl|resources\.limits|memory limit|\bspec\.(?:sharedMemory|template|securityProfile)\b|ephemeral-storage|"
    r"emptyDir|\bclaim|fsGroup|runAsUser|ddp delete|submit the (?:job|file)|NetworkPolic|podPidsLimit|imagePullSecrets"
)
_CLAUSES: Final = re.compile(r"(; |, then |, or |, and )")


def keep_local_advice(why: Why) -> Why:
    """Return an explanation of a run on this machine, without remedies that only a cluster can follow."""
    notes = tuple(note._replace(todo=omit_cluster_advice(note.todo)) for note in why.notes)
    return replace(why, todo=omit_cluster_advice(why.todo), notes=notes)


def omit_cluster_advice(remedy: str) -> str:
    """Return a remedy without the clauses that only a cluster can follow; a sentence of such clauses is kept."""
    return " ".join(map(_shorten, re.split(r"(?<=[.!?]) ", remedy)))


def _shorten(sentence: str) -> str:
    opening, colon, advice = sentence.rpartition(": ")
    end = "." if advice.endswith(".") else ""
    parts = ["", *_CLAUSES.split(advice.removesuffix("."))]
    kept = [
        (before, clause) for before, clause in zip(parts[::2], parts[1::2], strict=True) if not _CLUSTER.search(clause)
    ]
    if not kept:
        return sentence
    return f"{opening}{colon}{kept[0][1]}{''.join(before + clause for before, clause in kept[1:])}{end}"

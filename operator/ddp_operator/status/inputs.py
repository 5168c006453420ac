"""The inputs of a job on their way: what is done before attempt 1, and what the condition InputsReady says. Pure.

The Job that fetches them is that of attempt 0. It is made while the job is not suspended, anew where the spec has
changed, and it goes as every former attempt's Job when attempt 1 begins.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Final

from msgspec.structs import replace

from ddp_operator.api.job import DDPTrainingJob
from ddp_operator.api.status import InputStatus, Status
from ddp_operator.failures import InputReport
from ddp_operator.kubeobjects import truncate
from ddp_operator.status import attempts, lost_nodes
from ddp_operator.status import conditions as c
from ddp_operator.status.attempt_conditions import describe_suspension
from ddp_operator.status.conditions import Fact, set_conditions
from ddp_operator.status.decision import AT_ONCE, Action, Decision, DeleteJob, EnsureChildren
from ddp_operator.status.observation import State
from ddp_operator.status.scheduling import describe_scheduling, event_poll_delay
from ddp_operator.status.views import JobView

_LATER: Final = 10.0


def fetch_inputs(state: State, progress_interval: float) -> Decision | None:
    """Return what is done about inputs that are missing; None: attempt 1 may begin."""
    job, view = state.job, state.attempt_job
    if not job.spec.inputs or are_fetched(job):
        return None
    status, stopping = _take_reports(state), view is not None and view.deleting
    current = view is not None and not stopping and view.spec_digest == job.spec_digest
    if view is not None and current and view.finished:
        decision = _succeed(state, status) if view.complete else _fail(state, status, view)
        # Watches may show the Job's end before that of its pod.
        return dataclasses.replace(decision, needs_fresh_read=not any(pod.termination for pod in state.pods))
    actions: list[Action] = []
    waits = [_LATER if view is None or stopping else progress_interval]
    alive = any(pod.alive for pod in (*state.observation.pods, *state.observation.orphans))
    if view is not None and not stopping and (job.spec.suspend or not current):
        actions.append(DeleteJob(view.name, view.uid))
    elif view is None and not alive and not job.spec.suspend:
        actions.append(EnsureChildren(0, 0))
        status = replace(status, attempt_time=truncate(state.now))
    actions += lost_nodes.fail_lost_pods(job, state.observation, state.now, waits)
    question = event_poll_delay(job, state.observation, state.now, state.observation.polling_jobs)
    waits += [question] if question is not None else []
    return Decision(_describe(state, status, _describe_fetch(state, status)), tuple(actions), min(waits))


def are_fetched(job: DDPTrainingJob) -> bool:
    """Tell whether all that the spec names is where pods find it."""
    places = [one.place for one in job.status.inputs if one.phase == "Fetched"]
    return job.status.is_true(c.INPUTS_READY) and places == [one.place for one in job.spec.inputs or ()]


def _succeed(state: State, status: Status) -> Decision:
    inputs = tuple(replace(one, phase="Fetched", reason="", message="") for one in status.inputs)
    message = f"{len(inputs)}/{len(inputs)} inputs fetched, {_size(sum(one.bytes for one in inputs))}"
    fact = Fact(c.INPUTS_READY, "True", c.FETCHED, message)
    return Decision(_describe(state, replace(status, inputs=inputs), fact), requeue_after=AT_ONCE)


def _fail(state: State, status: Status, view: JobView) -> Decision:
    """End the job: what a pod has said is final, or several have tried for long enough."""
    failed = next((one for one in status.inputs if one.reason in c.FETCH_FAILURES), None)
    ends = [pod.termination for pod in state.pods if pod.termination and pod.termination.container_exit_code]
    reason = failed.reason if failed else c.FETCH_FAILED
    message = ends[-1].message if ends else view.failed_message
    if ends and ends[-1].remedy:
        message += f"; {ends[-1].remedy}"
    status = _describe(state, status, Fact(c.INPUTS_READY, "False", reason, message))
    ended = dataclasses.replace(state, job=dataclasses.replace(state.job, status=status))
    decision = attempts.fail(ended, None, reason, message)
    return dataclasses.replace(decision, status=replace(decision.status, nodes=status.nodes))


def _take_reports(state: State) -> Status:
    """Return the status with how far the inputs are by the page of the pod that fetches, or its last words."""
    page, newest = state.observation.page, state.pods.newest
    ends = [newest[index].termination for index in sorted(newest)]
    said = [end.inputs for end in ends if end is not None]
    said.sort(key=lambda inputs: all(one.phase != "Failed" for one in inputs))  # stable
    reports = (page.inputs if page is not None else ()) or next(iter(said), ())
    by_name: Mapping[str, InputReport] = {one.name: one for one in reports}
    known = {one.place: one for one in state.status.inputs}
    inputs = []
    for one in state.spec.inputs or ():
        before = known.get(one.place) or InputStatus(name=one.label, phase="Pending", place=one.place)
        report = by_name.get(one.label)
        inputs.append(replace(_merge(before, report), name=one.label, checksum=one.checksum or ""))
    return replace(state.status, inputs=tuple(inputs))


def _merge(before: InputStatus, report: InputReport | None) -> InputStatus:
    if report is None:
        return before
    return replace(
        before,
        phase=report.phase,
        bytes=report.bytes,
        total_bytes=report.total_bytes,
        etag=report.etag,
        reason=report.reason if report.reason in c.FETCH_FAILURES else "",
        message=report.message,
    )


def _describe_fetch(state: State, status: Status) -> Fact:
    """Return InputsReady while inputs are missing."""
    view = state.attempt_job
    if state.spec.suspend:
        return Fact(c.INPUTS_READY, "False", c.NOT_FETCHED, "inputs are fetched once the job is resumed")
    if view is not None:
        fact = describe_scheduling(state.job, state.observation, 0, view.nodes, state.now)
        if fact.status == "False":
            return dataclasses.replace(fact, type=c.INPUTS_READY, message=f"to fetch the inputs: {fact.message}")
    reason = next((one.reason for one in status.inputs if one.reason), c.FETCHING_INPUTS)
    return Fact(c.INPUTS_READY, "False", reason, describe_progress(status.inputs))


def describe_progress(inputs: Sequence[InputStatus | InputReport]) -> str:
    """Return how far inputs are, in one line."""
    sizes = [one.total_bytes for one in inputs]
    known = [size for size in sizes if size is not None]
    total = f" of {_size(sum(known))}" if known and len(known) == len(sizes) else ""
    message = f"fetching inputs: {_size(sum(one.bytes for one in inputs))}{total}"
    complete = sum(one.phase == "Fetched" for one in inputs)
    message += f", {complete}/{len(inputs)} complete" if len(inputs) > 1 else ""
    waiting = next((one for one in inputs if one.message), None)
    return message if waiting is None else f"{message}; input {waiting.name}: {waiting.message}"


def _describe(state: State, status: Status, fact: Fact) -> Status:
    alive = sum(pod.alive for pod in (*state.observation.pods, *state.observation.orphans))
    suspended = describe_suspension(state.job, status, alive)
    facts = [
        Fact(c.ACCEPTED, "True", c.VALID),
        suspended,
        fact,
        Fact(c.SUCCEEDED, "False", c.NOT_FINISHED),
        Fact(c.FAILED, "False", c.NOT_FINISHED),
    ]
    status = replace(status, phase="Suspended" if suspended.status == "True" else "Pending")
    return set_conditions(status, facts, state.now, state.job.generation)


def _size(number: int) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if number >= size:
            return f"{number / size:.3g} {unit}" if number < 1000 * size else f"{number / size:.0f} {unit}"
    return f"{number} bytes"

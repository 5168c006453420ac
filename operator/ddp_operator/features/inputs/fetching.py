"""Fetching of a job's inputs before attempt 1, and the condition InputsReady. Pure.

The Job of attempt 0 fetches them. It is created while the training job is not suspended, and again if the spec changes.
When attempt 1 starts, it is deleted like the Job of any former attempt.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Final, cast

from msgspec.structs import replace

from ddp_operator.api.job import JobSize
from ddp_operator.api.kubeobjects import truncate
from ddp_operator.api.status import InputStatus, Status
from ddp_operator.decide import conditions as c
from ddp_operator.decide import other_reasons
from ddp_operator.decide.attempt import observe_attempt
from ddp_operator.decide.attempts import fail
from ddp_operator.decide.conditions import Fact
from ddp_operator.decide.input_texts import describe_inputs, format_size
from ddp_operator.decide.losses import fail_lost_pods
from ddp_operator.decide.preparation import count_alive, describe_before_start
from ddp_operator.decide.scheduling import describe_scheduling
from ddp_operator.decide.state import AT_ONCE, Action, Decision, DeleteJob, EnsureChildren, State
from ddp_operator.decide.views import JobView
from ddp_operator.features.inputs.fields import Input
from ddp_operator.reading.parts import read_end_part, read_report_part
from ddp_pod.contract.pod_end import InputReport

FETCHED: Final = "Fetched"
NOT_FETCHED: Final = "NotFetched"
FETCH_FAILED: Final = "FetchFailed"
FETCH_FAILURES: Final = (
    other_reasons.UNREACHABLE,
    FETCH_FAILED,
    "NotFound",
    "AccessDenied",
    "ChecksumMismatch",
    "NoSpace",
    "NotWritable",
    "Unsupported",
)
"""Reasons of InputsReady that the launcher defines; of Failed too."""
_LATER: Final = 10.0


def fetch_inputs(state: State, wanted: Sequence[Input], progress_interval: float) -> Decision | None:
    """Return the decision while inputs are missing; None: attempt 1 may start."""
    if not wanted or are_fetched(state.status, wanted):
        return None
    status = _read_reports(state, wanted)
    view = state.attempt_job
    stopping = view is not None and view.deleting
    current = view is not None and not stopping and view.spec_digest == state.job.spec_digest
    if view is not None and current and view.finished:
        decision = _succeed(state, status) if view.complete else _fail(state, status, view)
        # A watch may report the Job's end before that of its pod.
        return dataclasses.replace(decision, needs_fresh_read=not any(pod.termination for pod in state.pods))

    actions: list[Action] = []
    waits = [_LATER if view is None or stopping else progress_interval]
    if view is not None and not stopping and (state.spec.suspend or not current):
        actions.append(DeleteJob(view.name, view.uid))
    elif view is None and not count_alive(state.observation) and not state.spec.suspend:
        actions.append(EnsureChildren(0, 0))
        status = replace(status, attempt_time=truncate(state.now))
    actions += fail_lost_pods(state, waits)
    waits += [remark.wait for remark in state.remarks if remark.wait is not None]
    return Decision(describe_before_start(state, status, _describe_fetch(state, status)), tuple(actions), min(waits))


def are_fetched(status: Status, wanted: Sequence[Input]) -> bool:
    """Return whether all inputs of the spec are fetched to the place where pods read them."""
    fetched = [item.place for item in status.inputs if item.phase == "Fetched"]
    return status.is_true(c.INPUTS_READY) and fetched == [item.place for item in wanted]


def _succeed(state: State, status: Status) -> Decision:
    inputs = tuple(replace(item, phase="Fetched", reason="", message="") for item in status.inputs)
    size = format_size(sum(item.bytes for item in inputs))
    fact = Fact(c.INPUTS_READY, "True", FETCHED, f"{len(inputs)}/{len(inputs)} inputs fetched, {size}")
    return Decision(describe_before_start(state, replace(status, inputs=inputs), fact), requeue_after=AT_ONCE)


def _fail(state: State, status: Status, view: JobView) -> Decision:
    """Fail the job: a pod has reported a permanent failure, or several pods have tried for long enough."""
    failed = next((item for item in status.inputs if item.reason in FETCH_FAILURES), None)
    reason = failed.reason if failed else FETCH_FAILED
    ends = [pod.termination for pod in state.pods if pod.termination and pod.termination.container_exit_code]
    message = view.failed_message
    if ends:
        message = ends[-1].message
        if ends[-1].remedy:
            message += f"; {ends[-1].remedy}"
    status = describe_before_start(state, status, Fact(c.INPUTS_READY, "False", reason, message))
    ended = dataclasses.replace(state, job=dataclasses.replace(state.job, status=status))
    decision = fail(ended, None, reason, message)
    return dataclasses.replace(decision, status=replace(decision.status, nodes=status.nodes))


def _read_reports(state: State, wanted: Sequence[Input]) -> Status:
    """Return the status with the inputs as the fetching pod, or its termination message, reports them."""
    reports = {report.name: report for report in _find_reports(state)}
    known = {item.place: item for item in state.status.inputs}
    inputs = []
    for item in wanted:
        before = known.get(item.place) or InputStatus(name=item.label, phase="Pending", place=item.place)
        merged = _merge(before, reports.get(item.label))
        inputs.append(replace(merged, name=item.label))
    return replace(state.status, inputs=tuple(inputs))


def _find_reports(state: State) -> tuple[InputReport, ...]:
    page = state.observation.page
    reported = () if page is None else read_report_part(page, "inputs").inputs
    if reported:
        return reported
    newest = state.pods.newest
    terminations = [newest[index].termination for index in sorted(newest)]
    reports = [read_end_part(end, "inputs").inputs for end in terminations if end is not None]
    # A report with a failure comes first, else that of the lowest index: the sort is stable.
    reports.sort(key=lambda inputs: all(item.phase != "Failed" for item in inputs))
    return reports[0] if reports else ()


def _merge(before: InputStatus, report: InputReport | None) -> InputStatus:
    if report is None:
        return before
    return replace(
        before,
        phase=cast(Any, report.phase),
        bytes=report.bytes,
        total_bytes=report.total_bytes,
        reason=report.reason if report.reason in FETCH_FAILURES else "",
        message=report.message,
    )


def _describe_fetch(state: State, status: Status) -> Fact:
    """Return InputsReady while inputs are missing."""
    view = state.attempt_job
    if state.spec.suspend:
        return Fact(c.INPUTS_READY, "False", NOT_FETCHED, "inputs are fetched once the job is resumed")
    if view is not None:
        attempt = dataclasses.replace(observe_attempt(state, state.status, None), size=JobSize(view.nodes))
        fact = state.hooks.explain(attempt, describe_scheduling(state.job, state.observation, 0, view.nodes, state.now))
        if fact.status == "False":
            return dataclasses.replace(fact, type=c.INPUTS_READY, message=f"to fetch the inputs: {fact.message}")
    reason = next((item.reason for item in status.inputs if item.reason), other_reasons.FETCHING_INPUTS)
    return Fact(c.INPUTS_READY, "False", reason, describe_inputs(status.inputs))

"""The present run of a job with spec.dev, as pod 0 reports it, and its texts. Pure."""

from datetime import datetime
from typing import cast

from msgspec.structs import replace

from ddp_operator.api.kubeobjects import format_time, truncate
from ddp_operator.api.status import DevStatus, RunResult, Status
from ddp_operator.decide.failures import describe_failure
from ddp_operator.decide.report import Page, convert_time


def record_run(status: Status, page: Page, now: datetime) -> Status:
    """Return the status with the run that pod 0 reports."""
    run = page.dev
    if run is None:
        return status
    before = status.dev or DevStatus()
    dev = DevStatus(
        run=run.run,
        result=cast(RunResult, run.result) if run.result else None,
        start_time=convert_time(run.started),
        completion_time=convert_time(run.ended) if run.result else None,
        release_time=(convert_time(run.release_at) or before.release_time or truncate(now)) if page.is_held else None,
        last_run=before.last_run,
    )
    return replace(status, dev=dev)


def describe_run(status: Status) -> str:
    """Return how the run in held pods ended."""
    dev = status.dev or DevStatus()
    lost = describe_lost_code(dev)
    if dev.run == 0:
        failure = status.last_failure
        last = f"the last failure: {describe_failure(failure)}" if failure else ""
        return "; ".join(filter(None, (lost, last)))
    text = f"run {dev.run} {dev.result.lower() if dev.result in ('Succeeded', 'Failed') else 'was stopped'}"
    if dev.result == "Failed" and status.last_failure is not None:
        text += f": {describe_failure(status.last_failure)}"
    return f"{text}; {lost}" if lost else text


def describe_lost_code(dev: DevStatus | None) -> str:
    """Return that new pods do not have the code of the latest run; empty: they have."""
    if dev is None or dev.run >= dev.last_number:
        return ""
    present = "run the job's own code" if dev.run else "have no code"
    return f"the code of run {dev.last_number} was lost with its pods, and the new pods {present}: `ddp rerun` sends it"


def describe_hold(status: Status) -> str:
    """Return how the run in held pods ended, and until when they are held."""
    release = status.dev.release_time if status.dev is not None else None
    until = f" until {format_time(release)}" if release is not None else ""
    return f"{describe_run(status)}; the pods are held{until}"

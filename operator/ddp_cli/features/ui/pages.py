"""The saved pages of runs on this machine and of jobs in a cluster (``client.hooks.Reports``)."""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial

import msgspec
from msgspec.structs import replace

from ddp_cli.client.api import get_job
from ddp_cli.client.cluster_backend import ClusterBackend
from ddp_cli.client.errors import ClientError
from ddp_cli.client.hooks import list_former_runs
from ddp_cli.client.job import Job
from ddp_cli.client.points import read_points
from ddp_cli.features.ui.cluster_job import build_cluster_page, read_job, read_once
from ddp_cli.features.ui.logs import LogPiece, LogQuery, read_piece
from ddp_cli.features.ui.render import render_saved
from ddp_cli.features.ui.run import RecordedRun, read_run
from ddp_cli.features.ui.sources import build_run_page
from ddp_operator.api.kubeobjects import utc_now
from ddp_operator.api.status import Restarts, Status
from ddp_operator.decide.diagnosis import build_last_failure
from ddp_operator.decide.failures import complete_end
from ddp_operator.decide.held_runs import record_run
from ddp_operator.decide.pace import build_paced_progress, drop_pace
from ddp_operator.decide.report import Page
from ddp_operator.reading.objects import view_pod
from ddp_pod.contract.report import PodReport
from ddp_pod.contract.run_report import RunReport


def build_job_report(job: Job, prometheus: str | None, run: int | None) -> str:
    """Return the page of a job or run with the end of its log, or of one run of a job of `ddp dev`.

    Raises: ClientError.
    """
    former = partial(list_former_runs, job)
    try:
        if isinstance(job.backend, ClusterBackend):
            resource = get_job(job.backend.api, job.name)
            data = read_once(job.backend.api, resource)
            recorded = select_run(read_job(resource, data, utc_now(), prometheus), run, former)
            page = build_cluster_page(job.backend, recorded, data)
        else:
            folder = job.backend.folder(job.name).path
            page = build_run_page(select_run(read_run(folder), run, former), folder)
    except ValueError as error:
        raise ClientError(str(error)) from None
    try:
        piece = read_piece(job, LogQuery())
    except ClientError as error:
        piece = LogPiece(note=f"The log cannot be read: {error}")
    return render_saved(page, piece)


def select_run(
    recorded: RecordedRun, number: int | None, read_former: Callable[[], Sequence[PodReport]] = tuple
) -> RecordedRun:
    """Return the run of a number of a job of `ddp dev`; None: all that is recorded. ``read_former`` reads former runs.

    Raises: ValueError that names the known runs; ClientError.
    """
    if number is None:
        return recorded
    dev = recorded.status.dev
    if dev is None:
        raise ValueError(f"{recorded.name} is no job of `ddp dev`, so it has one run; remove --run")
    if number == dev.run:
        ended = dev.completion_time or recorded.status.completion_time
        status = replace(recorded.status, start_time=dev.start_time, completion_time=ended)
    else:
        reports = {report.dev.run: report for report in read_former() if report.dev is not None}
        if number not in reports:
            known = ", ".join(map(str, sorted({dev.run, *reports} - {0})))
            raise ValueError(
                f"{recorded.name} has no report of run {number}: pod 0 keeps the last ten while it runs; choose one of "
                f"these with --run: {known}"
            )
        status = _restore(recorded.status, reports[number])

    start = status.start_time.timestamp() if status.start_time else 0.0
    end = status.completion_time.timestamp() + 1 if status.completion_time else float("inf")
    rows = [row for row in recorded.rows if start <= row["time"] <= end]
    return dataclasses.replace(
        recorded,
        resource={**recorded.resource, "status": msgspec.to_builtins(status)},
        status=status,
        rows=rows or read_points(status.points),
        events=[event for event in recorded.events if start <= event.time <= end],
        name=f"{recorded.name}, run {number}",
        under_way=True,  # its end is known
        pods=recorded.pods if number == dev.run else (),
    )


def _restore(status: Status, report: PodReport) -> Status:
    """Return the status as it was at the end of a former run."""
    page = Page(**{field.name: getattr(report, field.name) for field in dataclasses.fields(RunReport)})
    failure = report.dev.failure if report.dev is not None else None
    last_failure = None
    if failure is not None:
        of_pod = build_last_failure(status.attempt, view_pod({}), complete_end(failure))
        last_failure = replace(of_pod, pod_index=failure.pod_index)
    begun = record_run(replace(status, dev=None), page, utc_now())
    assert begun.dev is not None
    return replace(
        begun,
        phase="Held",
        start_time=begun.dev.start_time,
        completion_time=begun.dev.completion_time,
        progress=drop_pace(build_paced_progress(page.progress)),
        points=(),
        restarts=Restarts(all=report.restarts, in_place=report.restarts),
        last_restart=None,
        last_failure=last_failure,
        checkpoint=None,
        preflight=None,
        conditions=(),
    )

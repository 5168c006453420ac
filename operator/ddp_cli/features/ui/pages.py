"""The saved pages of runs on this machine and of jobs in a cluster (``client.hooks.Reports``)."""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from ddp_cli.client.api import Api, Object, get_job
from ddp_cli.client.cluster_backend import ClusterBackend, find_events
from ddp_cli.client.errors import ClientError
from ddp_cli.client.hooks import list_former_runs
from ddp_cli.client.job import Job
from ddp_cli.client.logs import list_running_pods
from ddp_cli.client.points import read_pod_points
from ddp_cli.features.ui.cluster_job import read_job
from ddp_cli.features.ui.held_run import select_run
from ddp_cli.features.ui.job_page import build_job_page
from ddp_cli.features.ui.logs import (
    MOST_PODS,
    WINDOW_LINES,
    LogPiece,
    LogQuery,
    ShownLine,
    read_pod_piece,
    read_run_piece,
)
from ddp_cli.features.ui.render import render_saved
from ddp_cli.features.ui.run import RecordedRun, Row, read_run
from ddp_cli.features.ui.sources import build_run_page, count_ranks
from ddp_cli.local.folder import RunFolder
from ddp_operator.api.kubeobjects import utc_now


def build_report(folder: Path) -> str:
    """Return the page of a run's folder. Raises: ValueError, if it is not a run folder; OSError."""
    return _save_run(read_run(folder), RunFolder(folder))


def build_job_report(job: Job, prometheus: str | None, run: int | None) -> str:
    """Return the page of a job, or of one run of a job of `ddp dev`. Raises: ClientError."""
    now = utc_now()
    try:
        if not isinstance(job.backend, ClusterBackend):
            folder = job.backend.folder(job.name)
            return _save_run(_select(job, read_run(folder.path), run), folder)
        resource = get_job(job.backend.api, job.name)
        events = find_events(job.backend.api, resource)
        points = () if prometheus else _read_points(job.backend.api, resource)
        recorded = _select(job, read_job(resource, events, now, prometheus, points), run)
    except ValueError as error:
        raise ClientError(str(error)) from None
    lines, note = _read_end(job) if run is None else ((), "")
    argument = job.backend.argument(job.name)
    place = str(resource["metadata"]["namespace"])
    return render_saved(build_job_page(recorded, now, place=place, argument=argument), lines, note)


def _read_points(api: Api, resource: Object) -> Sequence[Row]:
    """Return the points of the running pod 0; none if it does not run or may not be read: the status has some."""
    with suppress(ClientError):
        for pod in list_running_pods(api, resource["metadata"]["name"]):
            if pod.node == 0:
                return read_pod_points(api, resource, pod.name, pod.attempt)
    return ()


def _save_run(run: RecordedRun, folder: RunFolder) -> str:
    """Return the saved page of a run on this machine."""
    piece = LogPiece(())
    with suppress(ClientError):
        piece = read_run_piece(folder, count_ranks(folder), LogQuery())
    return render_saved(build_run_page(run, folder), piece.lines)


def _read_end(job: Job) -> tuple[Sequence[ShownLine], str]:
    """Return the last lines of a job's log, or why they cannot be read."""
    try:
        source = job.backend.logs(job.name, node=None, attempt=None, tail=WINDOW_LINES // MOST_PODS)
        piece = read_pod_piece(source, LogQuery())
    except ClientError as error:
        return (), f"The log cannot be read: {error}"
    return piece.lines, piece.note


def _select(job: Job, recorded: RecordedRun, run: int | None) -> RecordedRun:
    """Return one run of a job of `ddp dev`; None: all that is recorded. Raises: ValueError, ClientError."""
    dev = recorded.status.dev
    if run is None:
        return recorded
    former = list_former_runs(job) if dev is not None and run != dev.run else ()
    return select_run(recorded, run, former)

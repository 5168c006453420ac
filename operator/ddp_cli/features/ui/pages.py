"""The saved pages of runs on this machine and of jobs in a cluster (``client.hooks.Reports``)."""

from pathlib import Path

from ddp_cli.client.api import get_job
from ddp_cli.client.cluster_backend import ClusterBackend
from ddp_cli.client.errors import ClientError
from ddp_cli.client.hooks import list_former_runs
from ddp_cli.client.job import Job
from ddp_cli.client.local import LocalBackend
from ddp_cli.features.ui.cluster_job import build_cluster_page, read_job, read_once
from ddp_cli.features.ui.held_run import select_run
from ddp_cli.features.ui.job_page import JobPage
from ddp_cli.features.ui.logs import LogPiece, LogQuery, read_piece
from ddp_cli.features.ui.render import render_saved
from ddp_cli.features.ui.run import RecordedRun, read_run
from ddp_cli.features.ui.sources import build_run_page
from ddp_operator.api.kubeobjects import utc_now


def build_report(folder: Path) -> str:
    """Return the page of a run's folder. Raises: ValueError, if it is not a run folder; OSError."""
    return _save(Job(LocalBackend(folder.parent), str(folder), {}), build_run_page(read_run(folder), folder))


def build_job_report(job: Job, prometheus: str | None, run: int | None) -> str:
    """Return the page of a job, or of one run of a job of `ddp dev`. Raises: ClientError."""
    try:
        if isinstance(job.backend, ClusterBackend):
            resource = get_job(job.backend.api, job.name)
            data = read_once(job.backend.api, resource)
            recorded = _select(job, read_job(resource, data, utc_now(), prometheus), run)
            return _save(job, build_cluster_page(job.backend, recorded, data))
        folder = job.backend.folder(job.name).path
        return _save(job, build_run_page(_select(job, read_run(folder), run), folder))
    except ValueError as error:
        raise ClientError(str(error)) from None


def _save(job: Job, page: JobPage) -> str:
    """Return a page with the end of its log, or with the reason why that cannot be read."""
    try:
        piece = read_piece(job, LogQuery())
    except ClientError as error:
        piece = LogPiece(note=f"The log cannot be read: {error}")
    return render_saved(page, piece)


def _select(job: Job, recorded: RecordedRun, run: int | None) -> RecordedRun:
    """Return one run of a job of `ddp dev`; None: all that is recorded. Raises: ValueError, ClientError."""
    dev = recorded.status.dev
    if run is None:
        return recorded
    former = list_former_runs(job) if dev is not None and run != dev.run else ()
    return select_run(recorded, run, former)

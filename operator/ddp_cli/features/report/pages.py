"""The pages of runs on this machine and of jobs in a cluster (``client.hooks.Reports``)."""

from datetime import datetime
from pathlib import Path

from ddp_cli.client.api import get_job
from ddp_cli.client.cluster_backend import ClusterBackend, find_events
from ddp_cli.client.errors import ClientError
from ddp_cli.client.hooks import list_former_runs
from ddp_cli.client.job import Job
from ddp_cli.features.report.cluster_job import read_job
from ddp_cli.features.report.held_run import select_run
from ddp_cli.features.report.page import build_page
from ddp_cli.features.report.run import RecordedRun, read_run
from ddp_operator.api.kubeobjects import utc_now


def build_report(folder: Path) -> str:
    """Return the page of a run's folder. Raises: ValueError, if it is not a run folder; OSError."""
    return build_page(read_run(folder), utc_now())


def build_job_report(job: Job, prometheus: str | None, run: int | None) -> str:
    """Return the page of a job, or of one run of a job of `ddp dev`. Raises: ClientError."""
    now = utc_now()
    try:
        recorded = _read(job, prometheus, now)
        return build_page(recorded if run is None else _select(job, recorded, run), now)
    except ValueError as error:
        raise ClientError(str(error)) from None


def _read(job: Job, prometheus: str | None, now: datetime) -> RecordedRun:
    """Return what is recorded of a job. Raises: ValueError, ClientError."""
    if not isinstance(job.backend, ClusterBackend):
        return read_run(job.backend.folder(job.name).path)
    resource = get_job(job.backend.api, job.name)
    return read_job(resource, find_events(job.backend.api, resource), now, prometheus)


def _select(job: Job, recorded: RecordedRun, run: int) -> RecordedRun:
    """Return one run. Raises: ValueError, ClientError."""
    dev = recorded.status.dev
    former = list_former_runs(job) if dev is not None and run != dev.run else ()
    return select_run(recorded, run, former)

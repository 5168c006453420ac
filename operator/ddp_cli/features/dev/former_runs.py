"""The former runs of a job of `ddp dev`, which pod 0 keeps (``client.hooks.FormerRuns``)."""

from collections.abc import Sequence

from ddp_cli.client.job import Job
from ddp_cli.features.dev.orders import PodMissing, send_order
from ddp_pod.contract.report import PodReport
from ddp_pod.features.dev.contract import Order


def list_former_runs(job: Job) -> Sequence[PodReport]:
    """Return the reports on the former runs; none if pod 0 does not run. Raises: ClientError."""
    try:
        return [event.report for event in send_order(job, Order("list")) if event.report is not None]
    except PodMissing:
        return ()

"""The report on a run: one HTML file without external resources and scripts."""

from collections.abc import Sequence
from pathlib import Path

from ddp_cli.report.dev import select_run
from ddp_cli.report.page import build_page
from ddp_cli.report.run import RecordedRun, read_run
from ddp_operator.api.kubeobjects import utc_now
from ddp_pod.contract.report import PodReport

__all__ = ["RecordedRun", "build_page", "build_report", "read_run", "select_run"]


def build_report(folder: Path, run: int | None = None, former: Sequence[PodReport] = ()) -> str:
    """Return the current page of a run folder, or of one ``run`` of `ddp dev` in it.

    ``former``: the reports on former runs.

    Raises: ValueError, if it is not a run folder or has no such run; OSError.
    """
    recorded = read_run(folder)
    return build_page(recorded if run is None else select_run(recorded, run, former), utc_now())

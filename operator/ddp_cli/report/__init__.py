"""The report on a run: one HTML file without external resources and scripts."""

from pathlib import Path

from ddp_cli.report.dev import select_run
from ddp_cli.report.page import build_page
from ddp_cli.report.run import RecordedRun, read_run
from ddp_operator.api.kubeobjects import utc_now

__all__ = ["RecordedRun", "build_page", "build_report", "read_run", "select_run"]


def build_report(folder: Path, run: int | None = None) -> str:
    """Return the current page of a run folder, or of one ``run`` of `ddp dev` in it.

    Raises: ValueError, if it is not a run folder or has no such run; OSError.
    """
    recorded = read_run(folder)
    return build_page(recorded if run is None else select_run(recorded, run), utc_now())

"""The report on a run: one HTML file without external resources and scripts."""

from pathlib import Path

from ddp_cli.report.page import build_page
from ddp_cli.report.run import RecordedRun, read_run
from ddp_operator.api.kubeobjects import utc_now

__all__ = ["RecordedRun", "build_page", "build_report", "read_run"]


def build_report(folder: Path) -> str:
    """Return the current page of a run folder. Raises: ValueError, if it is not a run folder; OSError."""
    return build_page(read_run(folder), utc_now())

"""The page that `ddp report` writes: one HTML file with nothing outside it, and no script."""

from ddp_operator.report.page import build_page
from ddp_operator.report.run import Run, read_run

__all__ = ["Run", "build_page", "read_run"]

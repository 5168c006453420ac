"""The table of what `ddp check` has found in the scripts, after a run of these tests."""

from __future__ import annotations

import pytest

from tests.check.running import ROW


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print a line for each script that was checked, as docs/check.md has them."""
    reports = [report for key in ("passed", "failed", "xfailed") for report in terminalreporter.stats.get(key, [])]
    rows = sorted({row for report in reports for name, row in report.user_properties if name == ROW})
    if not rows:
        return
    terminalreporter.write_sep("-", f"{len(rows)} scripts checked")
    terminalreporter.write_line("| script | expected | found | right | seconds |")
    terminalreporter.write_line("|---|---|---|---|---|")
    for row in rows:
        terminalreporter.write_line(row)

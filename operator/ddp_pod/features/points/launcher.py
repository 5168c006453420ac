"""Rank 0's numbers over time, for curves: the status of a job has few rows, and a laptop may open the page at any time.

Rows beyond a limit are thinned, and a long run is read less often, so memory and work stay bounded.
"""

import csv
import io
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

from ...base.launcher_part import LauncherPart
from ...base.pod import Pod
from ...base.service import Service
from ...contract.points import POINT_COLUMNS
from ...contract.progress import RankProgress
from ...contract.thinning import MOST_ROWS, Row, thin_rows
from ...progress.rank_progress import RankReader

_PATH: Final = "/points"
_SHORTEST_PAUSE = 1.0
_LONGEST_PAUSE = 15.0
_READINGS = 1000  # so many in the run's age, between the two


class PointKeeper(Service):
    """Keeps at most ``2 * MOST_ROWS`` rows of the pod's first rank."""

    name = "points"

    def __init__(self, ranks: RankReader) -> None:
        self._ranks = ranks
        self._rows: list[Row] = []
        self._last = RankProgress()

    def run(self) -> None:
        """Read until the process ends."""
        began = time.monotonic()
        while True:
            self.add(self._ranks.rank_progress(0), time.time())
            time.sleep(choose_pause(time.monotonic() - began))

    def add(self, progress: RankProgress, now: float) -> None:
        """Add a reading that differs from the last one."""
        if progress == self._last or progress.known_step is None:
            return
        self._last = replace(progress)
        values = ((name, getattr(progress, name)) for name in POINT_COLUMNS)
        rows = [*self._rows, {"time": round(now, 3), **{name: value for name, value in values if value is not None}}]
        self._rows = thin_rows(rows) if len(rows) > 2 * MOST_ROWS else rows

    def read_page(self, path: str, query: str) -> str | None:
        """Return the rows as CSV."""
        return self.format() if path == _PATH else None

    def format(self) -> str:
        """Return the rows as CSV."""
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, ["time", *POINT_COLUMNS], lineterminator="\n")
        writer.writeheader()
        writer.writerows(self._rows)
        return text.getvalue()


def choose_pause(age: float) -> float:
    """Return the seconds until the next reading of a run of this age."""
    return min(_LONGEST_PAUSE, max(_SHORTEST_PAUSE, age / _READINGS))


def _create(pod: Pod, reader: Any) -> Sequence[Service]:
    return (PointKeeper(reader),)


PART = LauncherPart(create=_create)

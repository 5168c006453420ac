"""The ranks' progress at intervals: of a rank that has ended the last one remains known."""

import os
import time
from collections.abc import Callable, Mapping
from typing import Final

from ..base.files import try_write_json
from ..base.pod import Pod
from ..base.runtime_files import RUN_STEP_FILE
from ..base.service import Service
from ..contract.plan import WatchdogConfig
from ..contract.progress import RankProgress
from .rank_progress import RankReader

LONGEST_INTERVAL: Final = 5.0
"""Seconds between two readings."""


class ProgressKeeper(Service):
    """Keeps the ranks' last progress, and the step of the run for the agent. ``observe``: takes each reading."""

    name = "progress"

    def __init__(self, pod: Pod, reader: RankReader, observe: Callable[[Mapping[int, RankProgress]], None]) -> None:
        self._pod = pod
        self._reader = reader
        self._observe = observe

    def run(self) -> None:
        """Read continuously. Never returns."""
        interval = find_interval(self._pod.watchdog)
        while True:
            time.sleep(interval)
            self.read()

    def read(self) -> None:
        """Read once."""
        ranks = {rank: page.progress for rank, page in self._reader.collect().items()}
        if self._pod.node == 0 and self._pod.is_multi_node:
            steps = [progress.run_step for progress in ranks.values() if progress.run_step is not None]
            path = os.path.join(self._pod.runtime, RUN_STEP_FILE)
            try_write_json(path, {"step": max(steps)} if steps else {})
        self._observe(ranks)


def find_interval(plan: WatchdogConfig | None) -> float:
    """Return the seconds between two readings: a quarter of the watchdog's shortest budget, within bounds."""
    if plan is None:
        return LONGEST_INTERVAL
    return max(0.1, min(LONGEST_INTERVAL, plan.start_seconds / 4, plan.stall_seconds / 4))

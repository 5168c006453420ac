"""Read the pods' reports while they run, at first ten times a second, for the display and the run folder."""

import asyncio
import math
import time
from collections.abc import Callable
from datetime import datetime
from typing import Final

from ddp_cli.local.folder import RunFolder
from ddp_cli.local.job_controller import completion_index
from ddp_cli.local.kubelet import name_file
from ddp_cli.local.local_cluster import LocalCluster
from ddp_operator.api import constants
from ddp_operator.api.cluster import Object
from ddp_operator.decide.pace import STALLED, RateMeter, Rates
from ddp_operator.decide.report import Page
from ddp_operator.reading.pages import decode_report
from ddp_operator.reading.terminations import parse_termination
from ddp_pod.contract.progress import RankProgress

_EVERY_SECONDS: Final = 1.0
# Before the first report exists it is read more often: a user waits for it, and training has not started.
_FIRST_SECONDS: Final = 0.1
# Only pod 0's report has the job's progress; those of other pods are stored less often.
_OTHERS_SECONDS: Final = 5.0
_READINGS: Final = 100  # of a run that has just begun: a curve of four points shows nothing


def choose_pause(trained_since: float | None, now: float) -> float:
    """Return the seconds until the next reading: short for a young run, so that its curves have points."""
    if trained_since is None:
        return _FIRST_SECONDS
    return min(_EVERY_SECONDS, max(_FIRST_SECONDS, (now - trained_since) / _READINGS))


class RunRecorder:
    """Samples reports. ``page`` is pod 0's last one, with its rates; ``on_page`` is called after each sample."""

    def __init__(self, cluster: LocalCluster, folder: RunFolder, clock: Callable[[], datetime]) -> None:
        self._cluster = cluster
        self._folder = folder
        self._clock = clock
        self._last_row = RankProgress(), False
        self._meter = RateMeter()
        self._stepped: set[str] = set()
        self.page = Page()
        self.rates: Rates | None = None
        self.port: int | None = None
        self._trained_since: float | None = None
        self.on_page: Callable[[], None] = lambda: None

    async def run(self) -> None:
        """Sample until cancelled."""
        others_at = -math.inf
        while True:
            now = time.monotonic()
            everyone = not self.page.training or now - others_at >= _OTHERS_SECONDS
            others_at = now if everyone else others_at
            await self.sample(everyone=everyone)
            self.on_page()
            await asyncio.sleep(choose_pause(self._trained_since, time.monotonic()))

    async def sample(self, *, everyone: bool) -> None:
        """Read pod 0's report, or every pod's."""
        running = [pod for pod in self._cluster.store.list("Pod") if pod["status"].get("phase") == "Running"]
        for pod in running:
            index = completion_index(pod)
            if index != 0 and not everyone:
                continue
            report = await self._cluster.read_report(pod, constants.DEFAULT_METRICS_PORT)
            if not report:
                continue
            page = decode_report(report)
            # A rank's progress disappears when it ends; keep the last report that has it.
            has_steps = page.progress.step is not None
            if has_steps or name_file(pod) not in self._stepped:
                text = report.decode("utf-8", "replace")
                self._folder.write(self._folder.reports / f"{name_file(pod)}.json", text)
            if has_steps:
                self._stepped.add(name_file(pod))
            if index == 0:
                self.port = self._cluster.kubelet.port_of(pod)
                if page.training and self._trained_since is None:
                    self._trained_since = time.monotonic()
                self._record(pod, page)

    def record_end(self, pod: Object) -> None:
        """Record the last values of a pod from its termination message: it ended between two samples."""
        if completion_index(pod) != 0:
            return
        for status in pod["status"].get("containerStatuses") or ():
            ended = status["state"].get("terminated") or {}
            last = parse_termination(ended.get("exitCode", 0), text=ended.get("message", "")).progress
            if last is not None:
                self._record(pod, Page(ranks=(self.page.progress, last), restarts=self.page.restarts))

    def _record(self, pod: Object, page: Page) -> None:
        process = pod["metadata"]["uid"], page.restarts
        self.page = page
        self.rates = self._meter.measure(process, page.progress, self._clock().timestamp())
        row = page.progress, self.rates == STALLED
        if page.training and row != self._last_row:
            self._last_row = row
            labels = pod["metadata"].get("labels") or {}
            self._folder.write_row(self._clock(), int(labels.get(constants.LABEL_ATTEMPT, 1)), page, self.rates)

"""Read the pods' metrics pages once a second while they run, for the display and the run folder."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import datetime
from typing import Final

from ddp_cli.local.cluster import LocalCluster
from ddp_cli.local.folder import RunFolder
from ddp_cli.local.job_controller import completion_index
from ddp_cli.local.kubelet import name_file
from ddp_operator.api import constants
from ddp_operator.api.cluster import Object
from ddp_operator.decide.failures import parse_termination
from ddp_operator.decide.metrics_page import STALLED, Page, RateMeter, parse_page

_EVERY_SECONDS: Final = 1.0
# Before the first page exists it is read more often: a user waits for it, and training has not started.
_FIRST_SECONDS: Final = 0.1
# Only rank 0's page has the job's progress; the pages of other ranks are stored every fifth time.
_OTHERS_EVERY: Final = 5


class Recorder:
    """Samples metrics pages. ``page`` is rank 0's last one; ``on_page`` is called after each sample."""

    def __init__(self, cluster: LocalCluster, folder: RunFolder, clock: Callable[[], datetime]) -> None:
        self._cluster = cluster
        self._folder = folder
        self._clock = clock
        self._last_row: tuple[Mapping[str, float], bool] = {}, False
        self._meter = RateMeter()
        self._stepped: set[str] = set()
        self.page = Page()
        self.port: int | None = None
        self.on_page: Callable[[], None] = lambda: None

    async def run(self) -> None:
        """Sample until cancelled."""
        count = 0
        while True:
            await self.sample(everyone=count % _OTHERS_EVERY == 0)
            count += self.page.training
            self.on_page()
            await asyncio.sleep(_EVERY_SECONDS if self.port is not None else _FIRST_SECONDS)

    async def sample(self, *, everyone: bool) -> None:
        """Read rank 0's page, or every pod's."""
        running = [pod for pod in self._cluster.store.list("Pod") if pod["status"].get("phase") == "Running"]
        for pod in running:
            index = completion_index(pod)
            if index != 0 and not everyone:
                continue
            pieces: list[bytes] = []
            if not await self._cluster.scrape(pod, constants.DEFAULT_METRICS_PORT, pieces.append):
                continue
            text = b"".join(pieces).decode("utf-8", "replace")
            # The series of a rank disappear when it ends; keep the last page that has them.
            has_steps = f"{constants.METRIC_GLOBAL_STEP}{{" in text
            if has_steps or name_file(pod) not in self._stepped:
                self._folder.write(self._folder.pages / f"{name_file(pod)}.prom", text)
            if has_steps:
                self._stepped.add(name_file(pod))
            if index == 0:
                self.port = self._cluster.kubelet.port_of(pod)
                self._record(pod, parse_page(text))

    def record_end(self, pod: Object) -> None:
        """Record the last values of a pod from its termination message: it ended between two samples."""
        if completion_index(pod) != 0:
            return
        for status in pod["status"].get("containerStatuses") or ():
            ended = status["state"].get("terminated") or {}
            values = parse_termination(ended.get("exitCode", 0), text=ended.get("message", "")).progress
            if values:
                page = Page({**self.page.values, **values}, in_place_restarts=self.page.in_place_restarts)
                self._record(pod, page)

    def _record(self, pod: Object, page: Page) -> None:
        process = pod["metadata"]["uid"], page.in_place_restarts
        rates = self._meter.measure(process, page.values, self._clock().timestamp())
        self.page = page = replace(page, rates=rates)
        row = page.values, rates == STALLED
        if page.training and row != self._last_row:
            self._last_row = row
            labels = pod["metadata"].get("labels") or {}
            self._folder.write_row(self._clock(), int(labels.get(constants.LABEL_ATTEMPT, 1)), page)

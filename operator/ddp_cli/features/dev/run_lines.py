"""The lines of a job's logs by the run that wrote them."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from ddp_cli.client.logs import Line, LogPod, PodLogs, RunLogs
from ddp_pod.features.dev.contract import RUN_LINE

_SECONDS_BEFORE_RUN: Final = 5
"""Of the logs that are read before a new run, which opening them may take."""


class DevLogs:
    """The lines of a job's runs (`ddp dev`) with their numbers. ``open_runs``: of each pod whose run has not ended.

    ``is_new``: read only the lines of runs that start from now on.
    """

    def __init__(self, source: PodLogs | RunLogs, *, is_new: bool) -> None:
        self._source = source
        if is_new and isinstance(source, PodLogs):
            self._source = replace(source, since=_SECONDS_BEFORE_RUN)
        elif is_new and isinstance(source, RunLogs):
            source.skip_written()
        self.pods = self._source.pods
        self.is_over = self._source.is_over
        self.open_runs: dict[str, int] = {}

    def lines(self, pod: LogPod, *, follow: bool) -> Iterator[Line]:
        """Yield the lines of the runs in a pod, without those between two runs."""
        for line in self._source.lines(pod, follow=follow):
            mark = RUN_LINE.match(line.text)
            if mark is None and pod.name in self.open_runs:
                yield replace(line, run=self.open_runs[pod.name])
            elif mark is not None and mark[2] == "starts":
                self.open_runs[pod.name] = int(mark[1])
            elif mark is not None:
                self.open_runs.pop(pod.name, None)

"""The job's run in experiment trackers, in the pod's first process."""

from collections.abc import Mapping, Sequence
from typing import Any

from ...base.launcher_part import LauncherPart
from ...base.pod import Pod
from ...base.service import Control, Service
from .runs import is_tracked, list_tracked_runs, start_tracking


class Tracking(Service):
    """Finds or creates the job's run while PyTorch is imported, and reports its web pages."""

    name = "tracking"

    def __init__(self, runtime: str) -> None:
        self._runtime = runtime

    def start(self, control: Control) -> None:
        """Start a process that finds or creates the run in MLflow."""
        start_tracking(self._runtime)

    def report(self) -> Mapping[str, object]:
        """Return the web pages for the report."""
        return {"runs": list_tracked_runs(self._runtime)}


def _create(pod: Pod, reader: Any) -> Sequence[Service]:
    return (Tracking(pod.runtime),) if is_tracked() else ()


PART = LauncherPart(create=_create)

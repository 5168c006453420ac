"""The result of the preflight, in the pod's log and report."""

from collections.abc import Mapping, Sequence
from typing import Any

from ...base.files import log
from ...base.launcher_part import LauncherPart
from ...base.pod import Pod
from ...base.service import Service
from .checks import PreflightDone, PreflightReport, describe_preflight, summarize_preflight


class Preflight(Service):
    """Logs the result when the agent has it."""

    name = "preflight"

    def __init__(self) -> None:
        self._report: PreflightReport | None = None

    def note(self, event: object) -> None:
        """Note the result."""
        if isinstance(event, PreflightDone):
            self._report = event.report
            log(describe_preflight(event.report))

    def report(self) -> Mapping[str, object]:
        """Return what the pod reports about the checks."""
        return {"preflight": summarize_preflight(self._report)}


def _create(pod: Pod, reader: Any) -> Sequence[Service]:
    return (Preflight(),)


PART = LauncherPart(create=_create)

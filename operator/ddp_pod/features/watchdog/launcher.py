"""The services of this feature in the launcher."""

from collections.abc import Sequence
from typing import Any

from ...base.launcher_part import LauncherPart
from ...base.pod import Pod
from ...base.service import Service
from .groups import GroupMonitor
from .mappings import MappedFilesKeeper
from .monitor import StallMonitor


def _create(pod: Pod, reader: Any) -> Sequence[Service]:
    return (StallMonitor(pod, reader), GroupMonitor(pod, reader), MappedFilesKeeper(pod))


PART = LauncherPart(create=_create)

"""`ddp dev` in the pod's first process: it holds the pod, or is a launcher of one run on standby."""

import importlib
from typing import Any

from ...base.launcher_part import LauncherPart
from ...base.pod import Pod
from .standby import find_standby


def _hold(pod: Pod, command: list[str], signals: list[int]) -> int:
    """Hold the pod. The launchers of its runs do not need this module, nor asyncio."""
    holder: Any = importlib.import_module(".holder", __package__)
    return int(holder.hold(pod, command, signals))


PART = LauncherPart(find_standby=find_standby, hold=_hold)

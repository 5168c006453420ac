"""The services of this feature in the launcher."""

from collections.abc import Sequence
from typing import Any

from ...base.launcher_part import LauncherPart
from ...base.pod import Pod
from ...base.service import Service
from .master import MasterWatch
from .peers import PeerWatch


def _create(pod: Pod, reader: Any) -> Sequence[Service]:
    return (PeerWatch(pod), MasterWatch(pod))


PART = LauncherPart(create=_create)

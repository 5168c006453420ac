"""The recorder of a rank, if `ddp check` wants one."""

import os
from collections.abc import Mapping
from typing import Any

from ...contract.names import CHECK_VARIABLE
from ...rank.groups import GroupRecorder
from ...rank.part import RankPart
from .recorder import Recorder


def _record(worker: Mapping[str, Any], groups: GroupRecorder) -> Recorder:
    return Recorder(os.environ[CHECK_VARIABLE], worker["rank"], worker["worldSize"], groups)


PART = RankPart(observe=_record)

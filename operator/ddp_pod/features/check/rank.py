"""The recorder of a rank, if `ddp check` wants one."""

import os
from collections.abc import Mapping
from typing import Any

from ...contract.names import CHECK_VARIABLE, ENV_RUNTIME_DIR
from ...rank.groups import GroupRecorder
from ...rank.part import RankPart
from .recorder import Recorder


def _record(worker: Mapping[str, Any], groups: GroupRecorder) -> Recorder:
    error = os.path.join(os.environ[ENV_RUNTIME_DIR], "errors", f"{worker['localRank']}.json")
    return Recorder(os.environ[CHECK_VARIABLE], worker["rank"], worker["worldSize"], groups, error)


PART = RankPart(observe=_record)

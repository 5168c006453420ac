"""The failure of a rank whose script raises an exception, through its error file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest

from ddp_pod.contract.failure_record import Failure
from ddp_pod.failures.rules import WorkerEnd
from ddp_pod.failures.worker_failure import examine_worker
from ddp_pod.rank.tracebacks import record_exception
from tests.support.launcher_config import launcher_pod

STARTED: Final = 1_700_000_000.0
"""When the rank started: all files of a test are newer."""
ABOUT: Final = {"rank": 5, "localRank": 0, "restart": 2, "started": STARTED}


def catch(work: Callable[[], object]) -> BaseException:
    """Return the exception that a function raises."""
    with pytest.raises(BaseException) as caught:  # noqa: PT011 a SystemExit is no Exception
        work()
    return caught.value


def examine(work: Callable[[], object], folder: Path) -> Failure:
    """Return the failure of a rank whose script does the work."""
    (folder / "errors").mkdir(exist_ok=True)
    path = folder / "errors" / "0.json"
    path.unlink(missing_ok=True)
    record_exception(catch(work), str(path), ABOUT)
    return examine_worker(launcher_pod(folder), WorkerEnd(1))

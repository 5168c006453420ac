"""A spare pod replaces a lost one."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.test_launcher_elastic import TRAIN
from tests.support.launcher_pods import LauncherPods

pytestmark = pytest.mark.process


@pytest.fixture
def job(tmp_path: Path) -> Iterator[LauncherPods]:
    (tmp_path / "train.py").write_text(TRAIN)
    made = LauncherPods(tmp_path, ["train.py"], spares=1, max_restarts=3, config={"restarts_without_progress": 1})
    yield made
    made.stop()


@pytest.mark.parametrize("number", [pytest.param(signal.SIGTERM, marks=pytest.mark.nightly), signal.SIGKILL])
def test_spare_replaces_lost_pod_and_successor_is_on_standby(
    job: LauncherPods, tmp_path: Path, number: signal.Signals
) -> None:
    job.start(2)
    job.start(0, 1)
    job.until_logged(1, "world 2 begins at step 0")
    assert "begins" not in job.log(2)
    counts = re.compile(r"^ddp_launcher_in_place_restarts_total (\d+)", re.MULTILINE)

    begun = time.monotonic()
    job.signal(1, number)
    job.until_logged(2, "world 2 begins")
    print(f"{number.name}: the spare begins after {time.monotonic() - begun:.1f} s")
    job.until(lambda: counts.findall(job.page(2)) == counts.findall(job.page(0)) == ["1"], "both count one restart")
    job.running[1].wait(60)
    (tmp_path / "port-1").unlink()
    job.start(1)
    job.until(lambda: job.log(0).count("world 2 begins") == 2, "pod 0 begins again")
    job.until(lambda: 'phase="Rendezvous"} 1' in job.page(1), "pod 1 waits again")
    time.sleep(1)
    assert job.log(0).count("world 2 begins") == 2, "whoever waits does not make the others start again"
    (tmp_path / "enough").touch()
    assert [job.wait(index).code for index in (0, 2, 1)] == [0, 0, 0]
    assert job.log(2).count("is done") == 1

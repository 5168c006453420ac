"""Pod 0 of a job in a cluster serves the points of its curves while it trains."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from tests.support.launcher_pods import LauncherPods

pytestmark = pytest.mark.process

SCRIPT = """
import os, time
from ddp_sdk import Exporter
exporter = Exporter.start(total_steps=10_000)
for step in range(1, 300):
    exporter.step(samples=1, step=step, loss=1 / step)
    if os.path.exists("enough"):
        break
    time.sleep(0.2)
"""


def test_points_of_a_real_pod_grow_while_it_trains(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    job = LauncherPods(tmp_path, ["train.py"], nodes=1, nproc=1, env={"MASTER_ADDR": socket.gethostname()}, warm=False)

    def read() -> list[str]:
        return job.page(path="points").splitlines()

    try:
        job.start()
        job.until(lambda: len(read()) > 3, "the pod has points")
        head, first, *_, last = read()
        (tmp_path / "enough").touch()
        job.wait(0)
    finally:
        job.stop()
    columns = head.split(",")
    assert columns[:4] == ["time", "epoch", "step", "loss"]
    assert float(first.split(",")[0]) < float(last.split(",")[0])
    assert float(last.split(",")[3]) < float(first.split(",")[3]) <= 1.0

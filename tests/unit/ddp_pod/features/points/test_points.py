"""Pod 0 keeps rank 0's numbers over time, and serves them."""

from __future__ import annotations

import csv
import math
from pathlib import Path

from ddp_pod.contract.progress import RankProgress
from ddp_pod.contract.report import PodReport
from ddp_pod.contract.thinning import MOST_ROWS
from ddp_pod.features.points.launcher import PointKeeper, choose_pause
from ddp_pod.progress.metrics import MetricsEndpoint
from ddp_pod.progress.rank_progress import RankReader
from ddp_pod.supervise.services import Services
from tests.unit.ddp_pod.test_metrics import ask, build_endpoint


def read(keeper: PointKeeper) -> list[dict[str, str]]:
    return list(csv.DictReader(keeper.format().splitlines()))


def test_reading_without_change_or_step_adds_no_row(tmp_path: Path) -> None:
    keeper = PointKeeper(RankReader(str(tmp_path)))
    progress = RankProgress(step=1.0, loss=0.5)
    keeper.add(RankProgress(loss=1.0), 1.0)
    keeper.add(progress, 2.0)
    keeper.add(progress, 3.0)
    progress.loss = math.nan
    keeper.add(progress, 4.0)
    assert [(row["time"], row["step"], row["loss"]) for row in read(keeper)] == [
        ("2.0", "1.0", "0.5"),
        ("4.0", "1.0", "nan"),
    ]


def test_rows_of_a_long_run_stay_bounded_and_keep_the_peak(tmp_path: Path) -> None:
    keeper = PointKeeper(RankReader(str(tmp_path)))
    for step in range(20_000):
        keeper.add(RankProgress(step=float(step), steps=float(step), loss=9.0 if step == 777 else 1.0), float(step))
    rows = read(keeper)
    assert MOST_ROWS / 2 < len(rows) <= 2 * MOST_ROWS
    assert "9.0" in {row["loss"] for row in rows}
    assert rows[-1]["step"] == "19999.0"


def test_long_run_is_read_less_often() -> None:
    assert [choose_pause(age) for age in (0.0, 900.0, 5000.0, 1e6)] == [1.0, 1.0, 5.0, 15.0]


def test_endpoint_serves_points_of_pod_0_only(tmp_path: Path) -> None:
    keeper = PointKeeper(RankReader(str(tmp_path)))
    keeper.add(RankProgress(step=7.0), 2.0)
    services = Services([keeper])
    endpoint = MetricsEndpoint(RankReader(str(tmp_path)), lambda ranks: PodReport(), services.read_page)
    request = b"GET /points HTTP/1.1\r\nHost: x\r\n\r\n"
    _, body = ask(endpoint.serve(0), request)
    assert body.startswith(b"time,epoch,step,")
    assert b"2.0,,7.0," in body
    head, _ = ask(build_endpoint(tmp_path).serve(0), request)
    assert b"404" in head

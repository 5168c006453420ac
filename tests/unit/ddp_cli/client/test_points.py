"""Points of charts from pod 0 of a job in a cluster, joined with the rows of its status."""

from __future__ import annotations

from pathlib import Path

from ddp_cli.client.api import Api
from ddp_cli.client.points import join_points, read_pod_points
from ddp_pod.contract.progress import RankProgress
from ddp_pod.contract.thinning import MOST_ROWS
from ddp_pod.features.points.launcher import PointKeeper
from ddp_pod.progress.rank_progress import RankReader
from tests.support.builders import resource


class PodApi(Api):
    """An API server that passes on a page of a pod."""

    def __init__(self, body: bytes) -> None:
        self.body = body
        self.paths: list[str] = []

    def read(self, path: str, limit: int, seconds: float) -> bytes:
        self.paths.append(path)
        return self.body[: limit + 1]


def test_points_have_rates_from_counters_and_come_from_the_port_of_the_spec(tmp_path: Path) -> None:
    keeper = PointKeeper(RankReader(str(tmp_path)))
    for second in range(4):
        keeper.add(
            RankProgress(step=10.0 + second, steps=1.0 + second, samples=64.0 * (1 + second), loss=1.0), float(second)
        )
    api = PodApi(keeper.format().encode())
    rows = read_pod_points(api, resource(metrics={"port": 9500}), "train-1-0-x", 1)
    assert api.paths == ["/api/v1/namespaces/default/pods/train-1-0-x:9500/proxy/points"]
    assert [(row["time"], row["step"], row["attempt"]) for row in rows] == [(float(n), 10.0 + n, 1.0) for n in range(4)]
    assert (rows[-1]["steps_per_second"], rows[-1]["samples_per_second"]) == (1.0, 64.0)


def test_points_of_a_hostile_pod_are_bounded_and_garbage_is_none() -> None:
    many = b"time,step\n" + b"1,1\n" * 100_000
    assert len(read_pod_points(PodApi(many), resource(), "p", 1)) == 2 * MOST_ROWS
    for garbage in (b"", b"\xff\x00\n\x00,", b"time\nnan\n", b"<html>"):
        assert len(read_pod_points(PodApi(garbage), resource(), "p", 1)) <= 1


def test_rows_of_the_status_stand_before_and_after_those_of_pod_0() -> None:
    stored = [{"time": float(time), "restarts": restarts} for time, restarts in ((1, 0.0), (11, 1.0), (30, 2.0))]
    points = [{"time": time, "steps": steps} for time, steps in ((10.0, 1.0), (12.0, 2.0), (20.0, 1.0))]
    joined = join_points(stored, points)
    assert [(row["time"], row["restarts"]) for row in joined] == [
        (1.0, 0.0),
        (10.0, 1.0),
        (12.0, 1.0),
        (20.0, 2.0),
        (30.0, 2.0),
    ]
    assert join_points(stored, ()) == stored

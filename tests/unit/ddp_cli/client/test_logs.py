"""Lines of logs: their ranks and their order."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from ddp_cli.client import logs
from ddp_cli.client.api import Api
from ddp_cli.client.errors import ApiError, ClientError
from ddp_cli.client.logs import Follower, Line, LogPod, PodLogs, find_tail, log_pod, split_line
from tests.support.builders import Json, child_pod
from tests.support.launcher_config import encoded_config


class TestLines:
    POD = LogPod("x-1-1-abcde", "trainer", attempt=1, node=1, nproc=4)

    @pytest.mark.parametrize(
        ("text", "prefix", "words"),
        [
            ("T plain words", "ranks 4-7", "plain words"),
            ("T [rank6]: Traceback", "rank 6", "Traceback"),
            ("T [default1]:loss 0.5", "rank 5", "loss 0.5"),
            ("T [epoch9]: no rank of this pod", "ranks 4-7", "[epoch9]: no rank of this pod"),
            ("T", "ranks 4-7", ""),
        ],
    )
    def test_line_gets_its_rank_or_those_of_its_pod(self, text: str, prefix: str, words: str) -> None:
        assert split_line(text, self.POD) == Line("T", prefix, words)

    def test_times_without_trailing_zeros_are_sorted(self) -> None:
        times = ["2026-01-01T00:00:05Z", "2026-01-01T00:00:05.1Z", "2026-01-01T00:00:05.12Z", "2026-01-01T00:00:06Z"]
        assert sorted(times, key=lambda time: Line(time, "", "").order) == times

    def test_container_attempt_and_ranks_are_read_from_pod(self) -> None:
        config = encoded_config(nproc_per_node=8)
        spec = {
            "containers": [
                {"name": "logs"},
                {"name": "trainer", "env": [{"name": name, "value": value} for name, value in config.items()]},
            ]
        }
        result = log_pod(child_pod(2, attempt=3, spec=spec))
        assert (result.container, result.attempt, result.node, result.nproc) == ("trainer", 3, 2, 8)


class FakeLogs:
    """Pods that appear one after the other; each list of them returns the next state."""

    def __init__(self, *states: list[str]) -> None:
        self._states = list(states)
        self._pods: list[str] = []

    def pods(self) -> list[LogPod]:
        self._pods = self._states.pop(0) if self._states else self._pods
        return [LogPod(name, "trainer", 1, 0, 1) for name in self._pods]

    def is_over(self) -> bool:
        return not self._states

    def lines(self, pod: LogPod, *, follow: bool) -> Iterator[Line]:
        if pod.name == "forbidden":
            raise ClientError("pods/log is forbidden")
        yield Line("T", "rank 0", f"{pod.name} says a line")


class TestFollowLogs:
    def test_pods_of_later_attempts_are_followed_and_each_once(self) -> None:
        source = FakeLogs(["a"], ["a"], [], ["b"], ["b", "c"])
        lines = [line.text for line in Follower(source, lambda _: None).lines()]
        assert sorted(lines) == ["a says a line", "b says a line", "c says a line"]

    def test_error_in_one_stream_ends_all_streams(self) -> None:
        with pytest.raises(ClientError, match="forbidden"):
            list(Follower(FakeLogs(["forbidden"]), lambda _: None).lines())


class LostNode(Api):
    """A cluster whose API server does not reach the node of a pod, which is deleted later."""

    def __init__(self, status: int | None) -> None:
        self.namespace = self.home = "team"
        self.status = status
        self.phase = "Running"
        self.reads = 0

    def request(self, method: str, path: str, query: Any = None, body: Any = None, content_type: str = "") -> Json:
        """Return the job, or its pods: the lost one until its log was read twice."""
        if path.endswith("/pods"):
            return {"items": [child_pod(0)] if self.reads < 2 else []}
        return {"status": {"phase": self.phase}}

    def lines(self, path: str, query: Mapping[str, str] | None = None, *, timeout: float = 30.0) -> Iterator[str]:
        """Yield one line, then fail."""
        self.reads += 1
        yield "2026-01-01T00:00:05Z step 1"
        raise ApiError("dial tcp 10.0.0.7:10250: connect: no route to host", self.status)


class TestLostNode:
    @pytest.mark.parametrize("status", [500, 502, None])
    def test_following_ends_with_the_lost_pod_and_not_with_an_error(
        self, status: int | None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(logs, "_POLL_SECONDS", 0.01)
        cluster = LostNode(status)
        source = PodLogs(cluster, "train", None, None, None)
        assert [line.text for line in source.lines(log_pod(child_pod(0)), follow=True)] == ["step 1"]
        assert cluster.reads == 2

    def test_pods_that_a_watch_has_are_not_listed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        class Silent(LostNode):
            """A log in which nothing is written until its stream is opened again."""

            def request(self, method: str, *words: Any, **named: Any) -> Json:
                raise AssertionError("the watch has the pods")

            def lines(self, path: str, query: Any = None, *, timeout: float = 30.0) -> Iterator[str]:
                self.reads += 1
                yield from ()

        cluster = Silent(None)
        source = PodLogs(cluster, "train", None, None, None, watched=lambda: [child_pod(0)] * (cluster.reads < 3))
        waits: list[float | None] = []
        monkeypatch.setattr(source.left, "wait", waits.append)
        assert list(source.lines(log_pod(child_pod(0)), follow=True)) == []
        assert (cluster.reads, len(waits)) == (3, 3), "no loop without a pause until the watch knows the end"

    def test_end_of_the_job_ends_the_following_of_a_lost_pod(self) -> None:
        cluster = LostNode(500)
        cluster.phase = "Failed"
        assert len(list(PodLogs(cluster, "train", None, None, None).lines(log_pod(child_pod(0)), follow=True))) == 1

    def test_other_errors_and_reading_once_still_fail(self) -> None:
        for status, follow in ((403, True), (500, False)):
            with pytest.raises(ApiError):
                list(PodLogs(LostNode(status), "train", None, None, None).lines(log_pod(child_pod(0)), follow=follow))

    def test_log_that_hangs_delays_the_end_for_seconds_only(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(logs, "_END_SECONDS", 0.05)
        monkeypatch.setattr(logs, "_POLL_SECONDS", 0.01)
        hangs = threading.Event()

        class Hanging(FakeLogs):
            def lines(self, pod: LogPod, *, follow: bool) -> Iterator[Line]:
                yield Line("T", "rank 0", "the last line")
                hangs.wait(60)

        assert [line.text for line in Follower(Hanging(["a"]), lambda _: None).lines()] == ["the last line"]
        hangs.set()


class TestTail:
    @pytest.mark.parametrize("text", ["", "a", "a\n", "a\nbb\nccc\n", "a\nbb\nccc", "\n\n\n"])
    def test_offset_is_that_of_the_last_complete_lines(self, text: str, tmp_path: Path) -> None:
        path = tmp_path / "log"
        path.write_text(text)
        for lines in range(5):
            complete = text.split("\n")[:-1]
            rest = text[find_tail(path, lines) :].split("\n")[:-1]
            assert rest == complete[max(0, len(complete) - lines) :]

    def test_no_more_than_the_limit_is_read_of_a_line_without_end(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(logs, "TAIL_BYTES", 100)
        path = tmp_path / "log"
        path.write_text("x" * 1000)
        assert find_tail(path, 3) == 900

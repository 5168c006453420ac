"""Lines of logs: their ranks and their order."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ddp_cli.client import logs
from ddp_cli.client.errors import ClientError
from ddp_cli.client.logs import Follower, Line, LogPod, find_tail, log_pod, split_line
from tests.support.builders import child_pod
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

"""Logs in pieces from the end."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ddp_cli.client.errors import ClientError
from ddp_cli.client.job import Job
from ddp_cli.client.local import LocalBackend
from ddp_cli.client.logs import Line, LogPod, RunLogs
from ddp_cli.features.ui import logs
from ddp_cli.features.ui.logs import LogFollower, LogPiece, LogQuery, _read_pod_piece, read_piece, show_line
from ddp_cli.local.folder import RunFolder
from tests.support.builders import NOW, resource


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    folder = RunFolder.create(tmp_path, "train", NOW)
    set_ranks(folder, 1)
    return folder


def set_ranks(folder: RunFolder, nproc: int) -> None:
    folder.write_status(resource(procPerNode=nproc) | {"status": {"phase": "Running"}})


def write(folder: RunFolder, text: str, attempt: int = 1, pod: int = 0) -> None:
    with (folder.logs / f"attempt-{attempt}-pod-{pod}.log").open("a") as stream:
        stream.write(text)


ALL = LogQuery()


def read(folder: RunFolder, query: LogQuery = ALL, cursor: str = "") -> LogPiece:
    return read_piece(Job(LocalBackend(folder.path.parent), str(folder.path), {}), query, cursor)


def read_all(folder: RunFolder, query: LogQuery = ALL) -> list[Line]:
    """Return the lines of all pieces, as a reader sees them who asks for older lines until there are none."""
    piece = read(folder, query)
    lines = list(piece.lines)
    while piece.before:
        piece = read(folder, query, piece.before)
        lines = [*piece.lines, *lines]
    return lines


@pytest.mark.parametrize("chunk", [64, 1000, 256 << 10])
def test_pieces_together_are_the_log(folder: RunFolder, monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    monkeypatch.setattr(logs, "_CHUNK", chunk)
    expected = [f"line {number} é" for number in range(1003)]
    write(folder, "".join(f"{line}\n" for line in expected))
    assert [line.text for line in read_all(folder)] == expected


def test_piece_reads_only_the_end_of_a_large_log(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    write(folder, "x" * 99 + "\n")
    path = folder.logs / "attempt-1-pod-0.log"
    with path.open("r+b") as stream:
        stream.truncate(40 << 30)  # a sparse file: reading it would take minutes
        stream.seek(0, 2)
        stream.write(b"\nthe end\n")
    assert read(folder, LogQuery()).lines[-1].text == "the end"


def test_search_gives_up_after_its_limit_and_continues_there(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "_SEARCH_BYTES", 4000)
    write(folder, "needle\n" + "hay\n" * 3000)
    piece = read(folder, LogQuery(text="NEEDLE"))
    assert piece.lines == []
    assert "older lines are searched on request" in piece.note
    assert [line.text for line in read_all(folder, LogQuery(text="needle"))] == ["needle"]


def test_rank_selects_its_lines_and_those_of_all_ranks(folder: RunFolder) -> None:
    set_ranks(folder, 2)
    write(folder, "[rank0]: a\n[rank1]: b\nlauncher\n")
    write(folder, "[rank2]: c\n[rank3]: d\n", pod=1)
    assert [line.text for line in read_all(folder, LogQuery(rank=1))] == ["b", "launcher"]
    assert [line.text for line in read_all(folder, LogQuery(rank=3))] == ["d"]
    assert {line.prefix for line in read_all(folder)} == {"rank 0", "rank 1", "ranks 0-1", "rank 2", "rank 3"}


def test_lines_of_several_pods_are_ordered_by_their_times_across_pieces(folder: RunFolder) -> None:
    for pod in (0, 1):
        lines = [f"pod {pod} line {number:04}\n" for number in range(700)]
        write(folder, "".join(lines), pod=pod)
        size = len(lines[0])
        notes = [f"{size * (number + 1)} {1000 * (2 * number + pod)}\n" for number in range(700)]
        (folder.logs / f"attempt-1-pod-{pod}.times").write_text("".join(notes))
    lines = read_all(folder)
    assert [line.text for line in lines] == [f"pod {pod} line {number:04}" for number in range(700) for pod in (0, 1)]
    assert [line.time for line in lines] == sorted(line.time for line in lines)


def test_newest_lines_are_last_although_their_time_is_not_noted_yet(folder: RunFolder) -> None:
    expected = [f"line {number:04}" for number in range(1000)]
    write(folder, "".join(f"{line}\n" for line in expected))
    (folder.logs / "attempt-1-pod-0.times").write_text("100 1000\n9980 2000\n")
    assert read(folder, ALL).lines[-1].text == "line 0999"
    assert [line.text for line in read_all(folder)] == expected


def test_earlier_attempts_are_older_pieces(folder: RunFolder) -> None:
    write(folder, "first\n", attempt=1)
    write(folder, "second\n", attempt=2)
    assert [line.text for line in read(folder, LogQuery()).lines] == ["second"]
    assert [(line.attempt, line.text) for line in read_all(folder)] == [(1, "first"), (2, "second")]


def test_line_is_shown_without_control_characters_and_bounded() -> None:
    shown = show_line(Line("", "rank 0", "\x1b[31mred\x1b[0m \u202eabc \x07" + "y" * 9000))
    assert shown.text.startswith("red abc yyy")
    assert shown.text.endswith("(cut; the line is longer)")
    assert len(shown.text) < 2100


@pytest.mark.parametrize("cursor", ["../x", "1:2:3x", "9" * 40, "1:" + "9," * 100])
def test_odd_cursor_is_refused(folder: RunFolder, cursor: str) -> None:
    with pytest.raises(ClientError, match="reload the page"):
        read(folder, ALL, cursor)


def test_follower_reads_new_lines_of_new_attempts(folder: RunFolder) -> None:
    folder.write_manifest("", (), resource(), "ddp run")  # this process holds its lock: the run is under way
    write(folder, "old\n")
    source = RunLogs(folder, None, None, None)
    source.skip_written()
    follower = LogFollower(source)
    taken: list[Line] = []

    def until(count: int) -> None:
        while len(taken) < count:
            taken.extend(follower.read(LogQuery()))
            time.sleep(0.01)

    write(folder, "new\n")
    until(1)
    write(folder, "newer\n", attempt=2)
    until(2)
    assert [(line.attempt, line.text) for line in taken] == [(1, "new"), (2, "newer")]
    assert all(line.time for line in taken)
    follower.close()
    while any(thread.is_alive() for thread in follower._threads.values()):
        time.sleep(0.01)
    write(folder, "late\n")
    assert follower.read(LogQuery()) == []


class Source:
    """The logs of two pods with the kubelet's times."""

    def pods(self) -> list[LogPod]:
        return [LogPod("a", "", 1, 0, 1), LogPod("b", "", 1, 1, 1)]

    def is_over(self) -> bool:
        return True

    def lines(self, pod: LogPod, *, follow: bool) -> Iterator[Line]:
        for second in range(2):
            yield Line(f"2026-11-29T10:00:0{second}.{pod.node}Z", f"rank {pod.node}", f"{pod.name}{second}")


def test_lines_of_pods_are_merged_by_time() -> None:
    assert [line.text for line in _read_pod_piece(Source(), LogQuery(), 400).lines] == ["a0", "b0", "a1", "b1"]
    assert [line.text for line in _read_pod_piece(Source(), LogQuery(rank=1), 400).lines] == ["b0", "b1"]

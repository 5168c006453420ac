"""The pod's metrics endpoint: its responses, its limits, and the run's step."""

from __future__ import annotations

import dataclasses
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext, suppress
from pathlib import Path
from typing import get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from ddp_pod.base.files import write_json
from ddp_pod.contract import series
from ddp_pod.contract.progress import RankProgress, Uploads
from ddp_pod.contract.records import to_json
from ddp_pod.contract.report import MemoryCopies, PodReport, PreflightResult, TrackedRun
from ddp_pod.contract.run_report import Stall, StalledRank
from ddp_pod.contract.series import SERIES
from ddp_pod.progress.metrics import MetricsEndpoint
from ddp_pod.progress.prometheus import format_page, merge_pages, read_script_page
from ddp_pod.progress.rank_progress import RankReader, complete_progress, fetch_page, find_missing_steps, merge_counters
from ddp_pod.rank import counters as slots
from ddp_pod.rank.counter_slots import open_slot
from ddp_pod.rank.counters import CounterMemory, RankCounters


def ask(port: int, *pieces: bytes) -> tuple[bytes, bytes]:
    """Send a request in pieces. Returns the head and the body of the response."""
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        for piece in pieces:
            connection.sendall(piece)
        answer = b"".join(iter(lambda: connection.recv(4096), b""))
    head, _, body = answer.partition(b"\r\n\r\n")
    return head, body


def build_endpoint(folder: Path) -> MetricsEndpoint:
    """Return the endpoint of a pod in the phase Done."""

    def build_report(ranks: Sequence[RankProgress]) -> PodReport:
        return PodReport(phase="Done", restarts=2, ranks=tuple(ranks))

    def read_page(path: str, query: str) -> bytes | None:
        return f"page of {query}".encode() if path == "/own" else None

    return MetricsEndpoint(RankReader(str(folder)), build_report, read_page)


METRICS = b"GET /metrics HTTP/1.1\r\n\r\n"


@pytest.mark.parametrize(
    ("request_line", "status", "body"),
    [
        (b"GET /report HTTP/1.1", b"200 OK", b'"phase": "Done", "restarts": 2, "ranks": [{"rank": 3,'),
        (b"GET /metrics HTTP/1.1", b"200 OK", b'ddp_step{rank="3"} 5\n'),
        (b"GET /metrics?name=x HTTP/1.1", b"200 OK", b'ddp_launcher_phase{phase="Done"} 1\n'),
        (b"GET /healthz HTTP/1.1", b"200 OK", b"ok\n"),
        (b"HEAD /healthz HTTP/1.1", b"200 OK", b""),
        (b"GET /own?wait=8 HTTP/1.1", b"200 OK", b"page of wait=8"),
        (b"POST /own HTTP/1.1", b"404 Not Found", b"only /report, /metrics, "),
        (
            b"GET / HTTP/1.1",
            b"404 Not Found",
            b"only /report, /metrics, /healthz and what docs/pod-contract.md lists\n",
        ),
        (b"GET /metrics", b"404 Not Found", b"only /report, /metrics, /healthz and what docs/pod-contract.md lists\n"),
    ],
)
def test_endpoint_serves_the_report_as_json_and_for_prometheus(
    tmp_path: Path, request_line: bytes, status: bytes, body: bytes
) -> None:
    (tmp_path / "metrics").mkdir()
    (tmp_path / "metrics" / "0.prom").write_text('ddp_step{rank="3"} 5\n')
    head, response = ask(
        build_endpoint(tmp_path).serve(0), request_line[:5], request_line[5:] + b"\r\nHost: x\r\n", b"\r\n"
    )
    assert head.startswith(b"HTTP/1.1 " + status + b"\r\n")
    assert body in response
    length = len(response) if not request_line.startswith(b"HEAD") else 3
    assert f"Content-Length: {length}\r\n".encode() in head


@pytest.mark.parametrize(
    ("host", "is_served"),
    [
        ("127.0.0.1:9400", True),
        ("LOCALHOST", True),
        ("[::1]:9400", True),
        (socket.gethostname(), True),
        ("10.1.2.3:9400", True),
        ("evil.example:9400", False),
        ("127.0.0.1.evil.example", False),
        ("localhost.evil.example", False),
        ("localhost@evil.example", False),
    ],
)
def test_page_of_local_run_is_not_served_to_foreign_name(tmp_path: Path, host: str, is_served: bool) -> None:
    request = f"GET /metrics HTTP/1.1\r\nhost: {host}\r\n\r\n".encode()
    everywhere = build_endpoint(tmp_path).serve(0)
    assert b"Done" in ask(everywhere, request)[1]
    local = build_endpoint(tmp_path).serve(0, "127.0.0.1")
    assert (b"Done" in ask(local, request)[1]) is is_served
    assert b"Done" in ask(local, b"GET /metrics HTTP/1.0\r\n\r\n")[1]


def test_endpoint_survives_silent_connections(tmp_path: Path) -> None:
    metrics = build_endpoint(tmp_path)
    port = metrics.serve(0)
    for _ in range(20):  # more than it serves at the same time
        socket.create_connection(("127.0.0.1", port), timeout=10).close()
    assert b"Done" in ask(port, METRICS)[1]


def read_end(connection: socket.socket) -> bytes:
    """Read a connection until the peer closes or resets it."""
    try:
        return b"".join(iter(lambda: connection.recv(4096), b""))
    except ConnectionError:
        return b""


def drip(connection: socket.socket) -> None:
    for _ in range(6000):  # as many as would take ten minutes
        connection.sendall(b"x")
        time.sleep(0.1)


def test_new_connection_closes_oldest_of_too_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddp_pod.progress.metrics._CONNECTION_SECONDS", 3600.0)
    port = build_endpoint(tmp_path).serve(0)
    with ExitStack() as stack:
        slow = [stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=60)) for _ in range(16)]
        for connection in slow:
            connection.sendall(b"G")
        assert b"Done" in ask(port, METRICS)[1]
        assert read_end(slow[0]) == b""
        slow[15].sendall(b"ET /healthz HTTP/1.1\r\n\r\n")
        assert read_end(slow[15]).endswith(b"ok\n")


def test_connection_ends_at_its_deadline_however_often_it_sends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ddp_pod.progress.metrics._CONNECTION_SECONDS", 0.3)
    port = build_endpoint(tmp_path).serve(0)
    for start in (b"", b"POST /x HTTP/1.1\r\nContent-Length: 60000\r\n"):
        with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
            connection.sendall(start)
            with pytest.raises(ConnectionError):
                drip(connection)


def test_number_of_concurrent_pages_is_limited(tmp_path: Path) -> None:
    release = threading.Event()
    started = threading.Semaphore(0)

    def build_slowly(ranks: Sequence[RankProgress]) -> PodReport:
        started.release()
        release.wait(60)
        return PodReport()

    port = MetricsEndpoint(RankReader(str(tmp_path)), build_slowly).serve(0)
    with ExitStack() as stack:
        for _ in range(16):
            connection = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=60))
            connection.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
            assert started.acquire(timeout=60)
        assert ask(port, b"GET /metrics HTTP/1.1\r\n\r\n")[0].startswith(b"HTTP/1.1 503 ")
        release.set()


@pytest.mark.parametrize(
    ("pages", "rank", "step"),
    [
        ({0: "ddp_step 5\n", 1: "ddp_step 7\n"}, 1, 7),
        ({0: "ddp_step 5\n", 1: "x 1\n"}, 1, 5),
        ({0: "ddp_steps_total 3\n"}, 0, 3),
        ({0: "ddp_steps_total 3\nddp_step 9\n"}, 0, 9),
        ({0: "x 1\n"}, 0, None),
    ],
)
def test_step_is_read_from_rank_or_else_from_peer(
    tmp_path: Path, pages: dict[int, str], rank: int, step: float | None
) -> None:
    (tmp_path / "metrics").mkdir()
    for number, text in pages.items():
        (tmp_path / "metrics" / f"{number}.prom").write_text(text)
    assert RankReader(str(tmp_path)).step(rank) == step


@pytest.mark.parametrize(
    ("pages", "merged"),
    [
        (["# HELP a one\n# TYPE a gauge\na 1\n", "# HELP a two\na 2\n"], "# HELP a one\n# TYPE a gauge\na 1\n"),
        (['a{rank="0"} 1\n', 'b 3\na{rank="1"} 2 1700000000\n'], 'a{rank="0"} 1\na{rank="1"} 2 1700000000\nb 3\n'),
        (["# TYPE s histogram\ns_sum 1\n", "s_count 2\n"], "# TYPE s histogram\ns_sum 1\ns_count 2\n"),
        (
            ["# TYPE s histogram\n# TYPE s_sum gauge\ns_sum 1\ns_count 2\n"],
            "# TYPE s_sum gauge\ns_sum 1\n# TYPE s histogram\ns_count 2\n",
        ),
        (["ddp_launcher_up 1\n", "ddp_launcher_up2 1\n# a word\na one\nno sample\n"], "ddp_launcher_up 1\n"),
        (["ddp_launcher_up 1\n", "<html>\nx\na{ 1\na one\nddp_launcher_up 9\na 1\na 2\n"], "ddp_launcher_up 1\na 1\n"),
        (["b_total 1\n# EOF\nc NaN\n"], "b_total 1\nc NaN\n"),
    ],
)
def test_merged_page_is_valid_for_prometheus(pages: list[str], merged: str) -> None:
    assert merge_pages(pages) == merged


@given(st.lists(st.text(max_size=200), max_size=4))
def test_merge_accepts_any_page(pages: list[str]) -> None:
    merged = merge_pages(["own 1\n", *pages])
    assert merged.startswith("own 1\n")
    assert merge_pages([merged]) == merged
    for page in pages:
        read_script_page(page)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("ddp_step 5", RankProgress(step=5)),
        ('ddp_step{rank="3"} 5 1700000000', RankProgress(3, step=5)),
        ('ddp_step{rank="3",} 5', RankProgress(3, step=5)),
        ('ddp_step{rank="3",device="0"} 5', RankProgress()),
        ("ddp_steps_total 5\nddp_samples_total 64", RankProgress(steps=5, samples=64)),
        ("ddp_step_duration_seconds_sum 2.5", RankProgress(step_seconds=2.5)),
        ("ddp_step NaN", RankProgress()),
        ("ddp_step +Inf", RankProgress()),
        ("ddp_step five", RankProgress()),
        ("other_step 5", RankProgress()),
        ("ddp_launcher_phase 5", RankProgress()),
    ],
)
def test_progress_of_a_script_page_has_its_plain_finite_numbers(line: str, expected: RankProgress) -> None:
    assert read_script_page(f"# TYPE ddp_step gauge\n{line}\n") == expected


def test_loss_of_a_script_page_that_is_not_finite_has_its_step() -> None:
    assert read_script_page("ddp_loss NaN\nddp_step 7\n").lost_loss_step == 7


def test_every_number_of_the_report_has_a_series() -> None:
    hints = get_type_hints(RankProgress)
    assert set(SERIES) == {name for name, kind in hints.items() if kind == (float | None)}
    numbers = dict.fromkeys(SERIES, 2.0)
    progress = RankProgress(1)
    progress.update(numbers)
    report = PodReport(
        phase="Running",
        restart_step=4.0,
        ranks=(progress, RankProgress(2, lost_loss_step=3.0), RankProgress(5, step=1.0)),
        stall=Stall(1, 2.0, 3.0, (StalledRank(1, "Busy", 'rank 1 is in "x" (a\\b.py:1)'),)),
        preflight=PreflightResult(
            done=("dns", "tcp"), failed=("tcp",), dns_seconds=0.5, all_reduce_rate=1e9, transport="IB", gpu_direct=True,
            pair=(3, 7), pair_rate=2e9,
        ),
        uploads=Uploads(1.0, 2.0, 3.0, 0),
        memory=MemoryCopies(1, 2, 3, 4, 5),
        runs=(TrackedRun("wandb", "https://wandb.ai/a"),),
    )  # fmt: skip
    page = format_page(report, {5: 'ddp_step{rank="5"} 1\nddp_own{rank="5"} 2\n'})
    assert list(text_string_to_metric_families(page))
    lines = page.splitlines()
    for name in [value for key, value in vars(series).items() if key.startswith("METRIC_")]:
        assert any(line.startswith((f"{name} ", f"{name}{{")) for line in lines), name
    for line in (
        'ddp_steps_total{rank="1"} 2',
        'ddp_loss{rank="2"} nan',
        'ddp_own{rank="5"} 2',
        'ddp_launcher_stalled_rank_info{rank="1",state="Busy",what="rank 1 is in \\"x\\" (a\\\\b.py:1)"} 1',
        'ddp_launcher_preflight_passed{check="tcp"} 0',
        'ddp_launcher_slowest_pair_bytes_per_second{pods="3,7"} 2000000000',
        'ddp_launcher_network_info{transport="IB",gpu_direct="true"} 1',
    ):
        assert line in lines


@pytest.mark.parametrize(
    ("answer", "page"),
    [
        (b"HTTP/1.1 200 OK\r\nServer: x\r\n\r\na 1\xff\n", "a 1\ufffd\n"),
        (b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * ((1 << 20) - 19), "x" * ((1 << 20) - 19)),
        (b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * ((1 << 20) - 18), None),
        (b"HTTP/1.1 404 Not Found\r\n\r\n 200 ", None),
        (b"", None),
    ],
)
def test_incomplete_page_is_refused(answer: bytes, page: str | None) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            connection, _ = server.accept()
            with connection, suppress(OSError):
                assert connection.recv(4096).startswith(b"GET /threads HTTP/1.0\r\n")
                connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        with nullcontext() if page is not None else pytest.raises(ValueError, match="no usable page"):
            assert fetch_page(server.getsockname()[1], "/threads", timeout=60) == page
        thread.join()


def test_ranks_with_pages_are_collected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = RankReader(str(tmp_path))
    assert (reader.collect(), reader.progress(), reader.reads_log, reader.threads(0)) == ({}, None, False, "")
    folder = tmp_path / "metrics"
    folder.mkdir()
    files = {"10.prom": "ddp_step 10\n", "2.prom": "ddp_step 2\n", "2.log": '{"step": 1}', "x.prom": "", "3.tmp": ""}
    for name, text in (files | {"1.port": "no", "4.log": '{"rank": 9, "step": 4}', "10.port": "1"}).items():
        (folder / name).write_text(text)
    assert {rank: page.progress.step for rank, page in reader.collect().items()} == {2: 2, 4: 4, 10: 10}
    assert list(reader.collect()) == [2, 4, 10]
    assert reader.rank_progress(4) == RankProgress(9, step=4)
    assert reader.reads_log
    monkeypatch.setattr(threading.Thread, "start", lambda thread: None)  # a thread without CPU time
    monkeypatch.setattr(threading.Thread, "join", lambda thread, timeout: None)
    assert RankReader(str(tmp_path)).progress() == RankProgress(step=2)


@pytest.fixture
def counters(tmp_path: Path) -> CounterMemory:
    """The memory of a pod with two ranks, the first of which has counted 7 steps."""
    memory = CounterMemory(str(tmp_path), 2)
    slot = open_slot(str(tmp_path), 0)
    for index, value in (
        (slots.PID, 10.0),
        (slots.RANK, 4.0),
        (slots.WORLD_SIZE, 8.0),
        (slots.VISIBILITY, slots.COUNTED),
        (slots.STEPS, 7.0),
        (slots.LAST_STEP_TIME, 13.0),
        (slots.FIRST_STEP_TIME, 1.0),
        (slots.BATCH, 16.0),
    ):
        slot[index] = value
    (tmp_path / "metrics").mkdir()
    return memory


def test_counters_are_the_progress_of_the_rank(tmp_path: Path, counters: CounterMemory) -> None:
    reader = RankReader(str(tmp_path), counters)
    progress = reader.collect()[0].progress
    assert (progress.rank, progress.steps, progress.step_seconds, progress.samples) == (4, 7, 14.0, 112.0)
    assert progress.step is None
    assert (reader.step(0), reader.count_steps(0), reader.count_steps(1)) == (None, 7, None)


@pytest.mark.parametrize(
    ("known", "step", "steps", "total"),
    [
        (RankProgress(is_counted=True, step=105, steps=5, total_steps=214), 107, 7, 214),
        # A script that prints every twenty steps: its last line is from before the restart.
        (RankProgress(is_counted=True, step=100, steps=100), None, 7, None),
        (RankProgress(step=640, steps=640), 640, 640, None),  # in another unit
        (RankProgress(is_counted=True, step=5, steps=5, total_steps=6), 7, 7, None),  # the total was of another number
    ],
)
def test_progress_of_the_log_continues_with_the_counter(
    tmp_path: Path, counters: CounterMemory, known: RankProgress, step: float | None, steps: float, total: float | None
) -> None:
    write_json(str(tmp_path / "metrics" / "0.log"), to_json(dataclasses.replace(known, loss=0.5)))
    progress = RankReader(str(tmp_path), counters).collect()[0].progress
    assert (progress.step, progress.steps, progress.total_steps, progress.loss) == (step, steps, total, 0.5)
    assert progress.share == (step / total if step and total else None)


def test_recorded_steps_have_no_page(tmp_path: Path, counters: CounterMemory) -> None:
    open_slot(str(tmp_path), 1)[slots.PID] = 11.0
    slot = memoryview(vars(counters)["_memory"])
    slot[slots.VISIBILITY] = slots.INVISIBLE
    assert RankReader(str(tmp_path), counters).collect() == {}


@pytest.mark.parametrize(
    ("step", "total", "changes", "missing"),
    [
        (100.0, 100.0, {}, 0.0),
        (28.0, 30.0, {}, 0.0),  # the script counts differently
        (983.0, 1000.0, {}, 0.0),  # skipped steps
        (93.0, 94.0, {}, 0.0),  # a last small batch
        (10.0, 30.0, {}, 20.0),
        (15.0, 30.0, {"world_size": 2.0}, 15.0),
        (469.0, 938.0, {"world_size": 2.0, "total_margin": 10.0}, 0.0),  # samples of all ranks
        (100.0, 120.0, {"total_margin": 60.0}, 0.0),  # estimated by two epochs
        (40.0, 120.0, {"total_margin": 60.0}, 80.0),
    ],
)
def test_success_completes_the_progress_unless_many_steps_are_missing(
    step: float, total: float, changes: dict[str, float], missing: float
) -> None:
    progress = RankProgress(step=step, total_steps=total, share=step / total)
    progress.update(changes)
    assert find_missing_steps(progress) == missing
    completed = dataclasses.replace(progress, total_steps=step, share=1.0)
    assert complete_progress(progress) == (progress if missing else completed)


def test_plan_and_lost_loss_of_a_rank_are_in_its_progress() -> None:
    known = dict.fromkeys(RankCounters._fields, None) | {"rank": 0, "steps": 10, "step_seconds": 1.0}
    known |= {"last_step_time": 0.0, "world_size": 2, "epoch": 2, "epochs": 8, "total_steps": 40, "first_step": 0}
    counters = RankCounters(**known)
    found = merge_counters(RankProgress(loss=1.0), counters)
    assert (found.epoch, found.epochs, found.step, found.total_steps, found.share, found.loss) == (
        2,
        8,
        10,
        40,
        0.25,
        1,
    )
    lost = merge_counters(RankProgress(loss=1.0), counters._replace(lost_loss_step=7))
    assert (to_json(lost).get("loss"), lost.lost_loss_step) == (None, 7.0)


def test_progress_without_a_step_is_not_completed() -> None:
    assert complete_progress(RankProgress(loss=1.0)) == RankProgress(loss=1.0)


@pytest.mark.parametrize("is_full", [True, False])
def test_script_that_ends_where_its_count_is_full_has_made_all_steps(*, is_full: bool) -> None:
    progress = RankProgress(step=60.0, is_count_full=is_full)
    assert complete_progress(progress).total_steps == (60.0 if is_full else None)


@pytest.mark.parametrize(("last", "shown"), [(9.0, 10.0), (10.0, 10.0), (4.0, 4.0)])
def test_finished_run_shows_all_epochs_if_script_counts_from_0(last: float, shown: float) -> None:
    assert complete_progress(RankProgress(steps=8.0, epoch=last, epochs=10.0)).epoch == shown

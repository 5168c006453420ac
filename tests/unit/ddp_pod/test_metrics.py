"""The pod's metrics endpoint: its responses, its limits, and the run's step."""

from __future__ import annotations

import math
import socket
import threading
import time
from contextlib import ExitStack, nullcontext, suppress
from pathlib import Path

import pytest

from ddp_pod.progress.counted_pages import (
    complete_progress,
    drop_lost_loss,
    find_missing_steps,
    merge_counters,
)
from ddp_pod.progress.metrics import MetricsEndpoint, fetch_page, merge_pages, read_progress
from ddp_pod.rank import counters as slots
from ddp_pod.rank.counters import CounterMemory, RankCounters, open_slot


def ask(port: int, *pieces: bytes) -> tuple[bytes, bytes]:
    """Send a request in pieces. Returns the head and the body of the response."""
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        for piece in pieces:
            connection.sendall(piece)
        answer = b"".join(iter(lambda: connection.recv(4096), b""))
    head, _, body = answer.partition(b"\r\n\r\n")
    return head, body


@pytest.mark.parametrize(
    ("request_line", "status", "body"),
    [
        (b"GET /metrics HTTP/1.1", b"200 OK", b"own 1\nrank 2\n# ddp_launcher_last_failure {}\n"),
        (b"GET /metrics?name=x HTTP/1.1", b"200 OK", b"own 1\nrank 2\n# ddp_launcher_last_failure {}\n"),
        (b"GET /healthz HTTP/1.1", b"200 OK", b"ok\n"),
        (b"HEAD /healthz HTTP/1.1", b"200 OK", b""),
        (b"GET / HTTP/1.1", b"404 Not Found", b"only /metrics and /healthz\n"),
        (b"GET /metrics", b"404 Not Found", b"only /metrics and /healthz\n"),
    ],
)
def test_endpoint_serves_pages(tmp_path: Path, request_line: bytes, status: bytes, body: bytes) -> None:
    (tmp_path / "metrics").mkdir()
    (tmp_path / "metrics" / "0.prom").write_text("rank 2\n")
    metrics = MetricsEndpoint(str(tmp_path), lambda: "own 1\n")
    metrics.last_failure = b"{}"
    port = metrics.serve(0)
    head, response = ask(port, request_line[:5], request_line[5:] + b"\r\nHost: x\r\n", b"\r\n")
    assert head.startswith(b"HTTP/1.1 " + status + b"\r\n")
    assert response == body
    length = len(body) if not request_line.startswith(b"HEAD") else 3
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
    everywhere = MetricsEndpoint(str(tmp_path), lambda: "own 1\n").serve(0)
    assert ask(everywhere, request)[1] == b"own 1\n"
    local = MetricsEndpoint(str(tmp_path), lambda: "own 1\n").serve(0, "127.0.0.1")
    assert (ask(local, request)[1] == b"own 1\n") is is_served
    assert ask(local, b"GET /metrics HTTP/1.0\r\n\r\n")[1] == b"own 1\n"


def test_endpoint_survives_silent_connections(tmp_path: Path) -> None:
    metrics = MetricsEndpoint(str(tmp_path), lambda: "own 1\n")
    port = metrics.serve(0)
    for _ in range(20):  # more than it serves at the same time
        socket.create_connection(("127.0.0.1", port), timeout=10).close()
    assert ask(port, b"GET /metrics HTTP/1.1\r\n\r\n")[1] == b"own 1\n"


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
    port = MetricsEndpoint(str(tmp_path), lambda: "own 1\n").serve(0)
    with ExitStack() as stack:
        slow = [stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=60)) for _ in range(16)]
        for connection in slow:
            connection.sendall(b"G")
        assert ask(port, b"GET /metrics HTTP/1.1\r\n\r\n")[1] == b"own 1\n"
        assert read_end(slow[0]) == b""
        slow[15].sendall(b"ET /healthz HTTP/1.1\r\n\r\n")
        assert read_end(slow[15]).endswith(b"ok\n")


def test_connection_ends_at_its_deadline_however_often_it_sends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ddp_pod.progress.metrics._CONNECTION_SECONDS", 0.3)
    port = MetricsEndpoint(str(tmp_path), lambda: "own 1\n").serve(0)
    for start in (b"", b"POST /x HTTP/1.1\r\nContent-Length: 60000\r\n\r\n"):
        with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
            connection.sendall(start)
            with pytest.raises(ConnectionError):
                drip(connection)


def test_number_of_concurrent_pages_is_limited(tmp_path: Path) -> None:
    release = threading.Event()
    started = threading.Semaphore(0)

    def build_slowly() -> str:
        started.release()
        release.wait(60)
        return "own 1\n"

    port = MetricsEndpoint(str(tmp_path), build_slowly).serve(0)
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
        lines = (f"# TYPE {line.split()[0]} gauge\n{line}\n" for line in text.splitlines())
        (tmp_path / "metrics" / f"{number}.prom").write_text("".join(lines))
    assert MetricsEndpoint(str(tmp_path), lambda: "").step(rank) == step


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
        (["b_total 1\n# EOF\nc NaN\n"], "b_total 1\nc NaN\n"),
    ],
)
def test_merged_page_is_valid_for_prometheus(pages: list[str], merged: str) -> None:
    assert merge_pages(pages) == merged


@pytest.mark.parametrize(
    ("line", "values"),
    [
        ("ddp_step 5", {"ddp_step": 5}),
        ('ddp_step{rank="3"} 5', {"ddp_step": 5}),
        ('ddp_step{rank="3",} 5', {"ddp_step": 5}),
        ('ddp_step{rank="3",device="0"} 5', {}),
        ("ddp_steps_total 5", {"ddp_steps_total": 5}),
        ("ddp_step_duration_seconds_sum 2.5", {"ddp_step_duration_seconds_sum": 2.5}),
        ("ddp_wait_seconds_sum 2.5", {}),
        ("ddp_step NaN", {}),
        ("ddp_step +Inf", {}),
        ("ddp_step five", {}),
        ("ddp_untyped 5", {}),
        ("other_step 5", {}),
        ("ddp_" + 59 * "x" + " 5", {"ddp_" + 59 * "x": 5}),
        ("ddp_" + 60 * "x" + " 5", {}),
    ],
)
def test_progress_has_plain_finite_gauges_and_counters(line: str, values: dict[str, float]) -> None:
    kinds = {"ddp_step_duration_seconds": "histogram", "ddp_wait_seconds": "histogram", "ddp_steps": "counter"}
    kinds |= dict.fromkeys(("ddp_step", "other_step", "ddp_" + 59 * "x", "ddp_" + 60 * "x"), "gauge")
    page = "".join(f"# HELP {name} x\n# TYPE {name} {kind}\n" for name, kind in kinds.items())
    assert read_progress(f"{page}{line}\n") == values


def test_progress_is_limited_to_thirty_series() -> None:
    page = "".join(f"# TYPE ddp_x{number} gauge\nddp_x{number} {number}\n" for number in range(40))
    assert read_progress(page) == {f"ddp_x{number}": number for number in range(30)}


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


def test_posted_body_is_received_completely(tmp_path: Path) -> None:
    received: list[tuple[bytes, bytes, bytes]] = []

    def receive(path: bytes, head: bytes, body: bytes) -> str:
        received.append((path, head.splitlines()[0], body))
        return "204 No Content"

    port = MetricsEndpoint(str(tmp_path), lambda: "", receive).serve(0)
    request = b"POST /status HTTP/1.1\r\nContent-Length: 10\r\n\r\n"
    assert ask(port, request, b"01234", b"56789")[0].startswith(b"HTTP/1.1 204 No Content\r\n")
    ask(port, b"POST /status HTTP/1.1\r\n\r\n")
    first = b"POST /status HTTP/1.1"
    assert received == [(b"/status", first, b"0123456789"), (b"/status", first, b"")]


def test_ranks_with_pages_are_collected(tmp_path: Path) -> None:
    metrics = MetricsEndpoint(str(tmp_path), lambda: "")
    assert (metrics.collect(), metrics.progress(), metrics.reads_log, metrics.threads(0)) == ({}, {}, False, "")
    folder = tmp_path / "metrics"
    folder.mkdir()
    page = "# TYPE ddp_step gauge\nddp_step %d\n"
    files = {"10.prom": page % 10, "2.prom": page % 2, "2.log": page % 1, "x.prom": "", "3.tmp": "", "1.port": "no"}
    for name, text in files.items():
        (folder / name).write_text(text)
    assert metrics.collect() == {2: page % 2, 10: page % 10}
    assert list(metrics.collect()) == [2, 10]
    assert metrics.progress() == {"ddp_step": 2}
    assert metrics.reads_log


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


def test_counters_are_a_page_of_the_rank(tmp_path: Path, counters: CounterMemory) -> None:
    metrics = MetricsEndpoint(str(tmp_path), lambda: "", counters=counters)
    values = read_progress(metrics.collect()[0])
    assert list(metrics.collect()) == [0]
    assert 'ddp_steps_total{rank="4"} 7.0' in metrics.collect()[0]
    assert (values["ddp_step_duration_seconds_sum"], values["ddp_samples_total"]) == (14.0, 112.0)
    assert "ddp_step" not in values
    assert (metrics.step(0), metrics.count_steps(0), metrics.count_steps(1)) == (None, 7, None)


def test_page_of_the_log_continues_with_the_counter(tmp_path: Path, counters: CounterMemory) -> None:
    log = "# counted\n# TYPE ddp_step gauge\nddp_step 105\n# TYPE ddp_steps_total counter\nddp_steps_total 5\n"
    log += "# TYPE ddp_planned_steps gauge\nddp_planned_steps 214\n# TYPE ddp_loss gauge\nddp_loss 0.5\n"
    (tmp_path / "metrics" / "0.log").write_text(log)
    values = read_progress(MetricsEndpoint(str(tmp_path), lambda: "", counters=counters).collect()[0])
    assert (values["ddp_step"], values["ddp_steps_total"], values["ddp_loss"]) == (107, 7, 0.5)
    assert values["ddp_progress_ratio"] == 0.5


def test_position_of_a_former_process_is_not_that_of_its_successor(tmp_path: Path, counters: CounterMemory) -> None:
    """A script that prints every twenty steps: its last line is from before the restart."""
    log = "# counted\n# TYPE ddp_step gauge\nddp_step 100\n# TYPE ddp_steps_total counter\nddp_steps_total 100\n"
    (tmp_path / "metrics" / "0.log").write_text(log)
    values = read_progress(MetricsEndpoint(str(tmp_path), lambda: "", counters=counters).collect()[0])
    assert values["ddp_steps_total"] == 7
    assert values.get("ddp_step") is None, "unknown until its first line"


def test_page_in_another_unit_keeps_its_steps(tmp_path: Path, counters: CounterMemory) -> None:
    log = "# TYPE ddp_step gauge\nddp_step 640\n# TYPE ddp_steps_total counter\nddp_steps_total 640\n"
    (tmp_path / "metrics" / "0.post").write_text(log)
    values = read_progress(MetricsEndpoint(str(tmp_path), lambda: "", counters=counters).collect()[0])
    assert (values["ddp_step"], values["ddp_steps_total"]) == (640, 640)


def test_total_that_the_counter_exceeds_is_dropped(tmp_path: Path, counters: CounterMemory) -> None:
    log = "# counted\n# TYPE ddp_step gauge\nddp_step 5\n# TYPE ddp_steps_total counter\nddp_steps_total 5\n"
    (tmp_path / "metrics" / "0.log").write_text(log + "# TYPE ddp_planned_steps gauge\nddp_planned_steps 6\n")
    values = read_progress(MetricsEndpoint(str(tmp_path), lambda: "", counters=counters).collect()[0])
    assert values["ddp_step"] == 7
    assert not {"ddp_planned_steps", "ddp_progress_ratio"} & set(values)


def test_recorded_steps_have_no_page(tmp_path: Path, counters: CounterMemory) -> None:
    open_slot(str(tmp_path), 1)[slots.PID] = 11.0
    slot = memoryview(vars(counters)["_memory"])
    slot[slots.VISIBILITY] = slots.INVISIBLE
    assert MetricsEndpoint(str(tmp_path), lambda: "", counters=counters).collect() == {}


@pytest.mark.parametrize(
    ("step", "total", "changes", "missing"),
    [
        (100.0, 100.0, {}, 0.0),
        (28.0, 30.0, {}, 0.0),  # the script counts differently
        (983.0, 1000.0, {}, 0.0),  # skipped steps
        (93.0, 94.0, {}, 0.0),  # a last small batch
        (10.0, 30.0, {}, 20.0),
        (15.0, 30.0, {"ddp_world_size": 2.0}, 15.0),
        (469.0, 938.0, {"ddp_world_size": 2.0, "ddp_planned_steps_margin": 10.0}, 0.0),  # samples of all ranks
        (100.0, 120.0, {"ddp_planned_steps_margin": 60.0}, 0.0),  # estimated by two epochs
        (40.0, 120.0, {"ddp_planned_steps_margin": 60.0}, 80.0),
    ],
)
def test_success_completes_the_progress_unless_many_steps_are_missing(
    step: float, total: float, changes: dict[str, float], missing: float
) -> None:
    progress = {"ddp_step": step, "ddp_planned_steps": total, "ddp_progress_ratio": step / total, **changes}
    assert find_missing_steps(progress) == missing
    completed = {**progress, "ddp_planned_steps": step, "ddp_progress_ratio": 1.0}
    assert complete_progress(progress) == (progress if missing else completed)


def test_plan_and_lost_loss_of_a_rank_are_on_its_page() -> None:
    known = dict.fromkeys(RankCounters._fields, None) | {"steps": 10, "step_seconds": 1.0, "last_step_time": 0.0}
    counters = RankCounters(**{**known, "world_size": 2, "epoch": 2, "epochs": 8, "total_steps": 40, "first_step": 0})
    values = merge_counters({"ddp_loss": 1.0}, counters, is_aligned=False)
    names = ("ddp_epoch", "ddp_planned_epochs", "ddp_step", "ddp_planned_steps", "ddp_progress_ratio", "ddp_loss")
    assert [values[name] for name in names] == [2.0, 8.0, 10.0, 40.0, 0.25, 1.0]
    lost = merge_counters({"ddp_loss": 1.0}, counters._replace(lost_loss_step=7), is_aligned=False)
    assert math.isnan(lost["ddp_loss"])
    finite = drop_lost_loss(lost)
    assert (finite.get("ddp_loss"), finite["ddp_loss_not_finite_step"]) == (None, 7.0)


def test_progress_without_a_step_is_not_completed() -> None:
    assert complete_progress({"ddp_loss": 1.0}) == {"ddp_loss": 1.0}


@pytest.mark.parametrize(("last", "shown"), [(9.0, 10.0), (10.0, 10.0), (4.0, 4.0)])
def test_finished_run_shows_all_epochs_if_script_counts_from_0(last: float, shown: float) -> None:
    completed = complete_progress({"ddp_steps_total": 8.0, "ddp_epoch": last, "ddp_planned_epochs": 10.0})
    assert completed["ddp_epoch"] == shown

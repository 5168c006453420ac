"""The pod's one metrics endpoint: what it answers, and how far it says that the run was."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from ddp_operator.launcher.metrics import Metrics


def ask(port: int, *pieces: bytes) -> tuple[bytes, bytes]:
    """Return the head and the body of an endpoint's answer to a request that is sent in pieces."""
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
def test_the_pods_endpoint_answers(tmp_path: Path, request_line: bytes, status: bytes, body: bytes) -> None:
    (tmp_path / "metrics").mkdir()
    (tmp_path / "metrics" / "0.prom").write_text("rank 2\n")
    metrics = Metrics(str(tmp_path), lambda: "own 1\n")
    metrics.last_failure = b"{}"
    port = metrics.serve(0)
    head, found = ask(port, request_line[:5], request_line[5:] + b"\r\nHost: x\r\n", b"\r\n")
    assert head.startswith(b"HTTP/1.1 " + status + b"\r\n")
    assert found == body
    length = len(body) if not request_line.startswith(b"HEAD") else 3
    assert f"Content-Length: {length}\r\n".encode() in head


def test_the_endpoint_goes_on_after_those_who_say_nothing(tmp_path: Path) -> None:
    metrics = Metrics(str(tmp_path), lambda: "own 1\n")
    port = metrics.serve(0)
    for _ in range(20):  # more than it serves at a time
        socket.create_connection(("127.0.0.1", port), timeout=10).close()
    assert ask(port, b"GET /metrics HTTP/1.1\r\n\r\n")[1] == b"own 1\n"


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
def test_how_far_the_run_was_is_what_the_rank_reports_or_else_another(
    tmp_path: Path, pages: dict[int, str], rank: int, step: float | None
) -> None:
    (tmp_path / "metrics").mkdir()
    for number, text in pages.items():
        lines = (f"# TYPE {line.split()[0]} gauge\n{line}\n" for line in text.splitlines())
        (tmp_path / "metrics" / f"{number}.prom").write_text("".join(lines))
    assert Metrics(str(tmp_path), lambda: "").step(rank) == step

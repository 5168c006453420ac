"""`ddp run` fetches inputs before its pods, shows progress and errors, and resumes after Ctrl-C."""

from __future__ import annotations

import hashlib
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.ddp_run import DdpRun, manifest
from tests.support.file_server import FileServer, pattern, serve_file

pytestmark = pytest.mark.process

SIZE = 20_000_000  # more than the sockets' buffers hold
SHOW = "import hashlib, sys; print('sum', hashlib.sha256(open(sys.argv[1], 'rb').read()).hexdigest())"
SHA = hashlib.sha256(pattern(0, SIZE)).hexdigest()


def text(server: FileServer, **changes: Any) -> str:
    first = {"url": f"{server.url}/set/data.bin", "mountPath": "/data", "claimName": "datasets", **changes}
    return manifest([sys.executable, "-c", SHOW, "/data/data.bin"], nodes=1, inputs=[first])


def status(run: DdpRun) -> dict[str, Any]:
    [folder] = (run.folder / "ddp-runs").glob("toy-*")
    result: dict[str, Any] = yaml.safe_load((folder / "status.yaml").read_text())["status"]
    return result


def test_interrupted_download_is_complete_at_script_start_and_in_next_run(tmp_path: Path) -> None:
    with serve_file(FileServer(pattern, SIZE, cuts=[8_000_000])) as server:
        with DdpRun(tmp_path, text(server, checksum=f"sha256:{SHA}")) as run:
            assert run.wait() == 0, run.output
        assert f"sum {SHA}" in run.output
        assert server.starts == [0, 8_000_000]
        assert server.sent == SIZE + 1
        with DdpRun(tmp_path, text(server, checksum=f"sha256:{SHA}"), options=["--name", "again"]) as run:
            assert run.wait() == 0, run.output
        assert server.sent == SIZE + 1
    [item] = status(run)["inputs"]
    assert (item["phase"], item["bytes"]) == ("Fetched", SIZE)


@pytest.mark.parametrize(
    ("answer", "changes", "reason", "words"),
    [
        (404, {}, "NotFound", "HTTP 404"),
        (0, {"checksum": "sha256:" + "0" * 64}, "ChecksumMismatch", f"has sha256:{SHA}"),
    ],
)
def test_invalid_input_ends_run_before_any_pod(
    tmp_path: Path, answer: int, changes: dict[str, Any], reason: str, words: str
) -> None:
    with (
        serve_file(FileServer(pattern, SIZE, statuses=[answer])) as server,
        DdpRun(tmp_path, text(server, **changes)) as run,
    ):
        assert run.wait() == 1, run.output
    result = status(run)
    assert (result["phase"], result["reason"], result.get("attempt", 0)) == ("Failed", reason, 0)
    assert words in run.output
    assert not list((run.folder / "ddp-runs").glob("toy-*/logs/attempt-1*"))


def test_next_run_resumes_after_ctrl_c(tmp_path: Path) -> None:
    half = threading.Event()
    go = threading.Event()

    def wait(start: int, count: int) -> bytes:
        if start >= SIZE // 2 and not go.is_set():
            half.set()
            go.wait(120)
        return pattern(start, count)

    with serve_file(FileServer(wait, SIZE)) as server:
        with DdpRun(tmp_path, text(server)) as run:
            assert half.wait(120), run.output
            run.process.send_signal(signal.SIGINT)
            assert run.wait() == 130, run.output
        go.set()
        with DdpRun(tmp_path, text(server), options=["--name", "again"]) as run:
            assert run.wait() == 0, run.output
        assert f"sum {SHA}" in run.output
        assert 0 < server.starts[1] <= SIZE // 2 + 65536

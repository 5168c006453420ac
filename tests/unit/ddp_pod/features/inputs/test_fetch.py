"""Fetching inputs: interrupted connections, changed files, failing servers, and disks that are full or not writable."""

from __future__ import annotations

import hashlib
import json
import os
import resource
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ddp_operator.api.constants import ENV_INPUTS, ENV_PORT_FILE, ENV_TERMINATION_LOG
from ddp_operator.reading.parts import read_end_part, read_report_part
from ddp_operator.reading.terminations import parse_termination
from ddp_pod.features.inputs import fetch
from ddp_pod.features.inputs.fetch import Fetch, InputState
from ddp_pod.transfer import sources
from ddp_pod.transfer.sources import FetchError
from tests.support.builders import decode
from tests.support.file_server import FileServer, serve_bytes, serve_file
from tests.support.launcher_folder import delivered_launcher

DATA = os.urandom(3_000_000)
SHA = f"sha256:{hashlib.sha256(DATA).hexdigest()}"


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "_LONGEST_PAUSE", 0.0)


@pytest.fixture
def server() -> Iterator[FileServer]:
    with serve_file(serve_bytes(DATA)) as server:
        yield server


def bring(root: Path, url: str, **changes: Any) -> InputState:
    """Fetch one input as a pod does."""
    item = InputState(name="data", url=url, root=str(root), key="data-1", **changes)
    work = Fetch(item)
    work.find()
    work.run()
    return item


def refuse(root: Path, url: str, **changes: Any) -> FetchError:
    """Return why an input cannot be fetched; its folder must not exist then."""
    with pytest.raises(FetchError) as caught:
        bring(root, url, **changes)
    assert not (root / "ddp-inputs" / "data-1").exists()
    return caught.value


def content(root: Path, name: str = "data.bin") -> bytes:
    return (root / "ddp-inputs" / "data-1" / "data" / name).read_bytes()


class TestWebServer:
    def test_file_is_fetched_with_record(self, tmp_path: Path, server: FileServer) -> None:
        item = bring(tmp_path, f"{server.url}/some/data.bin?signature=secret", checksum=SHA)
        assert content(tmp_path) == DATA
        record = json.loads((tmp_path / "ddp-inputs" / "data-1" / "record.json").read_text())
        assert (record["url"], record["etag"]) == (f"{server.url}/some/data.bin", '"v1"')
        assert (record["bytes"], record["checksum"]) == (len(DATA), SHA)
        assert (item.phase, item.bytes, item.total) == ("Fetched", len(DATA), len(DATA))
        before = len(server.requests)
        assert bring(tmp_path, f"{server.url}/data.bin").etag == '"v1"'
        assert len(server.requests) == before, "it is not requested again"

    def test_interrupted_connection_resumes_at_its_offset(self, tmp_path: Path, server: FileServer) -> None:
        server.cuts = [1_000_000, 500_000]
        bring(tmp_path, f"{server.url}/data.bin")
        assert content(tmp_path) == DATA
        assert server.starts == [0, 1_000_000, 1_500_000]
        assert server.sent == len(DATA) + 1

    @pytest.mark.parametrize("is_changed", [False, True])
    def test_next_pod_resumes_interrupted_fetch_of_the_same_version(
        self, tmp_path: Path, server: FileServer, is_changed: bool
    ) -> None:
        server.cuts = [1_000_000]
        server.statuses = [0, 0, *[503] * 7]
        assert refuse(tmp_path, f"{server.url}/data.bin").retryable
        expected = DATA
        if is_changed:
            expected = os.urandom(len(DATA))
            server.content = serve_bytes(expected).content
            server.etag = '"v2"'
        bring(tmp_path, f"{server.url}/data.bin")
        assert content(tmp_path) == expected
        assert server.sent == len(DATA) + 2 + is_changed * 1_000_000

    def test_file_changed_during_fetch_is_never_mixed(self, tmp_path: Path, server: FileServer) -> None:
        newer = os.urandom(len(DATA))
        old = server.content

        def change(start: int, count: int) -> bytes:
            if start >= 65536 and server.etag == '"v1"':
                server.etag = '"v2"'
                server.content = lambda start, count: newer[start : start + count]
            return old(start, count)

        server.content = change
        server.cuts = [1_000_000]
        bring(tmp_path, f"{server.url}/data.bin")
        assert content(tmp_path) == newer

    @pytest.mark.parametrize("changes", [{"ranges": False}, {"etag": ""}])
    def test_fetch_restarts_if_server_cannot_resume(self, tmp_path: Path, changes: dict[str, Any]) -> None:
        with serve_file(serve_bytes(DATA, cuts=[1_000_000], **changes)) as server:
            bring(tmp_path, f"{server.url}/data.bin")
        assert content(tmp_path) == DATA

    def test_busy_server_is_retried_and_empty_file_fetched(self, tmp_path: Path) -> None:
        with serve_file(serve_bytes(b"", statuses=[503, 429, 0, 500])) as server:
            bring(tmp_path, f"{server.url}/data.bin")
        assert content(tmp_path) == b""

    @pytest.mark.parametrize(
        ("status", "reason"), [(404, "NotFound"), (410, "NotFound"), (401, "AccessDenied"), (403, "AccessDenied")]
    )
    def test_final_status_is_not_retried(self, tmp_path: Path, server: FileServer, status: int, reason: str) -> None:
        server.statuses = [status]
        error = refuse(tmp_path, f"{server.url}/data.bin?signature=secret")
        assert (error.reason, error.retryable, len(server.requests)) == (reason, False, 1)
        assert str(status) in str(error)
        assert "secret" not in str(error)

    def test_unresolved_host_is_retryable(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(*_: Any, **__: Any) -> Any:
            raise socket.gaierror(-2, "Name or service not known")

        monkeypatch.setattr(socket, "getaddrinfo", fail)
        error = refuse(tmp_path, "http://nowhere.example/data.bin")
        assert (error.reason, error.retryable) == ("Unreachable", True)
        assert "the host nowhere.example does not resolve" in str(error)

    def test_redirect_does_not_receive_authorization(
        self, tmp_path: Path, server: FileServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("DDP_INPUTS_0_HTTP_AUTHORIZATION", "Bearer me")
        with serve_file(serve_bytes(b"", redirect=f"{server.url}/data.bin")) as first:
            bring(tmp_path, f"{first.url}/data.bin", secret="DDP_INPUTS_0_")
        assert first.headers[0]["Authorization"] == "Bearer me"
        assert all("Authorization" not in headers for headers in server.headers)
        assert "HTTP_AUTHORIZATION" not in os.environ


class TestChecksum:
    def test_mismatch_fails_and_removes_file(self, tmp_path: Path, server: FileServer) -> None:
        error = refuse(tmp_path, f"{server.url}/data.bin", checksum=f"sha256:{'0' * 64}")
        assert (error.reason, error.retryable) == ("ChecksumMismatch", False)
        assert SHA in str(error)
        assert not (tmp_path / "ddp-inputs" / "data-1.part" / "data" / "data.bin").exists()

    def test_checksum_allows_resume_without_etag(self, tmp_path: Path) -> None:
        with serve_file(serve_bytes(DATA, etag="", cuts=[1_000_000])) as server:
            bring(tmp_path, f"{server.url}/data.bin", checksum=SHA)
        assert server.starts == [0, 1_000_000]

    def test_checksum_of_folder_is_unsupported(self, tmp_path: Path) -> None:
        for name in "ab":
            (tmp_path / name).touch()
        assert refuse(tmp_path / "claim", f"file://{tmp_path}", checksum=SHA).reason == "Unsupported"


class TestDisk:
    def test_missing_space_fails_before_download(
        self, tmp_path: Path, server: FileServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        usage = fetch.shutil.disk_usage(tmp_path)._replace(free=20_000_000 - len(DATA))
        monkeypatch.setattr(fetch.shutil, "disk_usage", lambda path: usage)
        error = refuse(tmp_path, f"{server.url}/data.bin")
        assert (error.reason, error.retryable) == ("NoSpace", False)
        assert "3.0 MB to fetch, 17.0 MB free" in str(error)
        assert [value for _, value in server.requests] == ["bytes=0-0"]

    def test_full_disk_during_download_reports_no_space(
        self, tmp_path: Path, server: FileServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(sys, "dont_write_bytecode", True)  # it would be truncated
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, hard))
        try:
            error = refuse(tmp_path, f"{server.url}/data.bin")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert (error.reason, error.retryable) == ("NoSpace", False)

    def test_unwritable_claim_hints_at_fs_group(self, server: FileServer) -> None:
        error = refuse(Path("/proc/sys"), f"{server.url}/data.bin")
        assert (error.reason, error.retryable) == ("NotWritable", False)
        assert "fsGroup" in error.hint
        assert not server.requests


class TestSharing:
    def test_two_pods_fetch_same_input_once(self, tmp_path: Path, server: FileServer) -> None:
        gate = threading.Event()
        inner = server.content

        def wait(start: int, count: int) -> bytes:
            if count > 1:
                gate.wait(60)
            return inner(start, count)

        server.content = wait
        threads = [threading.Thread(target=bring, args=(tmp_path, f"{server.url}/data.bin")) for _ in range(2)]
        for thread in threads:
            thread.start()
        while len(server.requests) < 3:  # both have requested the size, and one the file
            threading.Event().wait(0.01)
        gate.set()
        for thread in threads:
            thread.join()
        assert content(tmp_path) == DATA
        assert server.starts == [0]

    def test_complete_folder_is_kept_if_another_pod_finishes_later_without_locks(
        self, tmp_path: Path, server: FileServer
    ) -> None:
        items = [InputState(name="data", url=f"{server.url}/data.bin", root=str(tmp_path), key="data-1") for _ in "ab"]
        first, second = map(Fetch, items)
        first.find()
        second.find()
        first.run()
        published = (tmp_path / "ddp-inputs" / "data-1").stat().st_ino
        second._fetch()
        assert (tmp_path / "ddp-inputs" / "data-1").stat().st_ino == published
        assert [item.phase for item in items] == ["Fetched"] * 2
        assert content(tmp_path) == DATA


class TestOtherSources:
    def test_folder_is_fetched_with_subfolders(self, tmp_path: Path) -> None:
        source = tmp_path / "source"
        (source / "deep" / "er").mkdir(parents=True)
        (source / "one").write_text("1")
        (source / "deep" / "er" / "two").write_text("22")
        assert bring(tmp_path, f"file://{source}").bytes == 3
        assert (content(tmp_path, "one"), content(tmp_path, "deep/er/two")) == (b"1", b"22")

    def test_storage_prefix_is_fetched_with_subfolders(self, tmp_path: Path) -> None:
        system, _ = sources.open_storage("memory://bucket")
        system.pipe({"/bucket/set/one": b"1", "/bucket/set/deep/two": b"22", "/bucket/other": b"x"})
        bring(tmp_path / "file", "memory://bucket/other", checksum=f"sha256:{hashlib.sha256(b'x').hexdigest()}")
        assert content(tmp_path / "file", "other") == b"x"
        assert bring(tmp_path, "memory://bucket/set").bytes == 3
        assert (content(tmp_path, "one"), content(tmp_path, "deep/two")) == (b"1", b"22")
        with pytest.raises(FileNotFoundError):
            content(tmp_path, "other")

    @pytest.mark.parametrize("url", ["file://" + "/no/such/place", "memory://no/such"])
    def test_missing_source_is_not_found(self, tmp_path: Path, url: str) -> None:
        assert refuse(tmp_path, url).reason == "NotFound"

    def test_missing_plugin_is_named(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "gcsfs", None)
        error = refuse(tmp_path, "gs://bucket/data")
        assert (error.reason, error.retryable) == ("Unsupported", False)
        assert "gcsfs" in str(error)

    def test_path_outside_of_folder_is_unsupported(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sources.InputSource, "list", lambda self: [sources.File("../../x", 1, "t")])
        assert refuse(tmp_path, "file://" + "/tmp").reason == "Unsupported"


class TestFetchingPod:
    def run(self, folder: Path, *urls: str) -> tuple[int, str, str]:
        """Fetch inputs as a pod does. Return the exit code, the termination message and the log."""
        inputs = [
            {"name": f"in{number}", "url": url, "root": str(folder), "key": f"in{number}"}
            for number, url in enumerate(urls)
        ]
        message = folder / "message"
        env = {ENV_INPUTS: json.dumps(inputs), ENV_TERMINATION_LOG: str(message), ENV_PORT_FILE: str(folder / "port")}
        ran = subprocess.run(
            [sys.executable, delivered_launcher(), "fetch"], env=os.environ | env, capture_output=True, text=True
        )
        return ran.returncode, message.read_text(), ran.stderr

    def test_missing_input_fails_before_any_download(self, tmp_path: Path, server: FileServer) -> None:
        server.statuses = [0, 404]
        code, message, _ = self.run(tmp_path, f"{server.url}/a", f"{server.url}/b")
        ended = parse_termination(code, text=message)
        assert (code, ended.category, server.sent) == (81, "UserError", 1)
        assert ended.message.startswith("input in1: http")
        assert [(item.phase, item.reason) for item in read_end_part(ended, "inputs").inputs] == [
            ("Pending", ""),
            ("Failed", "NotFound"),
        ]

    def test_page_shows_progress_and_termination_message_lists_inputs(self, tmp_path: Path, server: FileServer) -> None:
        inner = server.content
        pages: list[str] = []

        def look(start: int, count: int) -> bytes:
            if start >= 1_000_000 and not pages:
                port = json.loads((tmp_path / "port").read_text())
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/report") as response:
                    pages.append(response.read().decode())
            return inner(start, count)

        server.content = look
        code, message, log = self.run(tmp_path, f"{server.url}/a", f"{server.url}/b")
        (item, _) = read_report_part(decode(pages[0]), "inputs").inputs
        assert (item.phase, item.total_bytes) == ("Fetching", len(DATA))
        assert 0 <= item.bytes <= 1_100_000
        ended = parse_termination(code, text=message)
        assert code == 0
        assert [(item.name, item.phase, item.bytes) for item in read_end_part(ended, "inputs").inputs] == [
            ("in0", "Fetched", len(DATA)),
            ("in1", "Fetched", len(DATA)),
        ]
        assert "input in1: fetching 3.0 MB" in log

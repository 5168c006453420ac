"""The border of the server: who may read, and what a browser may name."""

from __future__ import annotations

import asyncio
import json
import os
import re
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from aiohttp.test_utils import TestClient, TestServer
from yarl import URL

from ddp_cli.features.ui.rows import Row
from ddp_cli.features.ui.server import Server
from ddp_cli.features.ui.sources import LocalRuns
from tests.unit.ddp_cli.features.ui.test_run import write_run

Client = TestClient[Any, Any]


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    return tmp_path / "ddp-runs"


@pytest.fixture
def name(runs: Path) -> str:
    return write_run(runs).name


@pytest.fixture
async def server(runs: Path, name: str) -> Server:
    server = Server([LocalRuns(runs)], "here")
    await server.refresh()
    return server


@pytest.fixture
async def stranger(server: Server) -> AsyncIterator[Client]:
    async with TestClient(TestServer(server.build())) as client:
        yield client


@pytest.fixture
async def client(server: Server, stranger: Client) -> Client:
    response = await stranger.get("/", params={"token": server.token})
    assert "http-equiv" in await response.text()
    return stranger


@pytest.mark.parametrize("path", ["/", "/events", "/run/x", "/static/page.js", "/compare", "/nowhere"])
async def test_request_without_the_secret_is_refused(stranger: Client, path: str) -> None:
    response = await stranger.get(path)
    assert response.status == 403
    assert "Open the address" in await response.text()


async def test_wrong_secret_gives_no_cookie(stranger: Client) -> None:
    response = await stranger.get("/", params={"token": "é" * 43})
    assert response.status == 403
    assert not response.cookies


async def test_cookie_is_for_this_site_only(server: Server, stranger: Client) -> None:
    response = await stranger.get("/", params={"token": server.token})
    (cookie,) = response.cookies.values()
    assert (cookie["httponly"], cookie["samesite"], cookie["path"]) == (True, "Strict", "/")
    assert response.headers["Referrer-Policy"] == "no-referrer"


@pytest.mark.parametrize(
    "host",
    [
        *("evil.example", "evil.example:80", "127.0.0.1.evil.example", "10.0.0.1", ""),
        *("127.0.0.1:99999", "127.0.0.1:", "evil.example:127.0.0.1"),
    ],
)
async def test_other_host_is_refused(client: Client, host: str) -> None:
    response = await client.get("/", headers={"Host": host})
    assert response.status == 403


async def test_key_without_a_namespace_is_not_found(client: Client) -> None:
    response = await client.get("/compare?job=job/x&job=record/y")
    assert response.status == 404
    assert "Content-Security-Policy" in response.headers


async def test_host_of_a_tunnel_is_accepted(server: Server, stranger: Client) -> None:
    headers = {"Host": "localhost:9999"}
    response = await stranger.get("/", params={"token": server.token}, headers=headers)
    assert "ddp-ui-9999" in response.cookies
    cookie = {"Cookie": f"ddp-ui-9999={server.token}"}
    assert (await stranger.get("/", headers=headers | cookie)).status == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site", "Sec-Fetch-Mode": "cors"},
        {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "iframe"},
    ],
)
async def test_request_of_another_site_is_refused(client: Client, headers: dict[str, str]) -> None:
    response = await client.get("/", headers=headers)
    assert response.status == 403


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
async def test_nothing_can_be_changed(client: Client, method: str) -> None:
    assert (await client.request(method, "/")).status == 403


@pytest.mark.parametrize(
    "path",
    [
        "/run/..%2f..%2fetc",
        "/run/%2e%2e",
        "/run/.",
        "/run/%00",
        "/job/team/mine",
        "/static/..%2fserver.py",
        "/static/../server.py",
        "/run/nowhere/log",
    ],
)
async def test_path_outside_of_the_runs_does_not_exist(client: Client, path: str) -> None:
    response = await client.get(URL(path, encoded=True))
    assert response.status in (403, 404)
    assert "root:" not in await response.text()


async def test_link_to_another_folder_is_no_run(client: Client, runs: Path, tmp_path: Path) -> None:
    target = write_run(tmp_path / "elsewhere")
    (runs / "linked").symlink_to(target)
    assert (await client.get("/run/linked")).status == 404


async def test_pages_have_no_inline_code_and_a_strict_policy(client: Client, name: str) -> None:
    for path in ("/", f"/run/{name}", f"/compare?job=run/{name}&job=run/{name}"):
        response = await client.get(path)
        text = await response.text()
        assert response.status == 200
        policy = response.headers["Content-Security-Policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'")
        assert "unsafe" not in policy
        assert "<style" not in text
        assert ' style="' not in text
        assert "<script>" not in text


async def test_list_sends_rows_and_then_only_what_has_changed(client: Client, runs: Path, name: str) -> None:
    async with client.get("/events") as response:
        first = await read_event(response.content)
        assert list(first["rows"]) == [f"run/{name}"]
        other = write_run(runs, phase="Succeeded").name
        second = await read_event(response.content)
        assert list(second["rows"]) == [f"run/{other}"]
        assert second["order"] == [f"run/{name}", f"run/{other}"]


async def test_list_has_its_first_rows_and_the_stream_all_of_them(
    client: Client, runs: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ddp_cli.features.ui.server._FIRST_ROWS", 2)
    for _ in range(3):
        write_run(runs)
    await server.refresh()
    text = await (await client.get("/")).text()
    assert text.count("<tr role=") == 1 + 2
    async with client.get("/events") as response:
        assert len((await read_event(response.content))["rows"]) == 4


async def test_job_sends_the_parts_that_have_changed(client: Client, runs: Path, name: str) -> None:
    async with client.get(f"/run/{name}/events") as response:
        first = await read_event(response.content)
        assert set(first) == {"head", "now", "timeline", "ranks", "events", "settings"}
        curves = await read_event(response.content)
        assert curves["charts"]
        with (runs / name / "events.log").open("a") as stream:
            stream.write("2026-11-29T10:00:00+0000 Normal Scheduled: 2/2 pods scheduled\n")
        changed = await read_event(response.content)
        assert "events" in changed
        assert "settings" not in changed


async def test_sources_are_read_by_one_thread_at_a_time(runs: Path) -> None:
    class Counting(LocalRuns):
        readers = 0
        most = 0

        def refresh(self) -> Mapping[str, Row]:
            type(self).readers += 1
            type(self).most = max(self.most, self.readers)
            time.sleep(0.05)
            type(self).readers -= 1
            return {}

    server = Server([Counting(runs)], "here")
    await asyncio.gather(*(server.refresh() for _ in range(4)))
    assert Counting.most == 1


async def test_deleted_run_is_a_problem_and_no_fault(client: Client) -> None:
    async with client.get("/run/gone/events") as response:
        assert "does not exist" in await read_event(response.content)


async def test_number_of_streams_is_bounded(client: Client) -> None:
    responses = [await client.get("/events") for _ in range(33)]
    assert [response.status for response in responses] == [200] * 32 + [502]
    for response in responses:
        response.close()
    while True:  # until the server has noticed that they are closed
        async with client.get("/events") as response:
            if response.status == 200:
                break


async def test_log_is_sent_escaped(client: Client, runs: Path, name: str) -> None:
    (runs / name / "logs" / "attempt-1-pod-0.log").write_text("<img src=x onerror=alert(1)>\n\x1b[2J\n")
    piece = await (await client.get(f"/run/{name}/log")).json()
    assert "&lt;img" in piece["lines"]
    assert "<img" not in piece["lines"]
    assert "\x1b" not in piece["lines"]


async def test_comparison_needs_two_jobs(client: Client, name: str) -> None:
    assert (await client.get(f"/compare?job=run/{name}")).status == 502


async def read_event(stream: asyncio.StreamReader | Any) -> Any:
    """Return the data of the next event."""
    while True:
        line = (await stream.readline()).decode()
        if line.startswith("data: "):
            return json.loads(line[6:])


@pytest.mark.parametrize("odd", [b"q?a=1#f%2e", b"raw\xff", "\u202e".encode()])
async def test_job_of_any_name_is_found_by_the_address_in_its_row(
    client: Client, server: Server, runs: Path, name: str, odd: bytes
) -> None:
    (runs / name).rename(runs / os.fsdecode(odd))
    await server.refresh()
    page = await (await client.get("/")).text()
    (key,) = re.findall(r'href="/(run/[^"]+)"', page)
    for path in (f"/{key}", f"/{key}/log", f"/compare?job={quote(key)}&job={quote(key)}"):
        assert (await client.get(URL(path, encoded=True))).status == 200


async def test_list_that_is_opened_before_the_first_reading_has_its_jobs(runs: Path, name: str) -> None:
    server = Server([LocalRuns(runs)], "here")
    async with TestClient(TestServer(server.build())) as client:
        await client.get("/", params={"token": server.token})
        assert f'id="run/{name}"' in await (await client.get("/")).text()

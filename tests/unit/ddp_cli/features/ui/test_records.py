"""A job that was deleted is listed, opened and compared from its record."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp.test_utils import TestClient, TestServer

from ddp_cli.client.api import Api
from ddp_cli.client.errors import NotFound
from ddp_cli.features.ui import records
from ddp_cli.features.ui.logs import LogQuery
from ddp_cli.features.ui.records import RecordedJobs
from ddp_cli.features.ui.rows import Attention
from ddp_cli.features.ui.server import Server
from tests.unit.ddp_cli.client.test_records import build_record, store

KEY = "record/team/20261120T120004Z-train-1a2b3c4d"


def no_cluster() -> Api:
    raise AssertionError("needs no cluster")


@pytest.fixture
def place(tmp_path: Path) -> Path:
    store(tmp_path, "20261120T120004Z", build_record())
    store(tmp_path, "20261119T120004Z", build_record("other", logs=()), name="other")
    store(tmp_path, "20261118T120004Z", b"damaged", name="bad")
    return tmp_path


@pytest.fixture
def jobs(place: Path) -> RecordedJobs:
    jobs = RecordedJobs(str(place), "", no_cluster, "image", lambda: None)
    jobs.read()
    return jobs


def test_deleted_jobs_are_listed_and_damaged_record_states_reason(jobs: RecordedJobs) -> None:
    rows = jobs.refresh()
    assert [row.name for row in rows.values()] == ["train", "other", "20261118T120004Z-bad-1a2b3c4d.json.gz"]
    assert {row.attention for row in rows.values()} == {Attention.DELETED}
    assert (rows[KEY].place, rows[KEY].phase) == ("team, record", "Failed")
    assert "cannot be read" in list(rows.values())[2].reason


def test_page_of_deleted_job_has_cause_commands_and_log(jobs: RecordedJobs, place: Path) -> None:
    page = jobs.read_page(KEY)
    assert page.state.word == "Failed, deleted"
    assert "KeyError" in page.findings[0].what
    assert [event.message for event in page.run.events] == ["the job failed"]
    commands = [command.text for command in page.commands]
    assert commands == [f"ddp {name} train -n team --history {place}" for name in ("logs", "why", "report")]
    lines = jobs.read_log(KEY, LogQuery(), "").lines
    assert [line.text for line in lines] == ["step 1", "KeyError: 'x'", "bye"]
    with pytest.raises(NotFound, match="no record"):
        jobs.read_page("record/team/../../etc/passwd")


def test_newer_records_are_added_and_the_sum_is_bounded(
    jobs: RecordedJobs, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store(place, "20261121T120004Z", build_record("newer"), name="newer")
    monkeypatch.setattr(records, "_MOST_BYTES", 2 * len(build_record()) + 50)
    jobs.read()
    assert [row.name for row in jobs.refresh().values()] == ["newer", "train"]


def test_place_that_cannot_be_read_is_a_problem() -> None:
    jobs = RecordedJobs("nowhere://place", "", no_cluster, "image", lambda: None)
    jobs.read()
    assert "Records of deleted jobs" in jobs.problem
    assert jobs.refresh() == {}


class Present:
    """A cluster that still has the job of a record."""

    kind = "job"
    problem = ""

    def __init__(self, rows: dict[str, Any]) -> None:
        self._rows = rows

    def refresh(self) -> dict[str, Any]:
        return self._rows


@pytest.fixture
async def client(jobs: RecordedJobs) -> AsyncIterator[TestClient[Any, Any]]:
    server = Server([jobs], "here")
    await server.refresh()
    async with TestClient(TestServer(server.build())) as client:
        await client.get("/", params={"token": server.token})
        yield client


async def test_list_page_and_comparison_show_records(client: TestClient[Any, Any]) -> None:
    text = await (await client.get("/")).text()
    assert f'id="{KEY}" data-attention="5"' in text
    page = await (await client.get(f"/{KEY}")).text()
    assert "Failed, deleted" in page
    compared = await client.get(f"/compare?job={KEY}&job=record/team/20261119T120004Z-other-1a2b3c4d")
    assert compared.status == 200
    piece = await (await client.get(f"/{KEY}/log")).json()
    assert "KeyError" in piece["lines"]


async def test_record_of_a_job_that_exists_is_left_out(jobs: RecordedJobs) -> None:
    row = jobs.refresh()[KEY]
    present = {"job/team/train": row.__class__("job/team/train", "train", "team", uid=row.uid)}
    server = Server([Present(present), jobs], "here")  # type: ignore[list-item]
    await server.refresh()
    async with TestClient(TestServer(server.build())) as client:
        await client.get("/", params={"token": server.token})
        text = await (await client.get("/")).text()
    assert "job/team/train" in text
    assert KEY not in text

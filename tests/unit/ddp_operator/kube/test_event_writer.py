"""The writer of Kubernetes Events: Events wait briefly for more urgent calls."""

import asyncio
from typing import Any

import pytest

from ddp_operator.api.cluster import Event
from ddp_operator.kube import events
from ddp_operator.kube.events import EventWriter
from tests.support.builders import child_job


class SlowPostClient:
    """Records posted Events."""

    def __init__(self, under_way: int) -> None:
        self.under_way = under_way
        self.posted: list[str] = []

    async def request(self, method: str, path: str, **options: Any) -> None:
        self.posted.append(options["body"]["reason"])


def put(client: SlowPostClient) -> EventWriter:
    poster = EventWriter(client)  # type: ignore[arg-type]
    poster.put({"apiVersion": "v1", "kind": "Test"} | child_job(), Event("Normal", "Started", "words"))
    return poster


async def several_pauses() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("under_way", "patience"),
    [(events.BUSY - 1, events.PATIENCE), (1000, 0.0)],
    ids=["little is done", "long enough"],
)
async def test_event_is_posted_at_once(under_way: int, patience: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "PATIENCE", patience)
    client = SlowPostClient(under_way)
    poster = put(client)
    await several_pauses()
    assert client.posted == ["Started"]
    await poster.close()


async def test_event_waits_while_many_calls_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "PAUSE", 0.0)
    client = SlowPostClient(events.BUSY)
    poster = put(client)
    await several_pauses()
    assert client.posted == []
    client.under_way = 0
    await several_pauses()
    assert client.posted == ["Started"]
    await poster.close()


async def test_ending_operator_posts_events_that_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "PAUSE", 0.0)
    client = SlowPostClient(events.BUSY)
    poster = put(client)
    await several_pauses()
    await poster.close()
    assert client.posted == ["Started"]

"""The writer of Kubernetes Events."""

import asyncio
from datetime import UTC, datetime
from typing import Any

import kubernetes_validate
import pytest

from ddp_operator.api.cluster import Event
from ddp_operator.kube.events import NOTE_LIMIT, EventWriter, build_event
from ddp_operator.kube.resources import kind_of, path
from tests.support.builders import child_job

ABOUT = {"apiVersion": "v1", "kind": "Test"} | child_job()


async def test_events_are_posted_in_order_and_before_the_end() -> None:
    posted: list[str] = []

    class SlowClient:
        async def request(self, method: str, path: str, **options: Any) -> None:
            await asyncio.sleep(0)
            posted.append(options["body"]["reason"])

    writer = EventWriter(SlowClient())  # type: ignore[arg-type]
    for reason in ("Scheduled", "Failed"):
        writer.put(ABOUT, Event("Normal", reason, "words"))
    assert posted == []
    await writer.close()
    assert posted == ["Scheduled", "Failed"]


@pytest.mark.parametrize("message", ["words", "…" * NOTE_LIMIT], ids=["short", "long"])
@pytest.mark.parametrize("version", ["1.31", "1.37"])
def test_event_is_valid_in_kubernetes(version: str, message: str) -> None:
    event = build_event(ABOUT, Event("Warning", "Failed", message), datetime(2026, 1, 2, 3, tzinfo=UTC), 7)
    kubernetes_validate.validate(event, version, strict=True)
    assert path(kind_of(event), "ns") == "/apis/events.k8s.io/v1/namespaces/ns/events"
    assert event["eventTime"] == "2026-01-02T03:00:00.000000Z"
    # The API server counts bytes, and requires the fields that the schema leaves optional.
    assert len(event["note"].encode()) <= NOTE_LIMIT
    assert event["note"].startswith(message[:300])
    assert all(event[name] for name in ("action", "reportingController", "reportingInstance"))

"""The writer of Kubernetes Events."""

import asyncio
from typing import Any

from ddp_operator.api.cluster import Event
from ddp_operator.kube.events import EventWriter
from tests.support.builders import child_job


async def test_events_are_posted_in_order_and_before_the_end() -> None:
    posted: list[str] = []

    class SlowClient:
        async def request(self, method: str, path: str, **options: Any) -> None:
            await asyncio.sleep(0)
            posted.append(options["body"]["reason"])

    writer = EventWriter(SlowClient())  # type: ignore[arg-type]
    for reason in ("Scheduled", "Failed"):
        writer.put({"apiVersion": "v1", "kind": "Test"} | child_job(), Event("Normal", reason, "words"))
    assert posted == []
    await writer.close()
    assert posted == ["Scheduled", "Failed"]

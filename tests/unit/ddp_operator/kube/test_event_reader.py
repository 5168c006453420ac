"""Events of other components: a list for all Jobs of a namespace, one for each pod."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest

from ddp_operator.api.cluster_errors import ClusterError, Refused
from ddp_operator.kube import events
from ddp_operator.kube.client import ResponseError
from ddp_operator.kube.events import AGE, EventReader


def event(number: int, kind: str, name: str, reason: str) -> dict[str, Any]:
    about = {"kind": kind, "name": name, "uid": f"uid-{name}"}
    return {
        "metadata": {"name": f"event-{number}", "creationTimestamp": "2026-01-01T00:00:00Z", "managedFields": ["much"]},
        "involvedObject": about, "type": "Warning", "reason": reason, "message": f"{reason} of {name}",
    }  # fmt: skip


class EventServer:
    """Responds with lists of Events, two per page."""

    def __init__(self, *events: dict[str, Any]) -> None:
        self.events = list(events)
        self.asked: list[str] = []
        self.error: ResponseError | None = None
        self.any_namespace = False
        self.slow = ""
        """A namespace whose lists end when ``resume`` is set."""
        self.resume = asyncio.Event()

    async def request(
        self, verb: str, path: str, *, params: dict[str, str], kind: str, max_bytes: int
    ) -> dict[str, Any]:
        assert (verb, kind) == ("GET", "events")
        assert self.any_namespace or path == "/api/v1/namespaces/team/events"
        self.asked.append(params["fieldSelector"])
        if self.slow and self.slow in path:
            await self.resume.wait()
        if self.error is not None:
            raise self.error
        expected = dict(part.split("=") for part in params["fieldSelector"].split(","))
        results = [
            item
            for item in self.events
            if all(
                (item["involvedObject"] if name.startswith("involvedObject.") else item)[name.rpartition(".")[2]]
                == value
                for name, value in expected.items()
            )
        ]
        first = int(params.get("continue", "0"))
        more = {"continue": str(first + 2)} if first + 2 < len(results) else {}
        return {"items": results[first : first + 2], "metadata": more}


def job(name: str, **changes: Any) -> dict[str, Any]:
    meta = {"namespace": "team", "name": name, "uid": f"uid-{name}", "labels": changes.pop("labels", {})}
    return {"kind": "Job", "metadata": meta, "spec": changes}


def pod(name: str) -> dict[str, Any]:
    return {"kind": "Pod", "metadata": {"namespace": "team", "name": name, "uid": f"uid-{name}"}}


class ReaderClock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def messages(problems: Any) -> list[str]:
    return [item["message"] for item in problems]


async def test_events_of_thousand_jobs_need_one_list_call() -> None:
    server = EventServer(*(event(n, "Job", f"job-{n}", "FailedCreate") for n in range(5)))
    clock = ReaderClock()
    reader = EventReader(server, clock=clock)  # type: ignore[arg-type]
    for number in range(5):
        assert messages(await reader.about(job(f"job-{number}"))) == [f"FailedCreate of job-{number}"]
    assert len(server.asked) == 3  # pages of one list
    clock.now += AGE
    server.events.clear()
    assert await reader.about(job("job-0")) == ()
    assert len(server.asked) == 4


async def test_events_of_pod_are_call_of_their_own() -> None:
    server = EventServer(event(1, "Pod", "a", "FailedMount"), event(2, "Pod", "b", "FailedMount"))
    reader = EventReader(server)  # type: ignore[arg-type]
    assert messages(await reader.about(pod("b"))) == ["FailedMount of b"]
    assert server.asked == ["involvedObject.uid=uid-b"]


@pytest.mark.parametrize(("status", "raised"), [(403, Refused), (500, ClusterError)])
async def test_refusal_differs_from_error_and_neither_is_cached(status: int, raised: type[Exception]) -> None:
    server = EventServer(event(1, "Job", "x", "FailedCreate"))
    server.error = ResponseError(status, {"message": "no"})
    reader = EventReader(server)  # type: ignore[arg-type]
    with pytest.raises(raised, match=re.escape("no")):
        await reader.about(job("x"))
    server.error = None
    assert len(await reader.about(job("x"))) == 1


def job_in(namespace: str) -> dict[str, Any]:
    item = job("x")
    item["metadata"]["namespace"] = namespace
    return item


async def test_events_kept_of_many_namespaces_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "MOST", 4)
    monkeypatch.setattr(events, "MOST_KEPT", 8)
    server = EventServer(*(event(number, "Job", "x", "FailedCreate") for number in range(4)))
    server.any_namespace = True
    reader = EventReader(server)  # type: ignore[arg-type]
    for number in range(9):
        assert len(await reader.about(job_in(f"team-{number}"))) == 4
    assert len(reader._cached) == 2


async def test_slow_list_of_a_namespace_delays_its_own_jobs_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "MOST", 4)
    monkeypatch.setattr(events, "MOST_KEPT", 12)
    server = EventServer(*(event(number, "Job", "x", "FailedCreate") for number in range(4)))
    server.any_namespace = True
    server.slow = "team-slow"
    reader = EventReader(server)  # type: ignore[arg-type]
    slow = [asyncio.create_task(reader.about(job_in("team-slow"))) for _ in range(5)]
    for number in range(5):
        assert len(await asyncio.wait_for(reader.about(job_in(f"team-{number}")), 60)) == 4
    assert reader._count_cached() + 4 <= 12, "with room for the list that is being read"
    assert not any(task.done() for task in slow)
    asked = len(server.asked)
    server.resume.set()
    assert [len(found) for found in await asyncio.gather(*slow)] == [4] * 5
    assert len(server.asked) == asked + 1, "the second page; the others share the list"
    assert not reader._locks

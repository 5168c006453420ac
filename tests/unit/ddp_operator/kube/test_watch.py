"""The watch of children: its next request after each kind of end."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping
from typing import Any

import pytest

from ddp_operator.api.cluster_errors import ClusterError
from ddp_operator.kube import watch as watch_module
from ddp_operator.kube.client import ResponseError
from ddp_operator.kube.watch import watch


def pod(name: str, version: int) -> dict[str, Any]:
    return {"metadata": {"name": name, "resourceVersion": str(version)}}


def event(kind: str, obj: Mapping[str, Any]) -> bytes:
    return json.dumps({"type": kind, "object": obj}).encode()


GONE = event("ERROR", {"code": 410, "message": "too old resource version"})


class WatchServer:
    """Responds to lists with one page of one pod, and to watches as configured; the last watch ends the test."""

    def __init__(self, *watches: list[bytes | Exception]) -> None:
        self.watches = list(watches)
        self.asked: list[str] = []
        self.fields = ""
        self.version = 10

    async def request(self, method: str, path: str, *, params: Mapping[str, str], **_: Any) -> Any:
        self.asked.append("list")
        self.version += 10
        return {"metadata": {"resourceVersion": str(self.version)}, "items": [pod("a", self.version)]}

    async def watch(self, path: str, params: Mapping[str, str], *, accept: str, **_: Any) -> AsyncGenerator[bytes]:
        assert (path.rpartition("/")[0], params["labelSelector"]) == ("/api/v1/namespaces/team", "ours")
        self.fields = params.get("fieldSelector", "")
        assert ("as=PartialObjectMetadata;" in accept) == path.endswith("configmaps")
        self.asked.append(f"from {params['resourceVersion']}")
        if not self.watches:
            raise asyncio.CancelledError
        for line in self.watches.pop(0):
            if isinstance(line, Exception):
                raise line
            yield line


async def follow(
    server: WatchServer, monkeypatch: pytest.MonkeyPatch, kind: str = "Pod"
) -> tuple[list[tuple[str | None, str]], list[float]]:
    """Return the delivered events, and the waits between watches."""
    reports: list[tuple[str | None, str]] = []
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(round(seconds, 1))

    monkeypatch.setattr(watch_module.asyncio, "sleep", sleep)
    with pytest.raises(asyncio.CancelledError):
        await watch(
            server,  # type: ignore[arg-type]
            kind,
            "team",
            "ours",
            lambda kind, event, obj: reports.append(
                (event, f"{obj['metadata']['name']} {obj.get('kind', '')}".strip())
            ),
        )
    return reports, waits


async def test_watch_starts_with_list_and_resumes_at_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    first = [event("MODIFIED", pod("a", 21)), event("BOOKMARK", pod("", 30))]
    server = WatchServer(first, [event("DELETED", pod("a", 31))])
    report, waits = await follow(server, monkeypatch)
    assert report == [(None, "a Pod"), ("MODIFIED", "a"), ("DELETED", "a")]
    assert server.asked == ["list", "from 20", "from 30", "from 31"]
    assert waits == [0.1, 0.1]


@pytest.mark.parametrize("gone", [GONE, ResponseError(410)])
async def test_version_that_is_too_old_is_new_list(monkeypatch: pytest.MonkeyPatch, gone: bytes | Exception) -> None:
    server = WatchServer([gone])
    report, _ = await follow(server, monkeypatch)
    assert server.asked == ["list", "from 20", "list", "from 30"]
    assert report == [(None, "a Pod"), (None, "a Pod")]


@pytest.mark.parametrize("error", [ClusterError("away"), ResponseError(403), event("ERROR", {"code": 500}), b"{"])
async def test_failing_watch_resumes_with_growing_delay(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: bytes | Exception
) -> None:
    caplog.set_level("WARNING")
    server = WatchServer(*([error] for _ in range(9)), [event("ADDED", pod("b", 40))], [error])
    report, waits = await follow(server, monkeypatch)
    assert server.asked == ["list", *["from 20"] * 10, "from 40", "from 40"]
    assert report == [(None, "a Pod"), ("ADDED", "b")]
    assert waits == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 8.0, 8.0, 0.1, 0.1]
    assert len(caplog.records) == 6  # three failures take only a moment

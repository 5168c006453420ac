"""Jobs as a watch shows them."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any

import pytest

from ddp_cli.client.errors import ClientError
from ddp_cli.client.follow import follow_jobs


def job(name: str = "x", **status: Any) -> dict[str, Any]:
    return {"metadata": {"name": name, "namespace": "ml"}, "spec": {"nodes": 2}, "status": status}


class FakeApi:
    """Answers listings and watches from a script; an error in it is raised."""

    def __init__(self, *script: Any) -> None:
        self.namespace = "ml"
        self._script = list(script)

    def request(self, *_: Any, **__: Any) -> Any:
        return self._next()

    def lines(self, *_: Any, **__: Any) -> Iterator[str]:
        for item in self._next():
            if isinstance(item, Exception):
                raise item
            yield json.dumps(item)

    def _next(self) -> Any:
        item = self._script.pop(0)
        if isinstance(item, Exception):
            raise item
        return item


def listing(*items: Any) -> dict[str, Any]:
    return {"metadata": {"resourceVersion": "7"}, "items": list(items)}


class TestFollowing:
    def phases(self, api: FakeApi, count: int) -> list[list[str]]:
        states = follow_jobs(api, "ml", sleep=lambda _: None)  # type: ignore[arg-type]
        taken = itertools.islice(states, count)
        return [[entry["status"]["phase"] for _, entry in sorted(jobs.items())] for jobs in taken]

    def test_changes_and_deletions_are_reported(self) -> None:
        events = [
            {"type": "ADDED", "object": job("y", phase="Pending")},
            {"type": "MODIFIED", "object": job(phase="Failed")},
            {"type": "DELETED", "object": job("y", phase="Pending")},
        ]
        api = FakeApi(listing(job(phase="Running")), events)
        assert self.phases(api, 4) == [["Running"], ["Running", "Pending"], ["Failed", "Pending"], ["Failed"]]

    def test_expired_version_and_lost_connection_lead_to_new_list(self) -> None:
        gone = [{"type": "ERROR", "object": {"code": 410}}]
        lost = ClientError("the server does not answer")
        api = FakeApi(listing(), gone, listing(job(phase="Pending")), [lost], lost, listing(job(phase="Running")))
        assert self.phases(api, 3) == [[], ["Pending"], ["Running"]]

    def test_unreachable_server_at_start_is_error(self) -> None:
        with pytest.raises(ClientError, match="does not answer"):
            self.phases(FakeApi(ClientError("the server does not answer")), 1)

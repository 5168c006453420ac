"""One job of a `Client`, kept in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import yaml

from ddp_cli.client.errors import NotFound
from ddp_cli.client.logs import Line, LogPod
from ddp_cli.client.workdir import Workdir
from ddp_cli.view.why import Why, explain_why
from ddp_operator.api.kubeobjects import utc_now


class FakeBackend:
    """A backend with one job, which has ``statuses`` one after the other, and these lines of log."""

    def __init__(self, resource: dict[str, Any], *statuses: Mapping[str, Any], lines: tuple[Line, ...] = ()) -> None:
        self.resource: dict[str, Any] | None = resource
        self.statuses = statuses
        self.log = lines
        self.workdir: Workdir | None = None
        self.gpus: int | None = 0
        self.rows: list[dict[str, float]] = []

    def find(self, name: str | None) -> tuple[str, dict[str, Any]]:
        if self.resource is None:
            raise NotFound(f"job {name} does not exist")
        return self.resource["metadata"]["name"], self.resource

    def list(self, *, everywhere: bool = False) -> dict[str, Any]:
        return {"items": [] if self.resource is None else [self.resource]}

    def create(
        self,
        text: str,
        workdir: Workdir | None,
        *,
        dry_run: bool = False,
        note: Callable[[str], None] = lambda words: None,
    ) -> tuple[FakeBackend, str, dict[str, Any]]:
        self.workdir = workdir
        self.resource = yaml.safe_load(text)
        return self, *self.find(None)

    def count_gpus(self) -> int | None:
        return self.gpus

    def change(self, name: str, spec: Mapping[str, Any]) -> dict[str, Any]:
        _, result = self.find(name)
        self.resource = result | {"spec": {**result["spec"], **spec}}
        return self.resource

    def delete(self, name: str) -> None:
        self.find(name)
        self.resource = None

    def is_gone(self, name: str) -> bool:
        return self.resource is None

    def follow(self, name: str, until: float) -> Iterator[dict[str, Any]]:
        for status in self.statuses:
            self.resource = self.find(name)[1] | {"status": dict(status)}
            yield self.resource

    def logs(self, name: str, *, node: int | None, attempt: int | None, tail: int | None) -> FakeBackend:
        return self

    def pods(self) -> list[LogPod]:
        return [LogPod("x-1-0-abcde", "trainer", 1, 0, 2)] if self.log else []

    def is_over(self) -> bool:
        return True

    def lines(self, pod: LogPod, *, follow: bool) -> Iterator[Line]:
        yield from self.log

    def metrics(self, name: str) -> Sequence[Mapping[str, float]]:
        return self.rows

    def why(self, name: str) -> Why:
        return explain_why(self.find(name)[1], (), utc_now())

    def argument(self, name: str) -> str:
        return name

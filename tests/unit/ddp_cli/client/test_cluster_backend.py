"""`ddp why` on a cluster: what it reads in addition to the status and the Events."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ddp_cli.client.api import Api
from ddp_cli.client.cluster_backend import ClusterBackend
from ddp_cli.client.errors import ApiError
from ddp_operator.api.kubeobjects import format_time
from tests.support.builders import NOW, child_pod

CONDITION = {
    "type": "Rendezvoused",
    "status": "False",
    "reason": "InitContainerRunning",
    "message": "pod train-1-0-abcde runs init container wait-db since T",
    "lastTransitionTime": format_time(NOW),
}
STATUS = {"initContainerStatuses": [{"name": "wait-db", "state": {"running": {}}}]}


class Server(SimpleNamespace):
    """An API server with one job, the first pod of which runs an init container."""

    namespace = "default"
    option = ""

    def request(self, method: str, path: str, *_: Any) -> Any:
        if path.endswith("/pods"):
            return {"items": [child_pod(0, "Pending", status=STATUS), child_pod(1)]}
        if path.endswith("/train"):
            return {"metadata": {"name": "train", "uid": "u"}, "status": {"conditions": [CONDITION]}}
        return {"items": []}

    def lines(self, path: str, query: Any) -> Iterator[str]:
        assert (path.rpartition("/pods/")[2], query["container"]) == ("train-1-0-abcde/log", "wait-db")
        if self.error:
            raise self.error
        yield "waiting for db.prod:5432"


@pytest.mark.parametrize(
    ("error", "told"), [(None, " The last line of wait-db is: waiting for db.prod:5432."), (ApiError("forbidden"), "")]
)
def test_last_line_of_running_init_container_is_told(error: Exception | None, told: str) -> None:
    why = ClusterBackend(cast(Api, Server(error=error))).why("train")
    assert why.what.endswith(f"since T.{told}")
    assert "kubectl logs train-1-0-abcde -c wait-db" in why.todo

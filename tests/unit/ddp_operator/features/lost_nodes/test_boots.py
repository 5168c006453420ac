"""The boot of a node, as its kubelet has reported it: known, or unknown."""

from __future__ import annotations

from typing import Any

import pytest

from ddp_operator.api.cluster_errors import ClusterError, Refused
from ddp_operator.features.lost_nodes import boots
from ddp_operator.features.lost_nodes.boots import BootReader
from ddp_operator.features.lost_nodes.returns import DELETED
from ddp_operator.kube.client import ObjectNotFound


async def read(answer: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    async def call(*args: object, **options: object) -> Any:
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(boots, "call", call)
    client: Any = None
    return await BootReader(client).read("a")


async def test_boot_is_the_one_that_the_node_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    assert await read({"status": {"nodeInfo": {"bootID": "7c1f"}}}, monkeypatch) == "7c1f"


async def test_node_that_does_not_exist_is_deleted(monkeypatch: pytest.MonkeyPatch) -> None:
    assert await read(ObjectNotFound("no"), monkeypatch) == DELETED


@pytest.mark.parametrize(
    "answer",
    [
        {"status": {"nodeInfo": {}}},
        {"status": {"nodeInfo": {"bootID": 7}}},
        {"status": {"nodeInfo": {"bootID": "x" * 129}}},
        Refused("no", reason="Forbidden"),
        ClusterError("no response"),
    ],
)
async def test_boot_that_is_not_reported_is_unknown(answer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert await read(answer, monkeypatch) == ""

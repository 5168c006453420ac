"""torch's stores on a loopback address: where they listen, and how a port that is taken is reported."""

from __future__ import annotations

import importlib
import os
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from ddp_operator.launcher.rank import loopback
from ddp_operator.launcher.rank.loopback import bind_stores
from tests.support.listeners import is_loopback, list_listeners


@pytest.fixture
def store_type(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    kind: Any = importlib.import_module("torch.distributed").TCPStore
    monkeypatch.setattr(kind, "__init__", kind.__init__)  # bound again at the end
    bind_stores()
    return kind


def list_addresses(port: int) -> list[str]:
    return [address for address, number in list_listeners([os.getpid()]) if number == port]


def test_store_of_loopback_host_listens_there_only(store_type: Any) -> None:
    store = store_type("127.0.0.1", 0, None, True, wait_for_workers=False)
    assert list_addresses(store.port) == ["127.0.0.1"]
    client = store_type(host_name="127.0.0.1", port=store.port)
    client.set("key", "value")
    assert store.get("key") == b"value"


def test_store_of_other_host_listens_everywhere(store_type: Any) -> None:
    store = store_type("localhost", 0, None, True, wait_for_workers=False)
    (address,) = list_addresses(store.port)
    assert not is_loopback(address)


def test_stores_of_one_process_share_a_server_without_another_socket(store_type: Any) -> None:
    first = store_type("127.0.0.1", 0, None, True, wait_for_workers=False, multi_tenant=True)
    before = list_listeners([os.getpid()])
    second = store_type("127.0.0.1", first.port, None, True, wait_for_workers=False, multi_tenant=True)
    second.set("key", "value")
    assert first.get("key") == b"value"
    assert list_listeners([os.getpid()]) == before


@pytest.mark.parametrize("multi_tenant", [False, True])
def test_taken_port_is_reported_as_torch_does(store_type: Any, multi_tenant: bool) -> None:
    error: Any = importlib.import_module("torch.distributed").DistNetworkError
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(error, match=f"127.0.0.1. port: {port}, name: EADDRINUSE, message: Address already in use"):
            store_type("127.0.0.1", port, None, True, wait_for_workers=False, multi_tenant=multi_tenant)


def test_torch_without_a_changeable_store_is_logged(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(loopback.importlib, "import_module", lambda name: object())
    bind_stores()
    assert "[launcher] torch's stores of this process listen on all addresses: " in capsys.readouterr().err

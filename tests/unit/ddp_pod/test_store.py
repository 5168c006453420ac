"""Signed values in the rendezvous store, and where the store listens."""

from __future__ import annotations

import ctypes
import os
import pickle
import signal
import socket
import threading
from typing import Any

import pytest
import torch
from torch.distributed import HashStore, TCPStore  # type: ignore[attr-defined]
from torch.torch_version import TorchVersion

from ddp_pod.torchrun import store as stores
from ddp_pod.torchrun.store import PortTakenError, SignedStore, fork_store, host_store, query_store
from tests.support.listeners import is_loopback, list_listeners
from tests.support.ports import HeldPort


class Executed:
    """Raises an exception where it is unpickled."""

    def __reduce__(self) -> Any:
        return int, ("executed",)


PICKLED = pickle.dumps(Executed())


def signed(store: Any, secret: str = "secret", scope: str = "run/0") -> SignedStore:
    return SignedStore(store, secret, scope)


class TestSignedStore:
    def test_values_of_a_pod_with_the_secret_are_read(self) -> None:
        store = HashStore()
        assert signed(store).read("key") is None
        signed(store).write("key", {"a": [1, "b"]})
        assert signed(store).read("key") == {"a": [1, "b"]}

    @pytest.mark.parametrize(
        ("secret", "scope", "key"),
        [("other", "run/0", "key"), ("", "run/0", "key"), ("secret", "run/1", "key"), ("secret", "run/0", "another")],
    )
    def test_value_of_another_secret_round_or_key_is_ignored(self, secret: str, scope: str, key: str) -> None:
        store = HashStore()
        signed(store, secret, scope).write(key, 1)
        store.set("run/0/key", store.get(f"{scope}/{key}"))
        assert signed(store).read("key") is None

    @pytest.mark.parametrize("value", [b"", b"x", b"\xff\xfe", b"0" * 64 + b"1", b"1" * 64 + b"[" * 100_000, PICKLED])
    def test_unsigned_bytes_are_ignored_and_not_executed(self, value: bytes) -> None:
        store = HashStore()
        store.set("run/0/key", value)
        assert signed(store).read("key") is None
        assert signed(store).read_log("key") == []

    def test_value_beyond_the_limit_is_ignored(self, monkeypatch: pytest.MonkeyPatch) -> None:
        store = HashStore()
        signed(store).write("key", "x" * 100)
        monkeypatch.setattr(stores, "VALUE_LIMIT", 100)
        assert signed(store).read("key") is None

    def test_log_has_the_valid_values_in_order(self) -> None:
        store = HashStore()
        signed(store).append("log", [0, "a"])
        store.append("run/0/log", "an unsigned line\n")
        signed(store, "other").append("log", [1, "b"])
        signed(store).append("log", [2, "c"])
        assert signed(store).read_log("log") == [[0, "a"], [2, "c"]]

    def test_many_values_are_read_at_once(self) -> None:
        store = HashStore()
        signed(store).write("beats/0", 1)
        store.set("run/0/beats/1", "2")
        assert signed(store).read_all(["beats/0", "beats/1"]) == [1, None]


@pytest.mark.parametrize(("limit", "expected"), [(None, 512 << 20), (8 << 30, 512 << 20), (1 << 30, 128 << 20)])
def test_store_takes_at_most_one_eighth_of_container(
    monkeypatch: pytest.MonkeyPatch, limit: int | None, expected: int
) -> None:
    monkeypatch.setattr(stores, "read_memory_limit", lambda: limit)
    assert stores.compute_memory_limit() == expected


class TestHostStore:
    def test_store_listens_on_its_address_only(self) -> None:
        store = host_store("127.0.0.1", 0)
        assert [host for host, port in list_listeners([os.getpid()]) if port == store.port] == ["127.0.0.1"]
        client = TCPStore("127.0.0.1", store.port, wait_for_workers=False)
        client.set("key", "value")
        assert store.get("key") == b"value"

    @pytest.mark.parametrize(("version", "expected"), [("2.6.0+cu124", False), ("2.7.1", False), ("2.8.0", True)])
    def test_backend_can_take_listening_socket_in_every_version(
        self, monkeypatch: pytest.MonkeyPatch, version: str, expected: bool
    ) -> None:
        monkeypatch.setattr(torch, "__version__", TorchVersion(version))
        assert host_store("127.0.0.1", 0).libuvBackend == expected

    def test_store_without_an_address_listens_everywhere(self) -> None:
        store = host_store("", 0)
        (address,) = {host for host, port in list_listeners([os.getpid()]) if port == store.port}
        assert not is_loopback(address)

    def test_taken_port_is_reported(self) -> None:
        held = HeldPort()
        ours, theirs = socket.socketpair()
        guard, guard_end = os.pipe()
        with socket.create_server(("127.0.0.1", held.number)), pytest.raises(PortTakenError, match="ddress already in"):
            fork_store("127.0.0.1", held.number, guard, theirs)
        for descriptor in (guard, guard_end):
            os.close(descriptor)
        ours.close()
        theirs.close()
        held.stop()


_M_MMAP_THRESHOLD = -3  # of malloc.h: a greater block is never taken from the heap


def write_until_refused(store: Any, value: str) -> int:
    """Return the number of values that the store has accepted; 100 at most."""
    for number in range(100):
        try:
            store.set(f"key-{number}", value)
        except RuntimeError:
            return number
    return 100


def test_outsider_cannot_fill_memory_of_pod_and_store_continues(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "MEMORY_LIMIT", 64 << 20)
    # The forked store could otherwise put values into memory that former tests have freed, beside the limit.
    ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 1 << 20)
    held = HeldPort()
    ours, theirs = socket.socketpair()
    guard, guard_end = os.pipe()
    pid = fork_store("127.0.0.1", held.number, guard, theirs)
    try:
        outsider = TCPStore("127.0.0.1", held.number, wait_for_workers=False)
        written = write_until_refused(outsider, "x" * (8 << 20))
        assert 0 < written < 50  # the stacks of former tests' threads, which the forked store frees, add to the limit
        pod = signed(TCPStore("127.0.0.1", held.number, wait_for_workers=False))
        pod.write("key", 1)
        assert pod.read("key") == 1
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    for descriptor in (guard, guard_end):
        os.close(descriptor)
    ours.close()
    theirs.close()
    held.stop()


def test_store_that_does_not_respond_delays_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    responded = threading.Event()
    monkeypatch.setattr(stores, "_SECONDS_FOR_STORE", 0.05)
    assert query_store(lambda: responded.wait(300)) is None
    monkeypatch.undo()
    assert query_store(lambda: 3) == 3
    responded.set()


def test_store_that_has_ended_returns_nothing() -> None:
    def fail() -> None:
        raise RuntimeError("connection reset")

    assert query_store(fail) is None
    assert query_store(lambda: 3) == 3


def test_calls_of_the_store_share_a_thread_until_one_does_not_return(monkeypatch: pytest.MonkeyPatch) -> None:
    first = query_store(threading.current_thread)
    assert query_store(threading.current_thread) is first
    returned = threading.Event()
    monkeypatch.setattr(stores, "_SECONDS_FOR_STORE", 0.05)
    assert query_store(lambda: returned.wait(300)) is None
    monkeypatch.undo()
    assert query_store(threading.current_thread) is not first
    returned.set()
    first.join(60)
    assert not first.is_alive()

"""Requests to pods for what they know of their peers, against real servers on loopback."""

from __future__ import annotations

import asyncio

import pytest

from ddp_operator.features.lost_nodes import contacts
from ddp_operator.features.lost_nodes.contacts import Contact, fetch_peers
from ddp_pod.contract.peers import PeerContact, PeerReport

BODY = b'{"pod": 2, "contacts": [{"pod": 3, "silentSeconds": 4.5}]}'
REPORT = PeerReport(pod=2, contacts=(PeerContact(pod=3, silent_seconds=4.5),))


async def ask(response: bytes | None) -> tuple[Contact, bytes]:
    """Return the contact with a server that sends a response, or none, and the request that it got."""
    requests = []
    done = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        requests.append(await reader.readuntil(b"\r\n\r\n"))
        if response is None:
            await done.wait()
        else:
            writer.write(response)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        contact = await fetch_peers("127.0.0.1", server.sockets[0].getsockname()[1], 0)
        done.set()
    return contact, requests[0]


async def test_report_of_peers_is_requested_and_read() -> None:
    contact, request = await ask(b"HTTP/1.0 200 OK\r\n\r\n" + BODY)

    assert contact == Contact("Answers", REPORT)
    assert request == b"GET /peers?wait=0 HTTP/1.0\r\nHost: 127.0.0.1\r\n\r\n"


@pytest.mark.parametrize(
    "response",
    [
        b"",
        b"HTTP/1.0 404 Not Found\r\n\r\n",
        b"SSH-2.0-OpenSSH\r\n",
        b"HTTP/1.0 200 OK\r\n\r\nno JSON",
        b"HTTP/1.0 200 OK\r\n\r\n" + b"[" * 10_000,
        b"HTTP/1.0 200 OK\r\n\r\n" + b" " * (1 << 20) + BODY,
    ],
)
async def test_pod_without_a_usable_report_answers(response: bytes) -> None:
    contact, _ = await ask(response)

    assert contact == Contact("Answers")


async def test_pod_that_accepts_and_does_not_respond_is_frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contacts, "RESPONSE_SECONDS", 0.2)

    contact, _ = await ask(None)

    assert contact == Contact("Frozen")


async def test_refused_connection_is_an_answer_of_the_machine_alone(unused_tcp_port: int) -> None:
    assert await fetch_peers("127.0.0.1", unused_tcp_port, 0) == Contact("Refused")

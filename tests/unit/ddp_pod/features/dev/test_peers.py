"""The link of pod 0 of `ddp dev` to the holder of another pod, over real sockets."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from ddp_pod.base.pod import Pod
from ddp_pod.features.dev import peers
from ddp_pod.features.dev.link import Link, LinkBroken, open_link
from ddp_pod.features.dev.peers import Peer, PeerServer
from ddp_pod.features.dev.processes import RunEnd
from ddp_pod.features.dev.runs import RunPlan
from tests.support.launcher_config import launcher_pod
from tests.support.ports import HeldPort

SOON = 60.0
FIRST = RunPlan(1, ("train.py",))


class Runs:
    """The runs of the other pod."""

    plan = FIRST
    is_running = False
    is_spare = False
    end: RunEnd | None = None

    async def stop(self) -> None:
        """Fail, as no method of the holder is expected to."""
        raise ArithmeticError("a mistake of ours")


@pytest.fixture
def pod(tmp_path: Path) -> Any:
    """Return pod 1 with a port that is free on its address."""
    with HeldPort() as port:
        number = port.number
    return launcher_pod(tmp_path, nodes=2, node=1, port=number, secret="secret")


async def ignore(peer: Peer) -> None:
    """Take a state of the peer."""


@pytest.fixture
async def follow() -> AsyncIterator[Callable[[Pod], Peer]]:
    """Return a function that makes pod 0 keep a connection to a pod."""
    following: list[asyncio.Task[None]] = []

    def start(pod: Pod) -> Peer:
        peer = Peer(dataclasses.replace(pod, node=0), pod.node, ignore)
        following.append(asyncio.create_task(peer.follow()))
        return peer

    yield start
    for task in following:
        task.cancel()
    await asyncio.gather(*following, return_exceptions=True)


@pytest.mark.parametrize("message", [{"run": 2}, {"id": 77}, {"run": "none", "running": 1, "end": {"code": "x"}}])
async def test_pod_0_connects_again_after_a_message_that_it_cannot_read(
    pod: Pod, follow: Callable[[Pod], Peer], message: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "_LONGEST_PAUSE", 0.05)
    links: list[Link] = []
    again = asyncio.Event()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        links.append(await open_link(reader, writer, pod.secret, pod.run_id, caller=False))
        if len(links) > 1:
            again.set()
        await links[-1].receive()
        await links[-1].send(message)

    server = await asyncio.start_server(accept, pod.address, pod.port)
    follow(pod)
    await asyncio.wait_for(again.wait(), SOON)
    server.close()
    for link in links:
        link.close()


async def test_pod_0_gets_in_although_idle_strangers_stay(
    pod: Pod, follow: Callable[[Pod], Peer], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = await PeerServer(pod, Runs(), lambda: None).listen()  # type: ignore[arg-type]
    strangers = [await asyncio.open_connection(pod.address, pod.port) for _ in range(40)]
    for reader, _ in strangers[-16:]:
        await asyncio.wait_for(reader.readexactly(16), SOON)  # its random number: it is accepted
    monkeypatch.setattr(peers, "_SECONDS_TO_CONNECT", 3600.0)
    peer = follow(pod)
    await asyncio.wait_for(peer.seen.wait(), SOON)
    for _, writer in strangers:
        writer.close()
    server.close()


async def test_error_in_a_pod_ends_the_request_of_pod_0(pod: Pod, follow: Callable[[Pod], Peer]) -> None:
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
    server = await PeerServer(pod, Runs(), lambda: None).listen()  # type: ignore[arg-type]
    peer = follow(pod)
    await asyncio.wait_for(peer.seen.wait(), SOON)
    with pytest.raises(LinkBroken):
        await asyncio.wait_for(peer.request("stop"), SOON)
    server.close()


async def test_run_that_is_asked_for_twice_is_not_started_again(pod: Pod, follow: Callable[[Pod], Peer]) -> None:
    runs = Runs()
    runs.is_running = True
    server = await PeerServer(pod, runs, lambda: None).listen()  # type: ignore[arg-type]
    peer = follow(pod)
    await asyncio.wait_for(peer.seen.wait(), SOON)
    await asyncio.wait_for(peer.start(FIRST), SOON)
    assert peer.state is not None
    assert peer.state.running
    server.close()

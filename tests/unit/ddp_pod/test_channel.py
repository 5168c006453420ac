"""The agent's end of its channel to the launcher."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from ddp_pod.contract.frames import read_frame
from ddp_pod.torchrun.channel import Release, Request
from ddp_pod.torchrun.frames import decode, encode
from ddp_pod.torchrun.launcher_channel import LauncherChannel


@pytest.fixture
def ends() -> Iterator[tuple[LauncherChannel, socket.socket]]:
    agent, launcher = socket.socketpair()
    with agent, launcher:
        yield LauncherChannel(agent), launcher


def test_late_reply_answers_its_own_request(ends: tuple[LauncherChannel, socket.socket]) -> None:
    agent, launcher = ends

    def reply() -> None:
        for _ in range(3):
            request: Request = decode(read_frame(launcher))
            time.sleep(0.1)
            launcher.sendall(encode(request.asked))

    thread = threading.Thread(target=reply)
    thread.start()
    assert [agent.request(number) for number in range(3)] == [0, 1, 2]
    thread.join()


def test_launcher_that_has_ended_releases_and_answers_nothing(ends: tuple[LauncherChannel, socket.socket]) -> None:
    agent, launcher = ends
    launcher.sendall(encode(Release()))
    assert agent.wait_for_release()
    launcher.sendall(encode(Release())[:-1])
    launcher.shutdown(socket.SHUT_WR)
    with pytest.raises(EOFError):
        agent.request(0)
    assert not agent.wait_for_release()

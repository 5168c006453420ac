"""The agent's end of its channel to the launcher."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from ddp_pod.torchrun.channel import RELEASE, LauncherChannel


@pytest.fixture
def launcher() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as end:
        accepted, _ = server.accept()
        with accepted:
            agents.append(LauncherChannel(end))
            yield accepted
            agents.pop()._replies.close()


agents: list[LauncherChannel] = []


def test_late_reply_answers_its_own_request(launcher: socket.socket) -> None:
    def reply() -> None:
        with launcher.makefile("r") as requests:
            for _ in range(3):
                number = json.loads(requests.readline())["number"]
                time.sleep(0.2)
                launcher.sendall(json.dumps({"reply": number}).encode() + b"\n")

    thread = threading.Thread(target=reply)
    thread.start()
    assert [agents[0].request({"number": number}) for number in range(3)] == [{"reply": n} for n in range(3)]
    thread.join()


def test_launcher_that_has_ended_releases_and_restarts_nothing(launcher: socket.socket) -> None:
    launcher.sendall(json.dumps(RELEASE).encode() + b"\n")
    assert agents[0].wait_for_release()
    launcher.sendall(b'{"restart": tr')
    launcher.shutdown(socket.SHUT_WR)
    assert agents[0].request({"failures": []}) == {}
    assert not agents[0].wait_for_release()

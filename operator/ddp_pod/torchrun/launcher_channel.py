"""The agent's end of its channel to the launcher."""

import socket
from typing import Any

from ..contract.frames import read_frame
from .channel import Release, Request
from .frames import decode, encode


class LauncherChannel:
    """The agent's end of the channel to the launcher."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel

    def report(self, event: object) -> None:
        """Send an event that needs no reply."""
        self._channel.sendall(encode(event))

    def request(self, event: object) -> Any:
        """Send an event and return the launcher's reply, however late. Raises: EOFError if the launcher has ended."""
        self.report(Request(event))
        return decode(read_frame(self._channel))

    def wait_for_release(self) -> bool:
        """Wait for the launcher. Returns False if it has closed the channel instead."""
        try:
            return isinstance(decode(read_frame(self._channel)), Release)
        except EOFError:
            return False

"""The order to start a pod that `ddp` sends a server of the launcher, which has imported PyTorch."""

import json
import socket
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from .frames import pack, receive_with_descriptors, send_with_descriptors

SERVER_COMMAND: Final = "podserver"  # the launcher's subcommand
DESCRIPTORS: Final = 3  # of an order: the pod's output, the pipe for its process id, and the lifeline


class PodStart(NamedTuple):
    """A pod to start. ``arguments``: those of the launcher, from ``run`` on; ``folder``: its working directory."""

    arguments: Sequence[str]
    environment: Mapping[str, str]
    folder: str


def send_start(orders: socket.socket, start: PodStart, descriptors: Sequence[int]) -> None:
    """Send an order with its file descriptors. Raises: OSError, if the server has ended."""
    send_with_descriptors(orders, pack(json.dumps(start._asdict()).encode()), descriptors)


def receive_start(orders: socket.socket) -> tuple[PodStart, list[int]] | None:
    """Return the next order and its file descriptors; None: there will be none."""
    order = receive_with_descriptors(orders, DESCRIPTORS)
    return None if order is None else (PodStart(**json.loads(order.data)), order.descriptors)

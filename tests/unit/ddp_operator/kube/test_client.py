"""The API client's connections."""

import socket
from typing import Any

import pytest

from ddp_operator.kube.client import SEND_BUFFER, ApiClient


async def nobody() -> Any:
    raise AssertionError("no call is made here")


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_kernel_gets_every_body_but_launchers_in_one_piece(family: socket.AddressFamily) -> None:
    """Other bodies have at most half of SEND_BUFFER (test_children). A late launcher does no harm: see SEND_BUFFER."""
    client = ApiClient(nobody)
    with client._make_socket((family, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", ("localhost", 443))) as made:
        room = made.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
    # The kernel adds its own overhead and doubles the requested size.
    assert room > 1.5 * SEND_BUFFER

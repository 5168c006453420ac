"""The API client's connections."""

import json
import socket
from typing import Any

import pytest

from ddp_operator.kube.client import ApiClient
from ddp_operator.manifests.children import load_launcher


async def nobody() -> Any:
    raise AssertionError("no call is made here")


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_the_largest_body_goes_to_the_kernel_in_one_piece(family: socket.AddressFamily) -> None:
    client = ApiClient(nobody)
    with client._make_socket((family, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", ("localhost", 443))) as made:
        room = made.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
    # The kernel counts its own overhead, too, and gives twice what it was asked for.
    assert room > 1.5 * len(json.dumps(load_launcher().files))

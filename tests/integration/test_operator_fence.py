"""The network of a leader is cut during a write: a write that the leader has abandoned does not arrive later."""

from __future__ import annotations

import json
import sys

import pytest

from tests.support import cut_network
from tests.support.network_namespace import run_in_namespace


def heard(*arguments: str) -> list[str]:
    """Return the requests that a server has received from a client whose write failed on a cut network."""
    requests: list[str] = json.loads(run_in_namespace(cut_network, *arguments))
    return requests


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux can be told when to let go of a call")
def test_abandoned_write_does_not_arrive_after_network_returns() -> None:
    assert heard("1") == ["GET /before", "GET /after"]


@pytest.mark.nightly
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux can be told when to let go of a call")
def test_abandoned_write_without_kernel_limit_arrives() -> None:
    assert heard() == ["GET /before", "POST /late", "GET /after"]

"""A peer behind a cut network, in a separate network namespace: the launcher finds it in the kernel's table."""

from __future__ import annotations

import json
import sys

import pytest

from tests.support import cut_peer
from tests.support.network_namespace import run_in_namespace


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has /proc/net/tcp")
def test_cut_off_peer_is_reported_and_healthy_peer_is_not() -> None:
    before, after = json.loads(run_in_namespace(cut_peer))
    assert (before, after) == ([], ["127.0.0.1"])

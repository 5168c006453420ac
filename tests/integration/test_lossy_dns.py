"""A DNS server that loses packets, in a separate network namespace: a restart resolves the name of pod 0."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.support import lossy_dns
from tests.support.network_namespace import run_in_namespace


@pytest.mark.skipif(sys.platform != "linux", reason="only glibc has these options")
def test_processes_of_a_launcher_repeat_a_lost_query_sooner_than_the_c_library(tmp_path: Path) -> None:
    order = run_in_namespace(lossy_dns, str(tmp_path / "resolv.conf")).split()
    assert order == ["launcher", "default"]

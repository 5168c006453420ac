"""A leader whose network is cut in the midst of a write: what it has given up does not arrive later on."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import cut_network

UNSHARE = ("unshare", "--user", "--map-root-user", "--net", "--fork", "--kill-child")


def heard(*arguments: str) -> list[str]:
    """Return what a server has heard of a client whose write met a network that was cut."""
    lacking = [name for name in ("unshare", "ip", "nft") if shutil.which(name) is None]
    if lacking:
        pytest.skip(f"not found: {', '.join(lacking)}")
    command = [*UNSHARE, sys.executable, str(Path(cut_network.__file__)), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    if re.search(r"not permitted|[Pp]ermission denied|[Rr]ead-only|No such device|not supported", done.stderr):
        pytest.skip(f"no network namespaces here: {done.stderr.strip().splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    requests: list[str] = json.loads(done.stdout)
    return requests


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux can be told when to let go of a call")
def test_a_write_that_was_given_up_does_not_arrive_when_the_network_is_back() -> None:
    assert heard("1") == ["GET /before", "GET /after"]


@pytest.mark.nightly
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux can be told when to let go of a call")
def test_without_its_limit_a_write_that_was_given_up_would_arrive() -> None:
    assert heard() == ["GET /before", "POST /late", "GET /after"]

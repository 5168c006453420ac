"""Programs for tests that cut the network of a separate namespace."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from types import ModuleType
from typing import Final

import pytest

_UNSHARE: Final = ("unshare", "--user", "--map-root-user", "--net", "--mount", "--fork", "--kill-child")
_IMPOSSIBLE: Final = re.compile(r"not permitted|[Pp]ermission denied|[Rr]ead-only|No such device|not supported")


def run_in_namespace(program: ModuleType, *arguments: str) -> str:
    """Return the output of a program in a new network and mount namespace; skip the test if none can be created."""
    missing = [name for name in ("unshare", "ip", "nft") if shutil.which(name) is None]
    if missing:
        pytest.skip(f"not found: {', '.join(missing)}")
    command = [*_UNSHARE, sys.executable, str(program.__file__), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    if _IMPOSSIBLE.search(done.stderr):
        pytest.skip(f"no network namespaces here: {done.stderr.strip().splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    return done.stdout

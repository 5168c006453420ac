"""The interpreter of test pods: that of the tests, or another one with another version of torch."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache

POD_PYTHON = os.environ.get("DDP_TEST_POD_PYTHON") or sys.executable
"""``make torch-versions`` sets it to a Python 3.9 with the oldest torch."""
IS_OTHER_PYTHON = sys.executable != POD_PYTHON


@cache
def has_fsdp2() -> bool:
    """Return whether the torch of pods has ``torch.distributed.fsdp.fully_shard``, which torch 2.6 introduced."""
    program = "from torch.distributed.fsdp import fully_shard"
    return subprocess.run([POD_PYTHON, "-c", program], stderr=subprocess.DEVNULL, check=False).returncode == 0

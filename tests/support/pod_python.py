"""The interpreter of test pods: that of the tests, or another one with another version of torch."""

from __future__ import annotations

import os
import sys

POD_PYTHON = os.environ.get("DDP_TEST_POD_PYTHON") or sys.executable
"""``make torch-versions`` sets it to a Python 3.10 with the oldest torch."""
IS_OTHER_PYTHON = sys.executable != POD_PYTHON

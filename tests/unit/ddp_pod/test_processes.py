"""Signals that stop a process."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest


@pytest.mark.parametrize("ignored", [(), ("SIGHUP",), ("SIGINT", "SIGQUIT"), ("SIGTERM",)])
def test_stop_signals_are_those_that_are_not_ignored_except_sigterm(ignored: tuple[str, ...]) -> None:
    script = f"""
import signal
for name in {ignored}:
    signal.signal(getattr(signal, name), signal.SIG_IGN)
from ddp_pod.contract.processes import STOP_SIGNALS
print(*(int(number) for number in STOP_SIGNALS))
"""
    found = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout.split()
    names = [signal.Signals(int(number)).name for number in found]
    every = ["SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT"]
    assert names == [name for name in every if name not in ignored or name == "SIGTERM"]

"""Processes: their state, and the signals that stop them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from ddp_pod.contract.processes import count_cpu_seconds, find_family, process_state
from ddp_pod.contract.signal_handlers import catches


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


def test_process_state_is_read() -> None:
    assert process_state(os.getpid()) in ("R", "S")
    assert process_state(2**22 + 1) == ""


def test_signal_handler_of_process_is_detected() -> None:
    before = signal.signal(signal.SIGUSR2, lambda *_: None)
    assert catches(os.getpid(), signal.SIGUSR2)
    signal.signal(signal.SIGUSR2, signal.SIG_DFL)
    assert not catches(os.getpid(), signal.SIGUSR2)
    signal.signal(signal.SIGUSR2, before)
    assert not catches(2**22 + 1, signal.SIGUSR2)
    assert os.getpid() in find_family(os.getppid())
    assert count_cpu_seconds([os.getpid()]) > 0
